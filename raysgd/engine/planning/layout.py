"""How a model is built: its stacks of blocks, and which weights tensor parallelism shards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from raysgd.engine.blocks import find_stacks, is_inside
from raysgd.engine.tensor_parallel import check_own_plan, make_tensor_plan
from raysgd.engine.tensor_parallel.attention import ShardedMultiheadAttention
from raysgd.engine.tensor_parallel.layers import ColumnLinear, RowLinear, Style
from raysgd.errors import ConfigError

#: What a layer with a sharded weight returns: each rank's own features; a sum over the ranks of products with the ranks' own
#: features; or the whole, as an embedding or an output layer does.
Kind = Literal["column", "row", "whole"]

_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_kv_heads")


@dataclass(frozen=True)
class Layout:
    """The blocks of a model, and its weights that tensor parallelism shards.

    Attributes:
        stacks: Blocks by the name of their list, in order.
        kinds: How weights and biases are sharded, by name: the kind, and the dimension.
        head_counts: Numbers of attention heads in the blocks, if a user's plan shards them.
        has_own_plan: Whether the kinds are those of a user's plan.
        obstacle: Why no weight can be sharded, or None.
    """

    stacks: Mapping[str, Mapping[str, nn.Module]]
    kinds: Mapping[str, tuple[Kind, int]] = field(default_factory=dict)
    head_counts: tuple[int, ...] = ()
    has_own_plan: bool = False
    obstacle: str | None = None

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [block for stack in self.stacks.values() for block in stack.items()]


def find_layout(model: nn.Module, tensor_plan: Any = None) -> Layout:
    """Find the blocks of a model, and how the engine shards its weights.

    Args:
        model: The model; it may be on the meta device.
        tensor_plan: A user's plan: torch's styles by module path, in which ``*`` matches one name. With None or a function, the
            weights are those of the engine's own plan.

    Raises:
        ConfigError: The user's plan is not one for this model.
    """
    stacks = find_stacks(model)
    if tensor_plan is not None:
        check_own_plan(model, tensor_plan)
    if isinstance(tensor_plan, Mapping):
        kinds = _read_users_plan(model, tuple(stacks), tensor_plan)
        heads = {count for stack in stacks.values() for block in stack.values() for count in _find_heads(block)}
        obstacle = None if kinds else "the tensor_plan shards no layer of the model"
        return Layout(stacks, kinds, tuple(sorted(heads)), has_own_plan=True, obstacle=obstacle)
    try:
        styles = make_tensor_plan(model, 1).styles
    except ConfigError as error:
        if tensor_plan is None:
            return Layout(stacks, obstacle=str(error))
        unknown = "it is not known which layers the function that is given as tensor_plan shards: give a dict of torch's styles"
        return Layout(stacks, obstacle=unknown)
    return Layout(stacks, _read_plan(model, styles))


def _read_plan(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, tuple[Kind, int]]:
    kinds: dict[str, tuple[Kind, int]] = {}
    for path, style in styles.items():
        module = model.get_submodule(path)
        for name, placement in style.placements.items():
            if getattr(module, name, None) is not None and (dim := getattr(placement, "dim", None)) is not None:
                kinds[f"{path}.{name}" if path else name] = (_kind_of(style), dim)
    return kinds


def _kind_of(style: Style) -> Kind:
    if style.layer is ShardedMultiheadAttention:
        return "column"
    if style.layer is RowLinear:
        return "whole" if style.options.get("is_split") else "row"
    return "column" if style.layer is ColumnLinear and not style.options.get("is_gathered") else "whole"


def _read_users_plan(model: nn.Module, stacks: tuple[str, ...], plan: Mapping[str, Any]) -> dict[str, tuple[Kind, int]]:
    patterns = {re.compile(re.escape(path).replace(r"\*", r"[^.]+")): style for path, style in plan.items()}
    kinds: dict[str, tuple[Kind, int]] = {}
    for path, module in model.named_modules():
        styles = [style for pattern, style in patterns.items() if pattern.fullmatch(path)]
        if not styles or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        is_column = isinstance(styles[-1], ColwiseParallel)
        if not is_column and not isinstance(styles[-1], RowwiseParallel):
            continue
        if not any(is_inside(path, stack) for stack in stacks):
            # What an embedding or a head returns is whole on each rank.
            kinds[f"{path}.weight"] = ("whole", 0 if is_column == isinstance(module, nn.Linear) else 1)
        else:
            kinds[f"{path}.weight"] = ("column", 0) if is_column else ("row", 1)
        if is_column and getattr(module, "bias", None) is not None:
            kinds[f"{path}.bias"] = ("column", 0)
    return kinds


def _find_heads(block: nn.Module) -> set[int]:
    found = set()
    for module in block.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in _HEADS:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    found.add(value)
    return found

"""How a model is built: its stacks of blocks, and which weights tensor parallelism can shard."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

#: How a weight is sharded: by its outputs, by its inputs, or by the rows of the vocabulary.
Kind = Literal["column", "row", "vocabulary"]

# Names of layers in transformers, torch and Megatron. A name that is in neither table is not sharded; whether the result
# is consistent is checked by the trace: what leaves a block must be whole on each rank.
_COLUMN = frozenset(
    """q_proj k_proj v_proj query key value query_key_value c_attn qkv qkv_proj q k v q_lin k_lin v_lin in_proj wq wk wv
    fc1 fc_in up_proj gate_proj gate_up_proj wi wi_0 wi_1 w1 w3 c_fc linear1 lin1 dense_h_to_4h intermediate.dense""".split()
)
_ROW = frozenset(
    """o_proj out_proj c_proj o out_lin wo fc2 fc_out down_proj w2 linear2 lin2 dense_4h_to_h output.dense
    attention.dense""".split()
)
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_kv_heads")


@dataclass(frozen=True)
class Layout:
    """The blocks of a model, and its weights that tensor parallelism can shard.

    Attributes:
        stacks: Blocks by the name of their list, in order.
        kinds: How weights and biases are sharded, by name: the kind, and the dimension.
        head_counts: Numbers of attention heads that were found in the blocks.
        unknown: Linear layers in blocks whose kind is not known.
    """

    stacks: Mapping[str, list[tuple[str, nn.Module]]]
    kinds: Mapping[str, tuple[Kind, int]] = field(default_factory=dict)
    head_counts: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [block for stack in self.stacks.values() for block in stack]


def find_layout(model: nn.Module) -> Layout:
    """Find the blocks of a model and how tensor parallelism can shard their weights."""
    stacks = _find_stacks(model)
    kinds: dict[str, tuple[Kind, int]] = {}
    heads: set[int] = set()
    unknown: list[str] = []
    for stack in stacks.values():
        for name, block in stack:
            _classify(name, block, kinds, unknown)
            heads |= _find_heads(block)
    for name, dim in _find_vocabulary(model, stacks):
        kinds[name] = ("vocabulary", dim)
    return Layout(stacks, kinds, tuple(sorted(heads)), tuple(unknown))


def read_own_plan(model: nn.Module, layout: Layout, plan: Mapping[str, Any]) -> Layout:
    """Return the layout with the kinds of a user's plan: torch's styles by module path, in which ``*`` matches one name."""
    patterns = {re.compile(re.escape(path).replace(r"\*", r"[^.]+")): style for path, style in plan.items()}
    inside = tuple(layout.stacks)
    kinds: dict[str, tuple[Kind, int]] = {}
    for path, module in model.named_modules():
        styles = [style for pattern, style in patterns.items() if pattern.fullmatch(path)]
        if not styles or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        is_column = isinstance(styles[-1], ColwiseParallel)
        if not is_column and not isinstance(styles[-1], RowwiseParallel):
            continue
        if not any(_is_inside(path, stack) for stack in inside):
            # What an embedding or a head returns is whole on each rank.
            kinds[f"{path}.weight"] = ("vocabulary", 0 if is_column == isinstance(module, nn.Linear) else 1)
        else:
            kinds[f"{path}.weight"] = ("column", 0) if is_column else ("row", 1)
        if is_column and getattr(module, "bias", None) is not None:
            kinds[f"{path}.bias"] = ("column", 0)
    return Layout(layout.stacks, kinds, layout.head_counts)


def _find_stacks(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Find the outermost lists of two or more layers: children of one class, or containers that all have parameters."""
    stacks: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if any(_is_inside(name, outer) for outer in stacks):
            continue
        children = list(module.named_children())
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_list and len(children) > 1 and _are_layers([child for _, child in children]):
            stacks[name] = [(f"{name}.{key}" if name else key, child) for key, child in children]
    return stacks


def _is_inside(name: str, stack: str) -> bool:
    return bool(name) and (not stack or name.startswith(f"{stack}."))


def _are_layers(children: list[nn.Module]) -> bool:
    if not all(next(child.parameters(), None) is not None for child in children):
        return False
    if len({type(child) for child in children}) == 1:
        return True
    return all(next(child.children(), None) is not None for child in children)


def _classify(block_name: str, block: nn.Module, kinds: dict[str, tuple[Kind, int]], unknown: list[str]) -> None:
    for name, module in block.named_modules():
        full = f"{block_name}.{name}" if name else block_name
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            kinds[f"{full}.in_proj_weight"] = kinds[f"{full}.in_proj_bias"] = ("column", 0)
        is_transposed = type(module).__name__ == "Conv1D"  # of transformers: its weight is (inputs, outputs)
        if not (isinstance(module, nn.Linear) or is_transposed):
            continue
        kind = _kind_of(name)
        if kind is None:
            unknown.append(full)
        else:
            outputs, inputs = (1, 0) if is_transposed else (0, 1)
            kinds[f"{full}.weight"] = (kind, outputs if kind == "column" else inputs)
            if kind == "column" and module.bias is not None:
                kinds[f"{full}.bias"] = (kind, 0)


def _kind_of(name: str) -> Kind | None:
    parts = name.split(".")
    for tail in (".".join(parts[-2:]), parts[-1]):
        if tail in _COLUMN:
            return "column"
        if tail in _ROW:
            return "row"
    return None


def _find_heads(block: nn.Module) -> set[int]:
    found = set()
    for module in block.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in _HEADS:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    found.add(value)
    return found


def _find_vocabulary(model: nn.Module, stacks: Mapping[str, Iterable[tuple[str, nn.Module]]]) -> list[tuple[str, int]]:
    """Find the largest embedding outside the blocks, and linear layers with as many outputs as it has rows.

    As in the engine's tensor plan, it is the vocabulary if transformers says so or if it is larger than all linear layers.
    """
    outside = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if not any(_is_inside(name, stack) for stack in stacks)
    ]
    largest = max(
        (one for _, one in outside if isinstance(one, nn.Embedding)), key=lambda one: one.weight.numel(), default=None
    )
    linear = max((one.weight.numel() for one in model.modules() if isinstance(one, nn.Linear)), default=0)
    if largest is None or (not hasattr(model, "get_input_embeddings") and largest.weight.numel() <= linear):
        return []
    rows = largest.num_embeddings
    return [
        (f"{name}.weight", 0)
        for name, module in outside
        if (isinstance(module, nn.Embedding) and module.num_embeddings == rows)
        or (isinstance(module, nn.Linear) and module.out_features == rows)
    ]

"""The tensor-parallel plans of transformers: what the configuration of a model says about its linear layers.

A plan has a style for each layer, such as ``{"layers.*.self_attn.q_proj": "colwise"}``. transformers applies it layer by layer.
Here the layers of one attention or feed-forward module are a unit, which has one collective in each pass.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from raysgd.engine.tensor_parallel.structure import Linear, Unit, UnsureError, first_argument, has_linear_weights, sizes

#: Styles of layers between which the ranks have their own heads or features.
_SHARDED = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
#: Styles of layers whose inputs and outputs are whole on every rank.
_WHOLE = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
#: Arguments of a unit's module that have hidden states of another stack.
_OTHER_STATES = ("encoder_hidden_states", "key_value_states")
#: What a block may take in addition to hidden states: its attention alone uses it, for which the sequence is whole.
_BLOCK_ARGUMENTS = frozenset(
    """hidden_states attention_mask position_ids position_embeddings past_key_values use_cache cache_position layer_past
    output_attentions head_mask kwargs""".split()
)


def planned_layers(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return the styles that transformers gives to layers of a model, by the path of their parent and by their own name."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not plan or getattr(model, "base_model", None) is not model:
        return {}
    found: dict[str, dict[str, str]] = {}
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        style = plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is not None and style != "replicate":
            parent, _, child = name.rpartition(".")
            found.setdefault(parent, {})[child] = style
    return found


def planned_unit(model: Any, module: Any, styles: Mapping[str, str]) -> Unit:
    """Make the unit of a module from the styles of its layers.

    Args:
        model: The model of transformers that has the plan.
        module: The module, such as an attention layer.
        styles: The styles by the layers' names.

    Raises:
        UnsureError: A style is not known, or the module's layers are not a pair of colwise and rowwise layers.
    """
    for name, style in styles.items():
        if style not in _SHARDED and style not in _WHOLE:
            raise UnsureError(f"transformers' plan gives its {name} the style {style!r}, which is not known here")
        if name in module._parameters:
            raise UnsureError(f"transformers' plan shards its parameter {name}, which is not a linear layer's")
    is_whole = not _SHARDED & set(styles.values())
    layers = {name: _WHOLE.get(style, style) if is_whole else style for name, style in styles.items()}
    columns, rows, summed = (
        [name for name, style in layers.items() if style == wanted]
        for wanted in ("colwise", "rowwise", "replicated_with_grad_allreduce")
    )
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    counts = _count(module, columns, rows, head_dim)
    if is_whole:
        return Unit(counts, [Linear(one, is_input=True) for one in columns], rows, is_whole=True)
    if not columns or len(rows) != 1 or len(columns) + len(rows) + len(summed) < len(layers):
        raise UnsureError(
            f"transformers' plan gives it {', '.join(f'{name}: {style}' for name, style in styles.items())}, and colwise layers "
            "that end in one rowwise layer are expected"
        )
    _check_forward(model, module)
    own = {f"{name}." for name in styles}
    others = [name for name, _ in module.named_parameters() if not name.startswith(tuple(own))]
    if others:
        raise UnsureError(f"transformers' plan does not say what becomes of its {', '.join(others)}")
    return Unit(
        counts,
        [Linear(one) for one in columns],
        rows,
        summed=summed,
        region="",
        inputs=(first_argument(type(module)), *_OTHER_STATES),
        weights=None if head_dim is None else 1,
    )


def check_sequence(model: Any, path: str, block: nn.Module, units: Mapping[str, Unit]) -> None:
    """Check that a block can run on parts of the sequence.

    Args:
        model: The model of transformers that has the plan.
        path: The block's path below the model.
        block: The block.
        units: The block's units, by their paths below it.

    Raises:
        UnsureError: It cannot.
    """
    name = path.rpartition(".")[0]
    parameters = tuple(inspect.signature(type(block).forward).parameters)[1:]
    others = sorted(set(parameters) - _BLOCK_ARGUMENTS)
    if parameters[0] != "hidden_states" or others:
        raise UnsureError(
            f"sequence_parallel=True does not know how a {type(block).__name__} uses {others or parameters[0]}"
        )
    _check_forward(model, block)
    inside = tuple(f"{one}." for one, unit in units.items() if not unit.is_whole)
    for at, module in block.named_modules():
        is_outside = not f"{at}.".startswith(inside)
        if is_outside and (has_linear_weights(module) or (not at and dict(module.named_parameters(recurse=False)))):
            raise UnsureError(
                f"sequence_parallel=True needs that each rank has its own heads and features, and its {at or 'weights'} is whole"
            )
    if not _is_plain_loop(model, name):
        raise UnsureError(
            f"sequence_parallel=True does not know what {type(model).__name__} does between its {name or 'blocks'}"
        )


def _count(module: Any, columns: Iterable[str], rows: Iterable[str], head_dim: int | None) -> dict[str, int]:
    counts = {}
    for name in columns:
        outputs = sizes(module.get_submodule(name))[1]
        if head_dim is None or outputs % head_dim:
            counts[f"outputs of {name}"] = outputs
        else:
            counts[f"heads of {name}"] = outputs // head_dim
    return counts | {f"inputs of {name}": sizes(module.get_submodule(name))[0] for name in rows}


def _check_forward(model: Any, module: nn.Module) -> None:
    """Check that a module's forward pass is one of transformers, or of the package that the plan is from."""
    known = ("transformers.models", type(model.config).__module__.rpartition(".")[0])
    name = type(module).forward.__module__
    if not any(f"{name}.".startswith(f"{one}.") for one in known if one):
        raise UnsureError(f"its class {type(module).__name__} has a forward pass of its own")


def _is_plain_loop(model: Any, name: str) -> bool:
    """Whether a model's forward pass hands hidden states through the blocks of a list, and does nothing else with them."""
    if len(model.get_submodule(name)) > getattr(model.config, "num_hidden_layers", 0):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward))))
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For) and f"self.{name}" in ast.unparse(one.iter)]
    if len(loops) != 1:
        return False
    uses = [one for one in loops[0].body if "hidden_states" in ast.unparse(one)]
    return (
        len(uses) == 1
        and isinstance(uses[0], ast.Assign)
        and isinstance(uses[0].value, ast.Call)
        and [ast.unparse(one) for one in (*uses[0].targets, *uses[0].value.args[:1])] == ["hidden_states"] * 2
    )

"""What the layers of a model are to tensor parallelism: found from their classes, shapes and connections.

A unit is a group of layers whose inputs and outputs all ranks have, and inside of which they share heads or features: an
attention layer, or a feed-forward layer. Where transformers has no plan of its own, a known class has a function here that reads
a module's sizes and says which linear layer feeds which. A subclass with another forward pass has none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

_GPT2 = "transformers.models.gpt2.modeling_gpt2."
_BERT = "transformers.models.bert.modeling_bert."
_T5 = "transformers.models.t5.modeling_t5."
_CONV1D = "transformers.pytorch_utils.Conv1D"
_ENCODER_LAYER = "torch.nn.modules.transformer.TransformerEncoderLayer"
_DECODER_LAYER = "torch.nn.modules.transformer.TransformerDecoderLayer"

#: Classes of blocks, which pass hidden states on to the next block of their stack.
BLOCKS = frozenset(
    {
        _GPT2 + "GPT2Block",
        _BERT + "BertLayer",
        _T5 + "T5Block",
        _ENCODER_LAYER,
        _DECODER_LAYER,
    }
)

#: Classes that call the blocks of a list one after the other.
STACKS = frozenset(
    {
        _GPT2 + "GPT2Model",
        _BERT + "BertEncoder",
        _T5 + "T5Stack",
        "torch.nn.modules.transformer.TransformerEncoder",
        "torch.nn.modules.transformer.TransformerDecoder",
    }
)


@dataclass
class Linear:
    """A linear layer of a unit.

    Attributes:
        path: Its path below the unit's module.
        num_parts: The fused layers in it.
        is_input: Whether its input comes from outside of the unit, and not through the unit's module.
    """

    path: str
    num_parts: int = 1
    is_input: bool = False


@dataclass
class Unit:
    """A group of layers inside of which ranks share heads or features.

    Attributes:
        counts: What the group's size must divide, by name: heads, key-value heads, features.
        columns: The linear layers at the unit's start.
        rows: The linear layers at its end.
        region: The module, below the unit's own, through which inputs enter; None if they enter through `columns`.
        inputs: The region's arguments that come from outside: hidden states, and then those of another stack.
        weights: Where the region's outputs have the attention's weights; None if there are none.
        local: The attributes that count heads or features in the region's forward pass.
        own_dropouts: Dropouts inside of a unit without a region.
        summed: Layers inside of the unit that all ranks have, and whose gradients are those of a rank's own heads.
        head_embeddings: Embeddings with a column for each head.
        is_multihead: Whether the unit is an ``nn.MultiheadAttention``, which holds its weights itself.
        is_whole: Whether the outputs of `columns` are gathered and the inputs of `rows` are split, so that everything between
            them is whole on every rank.
    """

    counts: dict[str, int]
    columns: list[Linear] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    region: str | None = None
    inputs: tuple[str, ...] = ("hidden_states",)
    weights: int | None = 1
    local: dict[str, int] = field(default_factory=dict)
    own_dropouts: list[str] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    head_embeddings: list[str] = field(default_factory=list)
    is_multihead: bool = False
    is_whole: bool = False


class UnsureError(Exception):
    """The structure of a module is not what its class promises."""


def qualified_name(of: type) -> str:
    """Return a class's name with its module's."""
    return f"{of.__module__}.{of.__qualname__}"


def known_class(module: nn.Module, names: frozenset[str] | dict[str, Any]) -> str | None:
    """Return which of the classes the module has: its own class, or a base class whose forward pass it has kept.

    Raises:
        UnsureError: The module has one of the classes, but another forward pass.
    """
    for base in type(module).__mro__:
        if (name := qualified_name(base)) in names:
            if type(module).forward is not base.forward:  # type: ignore[attr-defined]
                raise UnsureError(f"its class {type(module).__name__} changes the forward pass of {base.__name__}")
            return name
    return None


def first_argument(of: type) -> str:
    """Return the name of the first argument of a class's forward pass."""
    return list(inspect.signature(of.forward).parameters)[1]  # type: ignore[attr-defined]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer as torch or transformers have it, and not a class derived from it."""
    return type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear) or (
        qualified_name(type(module)) == _CONV1D
    )


def holds_for_others(module: nn.Module) -> bool:
    """Whether a module's own parameters are used by other modules only: BERT's output bias, tied to its output layer's."""
    return qualified_name(type(module)) == _BERT + "BertLMPredictionHead"


def has_linear_weights(module: nn.Module) -> bool:
    """Whether a module holds weights that tensor parallelism would share: a linear layer, or anything unknown."""
    return not isinstance(module, nn.Embedding) and any(one.ndim > 1 for one in module.parameters(recurse=False))


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return a linear layer's numbers of inputs and outputs.

    Raises:
        UnsureError: The module is another kind of layer.
    """
    if not is_linear(module):
        raise UnsureError(f"it holds a {type(module).__name__} where a plain linear layer is expected")
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (second, first) if isinstance(module, nn.Linear) else (first, second)


def units_of(module: nn.Module) -> Iterator[Unit]:
    """Find the units that a module's class defines.

    Raises:
        UnsureError: The module has a known class, but another structure.
    """
    name = known_class(module, _READERS)
    if name is not None:
        yield from _READERS[name](module)


def _pair(
    module: Any, columns: list[Linear], row: str, heads: int | None = None, width: int | None = None, **more: Any
) -> Unit:
    """Make the unit of linear layers that end in one.

    Args:
        module: The unit's module.
        columns: The layers at its start.
        row: The path of the layer at its end.
        heads: Heads that the ranks share; None for features.
        width: Features of all heads; None: the outputs of the first layer.
        more: Further attributes of the unit.
    """
    width = width or sizes(module.get_submodule(columns[0].path))[1]
    for one in columns:
        _check(one.path, "outputs", sizes(module.get_submodule(one.path))[1], one.num_parts * width)
    _check(row, "inputs", sizes(module.get_submodule(row))[0], width)
    return Unit({"features": width} if heads is None else {"heads": heads}, columns, [row], **more)


def _check(path: str, kind: str, number: int, expected: int) -> None:
    if number != expected:
        raise UnsureError(f"{path} has {number} {kind}, and {expected} are expected")


def _check_class(module: nn.Module, *names: str) -> None:
    if known_class(module, frozenset(_BERT + name for name in names)) is None:
        raise UnsureError(f"it holds a {type(module).__name__}")


def _gpt2_attention(module: Any) -> Iterator[Unit]:
    embed, heads = module.embed_dim, module.embed_dim // module.head_dim
    columns = [Linear("c_attn", num_parts=2), Linear("q_attn")] if module.is_cross_attention else [Linear("c_attn", 3)]
    inputs, local = ("hidden_states", "encoder_hidden_states"), {"num_heads": module.num_heads, "split_size": embed}
    yield _pair(module, columns, "c_proj", heads, embed, region="", inputs=inputs, local=local)


def _gpt2_mlp(module: Any) -> Iterator[Unit]:
    yield _pair(module, [Linear("c_fc", is_input=True)], "c_proj")


def _bert_attention(module: Any) -> Iterator[Unit]:
    inner = module.self
    _check_class(inner, "BertSelfAttention", "BertCrossAttention")
    _check_class(module.output, "BertSelfOutput")
    heads, width = inner.num_attention_heads, inner.all_head_size
    columns = [Linear(f"self.{name}") for name in ("query", "key", "value")]
    inputs = ("hidden_states", "encoder_hidden_states")
    local = {"num_attention_heads": heads, "all_head_size": width}
    yield _pair(module, columns, "output.dense", heads, width, region="self", inputs=inputs, local=local)


def _bert_layer(module: Any) -> Iterator[Unit]:
    _check_class(module.intermediate, "BertIntermediate")
    _check_class(module.output, "BertOutput")
    yield _pair(module, [Linear("intermediate.dense", is_input=True)], "output.dense")


def _t5_attention(module: Any) -> Iterator[Unit]:
    yield _pair(
        module,
        [Linear(name) for name in "qkv"],
        "o",
        module.n_heads,
        module.n_heads * module.key_value_proj_dim,
        region="",
        inputs=("hidden_states", "key_value_states"),
        weights=2,
        local={"n_heads": module.n_heads, "inner_dim": module.inner_dim},
        head_embeddings=["relative_attention_bias"] if module.has_relative_attention_bias else [],
    )


def _t5_dense(module: Any) -> Iterator[Unit]:
    firsts = [Linear("wi_0"), Linear("wi_1")] if hasattr(module, "wi_0") else [Linear("wi")]
    yield _pair(module, firsts, "wo", region="", weights=None)


def _multihead_attention(module: Any) -> Iterator[Unit]:
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsureError("add_bias_kv=True and add_zero_attn=True add a key that no rank owns")
    for kind, number in zip(("inputs", "outputs"), sizes(module.out_proj), strict=True):
        _check("out_proj", kind, number, module.embed_dim)
    yield Unit({"heads": module.num_heads}, [], ["out_proj"], is_multihead=True)


def _transformer_layer(module: Any) -> Iterator[Unit]:
    yield _pair(module, [Linear("linear1", is_input=True)], "linear2", own_dropouts=["dropout"])


_READERS: dict[str, Callable[[Any], Iterator[Unit]]] = {
    _GPT2 + "GPT2Attention": _gpt2_attention,
    _GPT2 + "GPT2MLP": _gpt2_mlp,
    _BERT + "BertAttention": _bert_attention,
    _BERT + "BertLayer": _bert_layer,
    _T5 + "T5Attention": _t5_attention,
    _T5 + "T5DenseActDense": _t5_dense,
    _T5 + "T5DenseGatedActDense": _t5_dense,
    "torch.nn.modules.activation.MultiheadAttention": _multihead_attention,
    _ENCODER_LAYER: _transformer_layer,
    _DECODER_LAYER: _transformer_layer,
}

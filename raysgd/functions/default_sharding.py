"""The default sharding of parameters, by the names of layers. Pure, any process; it needs no JAX.

Layers are sharded as Megatron shards a transformer: column parallel, by their outputs, unless the name says that they are row
parallel, by their inputs. A column parallel and a row parallel layer need one all-reduce together. A wrong guess costs
communication, never correctness, and own rules mend it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from raysgd.functions.trees import Parameter

# What the words of names say, as wholes: those of ``outProj_2`` are out, proj and 2.
#: Layers whose last word with a meaning is one of these are row parallel; the other ones are column parallel.
_ROW_PARALLEL = {"o", "out", "output", "wo", "down"}
#: Layers that are row parallel by their whole name.
_ROW_PARALLEL_NAMES = {"c_proj", "dense_4h_to_h"}
#: Words without a meaning. If a layer has no other ones, its number decides, or else the module above it.
_VAGUE = {
    "c", "conv", "dense", "fc", "ff", "hidden", "l", "layer", "lin", "linear", "module", "proj", "projection", "w",
}  # fmt: skip
#: In a module of attention, the layer without a meaning is row parallel, or the last one of those with numbers.
_ATTENTION = {"attention", "attn"}
#: Kernels of these layers with three dimensions are (width, heads, size of a head).
_HEADS = {"q", "query", "wq", "k", "key", "wk", "v", "value", "wv"}
#: Tables are sharded by their rows.
_TABLES = {"emb", "embed", "embedding", "embeddings", "shared", "wpe", "wte"}
#: What makes the first activations, or is added to them, is stored in shards and used whole: else XLA shards all blocks alike.
_USED_WHOLE = {"patch", "patches", "pos", "position", "positional", "positions", "type", "wpe"}
#: Leaves that are vectors, also where those of several layers are stacked; and norms and small tables. They are replicated.
_VECTORS = {"b", "beta", "bias", "gamma", "scale"}
_SMALL = {"batchnorm", "groupnorm", "layernorm", "ln", "norm", "rmsnorm", "relative"}
#: Leaves without a name of their own: that of their layer is the key above.
_LEAVES = {"embedding", "embeddings", "kernel", "w", "weight", "weights"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: A dimension that does not divide is used in padded shards if each has so many of it.
_MIN_PADDED = 16


class Choice(NamedTuple):
    """The dimension that is sharded where a parameter is stored, and where it is used, and why.

    Dimensions count from the end, since those of stacked layers come first.
    """

    stored: int | None
    used: int | None
    reason: str


def choose_by_names(parameters: Sequence[Parameter], num_shards: int) -> dict[tuple[str, ...], Choice]:
    """Choose for the kernels of a tree and their biases. Parameters that are not in the result are replicated."""
    return _Chooser(parameters, num_shards).choices if num_shards > 1 else {}


class _Layer(NamedTuple):
    """A kernel, and what its path says: words with a meaning of the layer itself, or else of the nearest module above it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    module: tuple[str, ...]
    name: str
    own_words: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def series(self) -> tuple[Any, ...]:
        """What layers of a module have in common whose names differ in numbers only."""
        return self.module, *(word for word in _words_of(self.name) if not word.isdigit())


class _Chooser:
    """Chooses for the kernels of a tree and their biases: ``choices``, by path. It counts dimensions from the end, since those
    of stacked layers come first.
    """

    def __init__(self, parameters: Sequence[Parameter], num_shards: int) -> None:
        self._num_shards = num_shards
        self.choices: dict[tuple[str, ...], Choice] = {}
        layers = [layer for each in parameters if (layer := _layer_of(each)) is not None]
        self._series: dict[Any, list[tuple[str, ...]]] = defaultdict(list)
        for layer in sorted(layers, key=lambda layer: [int(number) for number in re.findall(r"\d+", layer.name)]):
            self._series[layer.series].append(layer.path)
        # The shapes (heads, size) that end the kernel of a query, and that another kernel has as its inputs.
        self._heads = {
            layer.shape[-2:] for layer in layers if len(layer.shape) > 2 and _HEADS & {*layer.own_words[-1:]}
        }
        self._heads &= {layer.shape[-3:-1] for layer in layers}
        shapes = {each.path: each.shape for each in parameters}
        biases = {layer: path for layer in layers if shapes.get(path := _path_of_bias(layer.path))}
        # For the name of a leaf: how many kernels more are stored as (outputs, inputs), as their biases say.
        self._votes: dict[str, float] = defaultdict(float, weight=0.5)  # as torch does, if no bias says anything
        for layer, path in biases.items():
            size, (first, last) = shapes[path][-1], layer.shape[-2:]
            self._votes[layer.path[-1]] += (size == first) - (size == last)
        for layer in layers:
            dims, outputs, reason = self._dims_of(layer)
            choice = self.choices[layer.path] = self._fit(layer, dims, outputs, reason)
            if layer in biases:
                self.choices[biases[layer]] = self._fit_bias(shapes[biases[layer]], choice.used, outputs)

    def _dims_of(self, layer: _Layer) -> tuple[tuple[int, int], tuple[int, ...], str]:
        """Return the dimension to shard and the one to fall back to, those of the outputs that a bias has, and the reason."""
        shape, leaf = layer.shape, layer.path[-1]
        if _TABLES & {*_words_of(layer.name), *_words_of(leaf)}:
            return (-2, -1), (-2,), "a table, by its rows"
        out, inputs = -1, -2
        if self._votes[leaf] > 0:
            out, inputs = (-len(shape), 1 - len(shape)) if len(shape) > 3 else (-2, -1)
        if why := self._why_row_parallel(layer):
            dims = (-3, -2) if shape[-3:-1] in self._heads else (inputs, out)
            return dims, (out,), f"row parallel: {why}"
        if _HEADS & {*layer.own_words[-1:]} and shape[-1] in {size for _, size in self._heads}:
            return (-2, -1), (-2, -1), "column parallel: heads of attention"
        return (out, inputs), (out,), "column parallel"

    def _why_row_parallel(self, layer: _Layer) -> str | None:
        if layer.name.lower() in _ROW_PARALLEL_NAMES:
            return f"by the name {layer.name}"
        if not layer.own_words:
            is_attention = bool(_ATTENTION & {word for key in layer.module[-1:] for word in _words_of(key)})
            series = self._series[layer.series]
            place, number = series.index(layer.path) + 1, len(series)
            if number > 1:
                is_row = place == number if is_attention else place % 2 == 0
                return f"layer {place} of {number}" if is_row else None
            if is_attention:
                return "it follows attention"
        return f"by the word {layer.words[-1]}" if _ROW_PARALLEL & {*layer.words[-1:]} else None

    def _fit(self, layer: _Layer, dims: tuple[int, int], outputs: tuple[int, ...], reason: str) -> Choice:
        sizes, num_shards = [layer.shape[dim] for dim in dims], self._num_shards
        fitting = [dim for dim, size in zip(dims, sizes, strict=True) if size % num_shards == 0]
        if not fitting:
            return Choice(None, None, f"neither {sizes[0]} nor {sizes[1]} divides by {num_shards}")
        stored, used = fitting[0], fitting[0] if not _USED_WHOLE & {*layer.words} else None
        if stored != dims[0]:
            reason += f"; but {sizes[0]} does not divide by {num_shards}"
            if used is not None and (stored in outputs) != (dims[0] in outputs):
                # Shards of the other side would shard what all blocks add to.
                used = dims[0] if sizes[0] >= _MIN_PADDED * num_shards else None
        if used != stored:
            reason += f"; used {'whole' if used is None else 'in padded shards'}"
        return Choice(stored, used, reason)

    def _fit_bias(self, shape: tuple[int, ...], used: int | None, outputs: tuple[int, ...]) -> Choice:
        dim = outputs.index(used) - len(outputs) if used in outputs else None
        if dim is None or len(shape) < -dim or shape[dim] % self._num_shards:
            return Choice(None, None, "a bias of whole outputs")
        return Choice(dim, dim, "a bias of sharded outputs")


def _layer_of(parameter: Parameter) -> _Layer | None:
    """Return the layer whose kernel this is, or None if it is a vector."""
    path, shape, _ = parameter
    last_words = {word for key in path[-2:] for word in _words_of(key)}
    if sum(size > 1 for size in shape) < 2 or _SMALL & last_words or _VECTORS & {*_words_of(path[-1])}:
        return None
    keys = "/".join(path).split("/")  # a key of Haiku holds several
    if len(keys) > 1 and keys[-1] in _LEAVES:
        keys.pop()
    words = [tuple(each for each in _words_of(key) if each not in _VAGUE and not each.isdigit()) for key in keys]
    return _Layer(path, shape, tuple(keys[:-1]), keys[-1], words[-1], next(filter(None, reversed(words)), ()))


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _path_of_bias(kernel: tuple[str, ...]) -> tuple[str, ...]:
    """Return where the bias of a kernel may be: that of ``kernel`` is ``bias``, that of ``w1`` is ``b1``."""
    leaf = re.sub("kernel|weight|^w", lambda found: "b" if found[0] == "w" else "bias", kernel[-1])
    return (*kernel[:-1], leaf) if leaf != kernel[-1] else ()

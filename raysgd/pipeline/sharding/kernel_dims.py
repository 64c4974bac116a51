"""Which dimension of each kernel is sharded, from shapes and the structure of the tree. Pure, any process.

Two kinds of parts are distinguished. In a part with a **residual stream**, such as a transformer, most kernels read from it
or add to it, and its width is the size that most of them share. Each kernel is sharded along its other dimension: kernels
that read from the stream by their outputs, kernels that add to it by their inputs, so that a pair of them needs one
all-reduce. In a part **without** one, such as an MLP or a CNN, kernels alternate along chains of matching sizes; see
`raysgd.pipeline.sharding.chains`. doc/design/0033-sharding-rules.md has the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from raysgd.pipeline.sharding.chains import choose_in_chains
from raysgd.pipeline.sharding.parameters import Choice, Module, Parameter, other_dim
from raysgd.pipeline.sharding.square_kernels import SquareKernels, output_dim

#: The part of a module's kernels that must have the residual width.
_MIN_SHARE = 0.6
#: A module below has a residual width of its own if fewer of its kernels have the width of the module above.
_MAX_FOREIGN_SHARE = 0.3
#: A table whose rows do not divide is used in shards of rows that are padded, if it has this many rows for each shard.
_MIN_ROWS_PER_SHARD = 16
#: A table with at most this many times as many rows as its width is short.
_MAX_WIDTHS_OF_TABLE = 4
#: Kernels without a dimension that suits are replicated up to this part of all parameters, taken together.
_MAX_REPLICATED = 0.01


def choose_dims(root: Module, num_shards: int) -> dict[Parameter, Choice]:
    """Choose for each kernel of the tree."""
    chooser = _Chooser(root, num_shards)
    left = chooser.choose_with_streams(root)
    return chooser.choices | choose_in_chains(left, num_shards)


def residual_width(module: Module) -> int | None:
    """Return the size that most kernels of a module share, if it is the width of a residual stream.

    A stream has norms of its width, and kernels that lead from it to another size and back.
    """
    kernels = module.kernels()
    if len(kernels) < 2:
        return None
    vectors = Counter(
        size for parameter in module.parameters() if not parameter.is_kernel and not parameter.is_bias
        for size in parameter.dims[-1:] if size > 1  # not the inputs of a kernel with one output
    )  # fmt: skip
    shares = {size: _share(kernels, size) for size in {size for kernel in kernels for size in kernel.dims}}
    fitting = [
        size for size, share in shares.items() if share >= _MIN_SHARE and vectors[size] and _leads_back(kernels, size)
    ]
    return max(fitting, key=lambda size: (shares[size], vectors[size], -size), default=None)


def _share(kernels: Iterable[Parameter], size: int) -> float:
    has_size = [size in kernel.dims for kernel in kernels]
    return sum(has_size) / max(1, len(has_size))


def _leads_back(kernels: list[Parameter], size: int) -> bool:
    inner = Counter(
        tuple(sorted(other for other in kernel.dims if other != size))
        for kernel in kernels if kernel.dims[-2:].count(size) < 2 and size in kernel.dims
    )  # fmt: skip
    return max(inner.values(), default=0) > 1


class _Chooser:
    def __init__(self, root: Module, num_shards: int) -> None:
        self._num_shards = num_shards
        self._num_replicable = sum(parameter.num_elements for parameter in root.parameters()) * _MAX_REPLICATED
        self._num_with_size = Counter(size for kernel in root.kernels() for size in set(kernel.dims))
        self.choices: dict[Parameter, Choice] = {}

    def choose_with_streams(self, module: Module) -> list[Parameter]:
        """Choose for the kernels of each part with a residual stream; return the other kernels."""
        width = residual_width(module)
        if width is None:
            left = [kernel for kernel in module.own.values() if kernel.is_kernel]
            return [
                *left,
                *(kernel for child in module.children.values() for kernel in self.choose_with_streams(child)),
            ]
        foreign = self._choose_foreign(module, width)
        squares = SquareKernels(module, width)
        head_sizes = _head_sizes(module.kernels(), width)
        for kernel in sorted(
            module.kernels(), key=lambda kernel: kernel.num_elements
        ):  # the smallest are replicated first
            if kernel not in foreign:
                self.choices[kernel] = self._choose(kernel, width, head_sizes, squares)
        return []

    def _choose_foreign(self, module: Module, width: int) -> set[Parameter]:
        """Choose for modules below with another width, such as an encoder of images in front of a decoder of text."""
        foreign: set[Parameter] = set()
        for child in module.children.values():
            kernels = child.kernels()
            if len(kernels) >= 4 and _share(kernels, width) < _MAX_FOREIGN_SHARE and residual_width(child) is not None:
                self.choose_with_streams(child)
                foreign.update(kernels)
            else:
                foreign |= self._choose_foreign(child, width)
        return foreign

    def _choose(self, kernel: Parameter, width: int, head_sizes: set[int], squares: SquareKernels) -> Choice:
        if kernel in squares.roles:
            role, why = squares.roles[kernel]
            out = output_dim(kernel, squares)
            dim = out if role == "column" else other_dim(out, kernel)
            chosen = self._first_fitting(kernel, [(dim, f"{role} parallel: {why}")])
            return replace(chosen, outputs_first=out == 0)
        if width not in kernel.dims:
            return self._choose_without_width(kernel, width)
        if len(kernel.dims) > 2 and (heads := _head_dims(kernel, width, head_sizes)):
            return self._first_fitting(
                kernel, [(heads[0], "heads of attention"), (heads[1], "size of a head; the heads do not divide")]
            )
        last = len(kernel.dims) - 1
        stream = max(dim for dim, size in enumerate(kernel.dims) if size == width)
        inner = other_dim(stream, kernel) if stream >= last - 1 else stream + 1
        return self._choose_inner(kernel, stream, inner, width)

    def _choose_inner(self, kernel: Parameter, stream: int, inner: int, width: int) -> Choice:
        size, num_shards = kernel.dims[inner], self._num_shards
        if size % num_shards == 0:
            reason = f"the dimension that is not the residual stream of width {width}"
            if self._is_added(kernel, size, width):
                return Choice(inner, f"{reason}; used whole, as a short table that is added to it", None)
            return Choice(inner, reason)
        if width % num_shards:
            return Choice(None, f"neither {width} nor {size} divides by {num_shards}")
        if size < num_shards and self._may_replicate(kernel):
            return Choice(None, f"small, and {size} does not divide by {num_shards}")
        # The residual stream must not be sharded: its sharding would spread to all blocks.
        used = inner if len(kernel.dims) == 2 and size >= _MIN_ROWS_PER_SHARD * num_shards else None
        how = "used whole" if used is None else "used in padded shards of the other dimension"
        return Choice(stream, f"the residual width, since {size} does not divide by {num_shards}; {how}", used)

    def _choose_without_width(self, kernel: Parameter, width: int) -> Choice:
        if self._may_replicate(kernel):
            return Choice(None, f"small, and no dimension is the residual width {width}")
        dims = sorted(range(len(kernel.dims))[-2:], key=lambda dim: -kernel.dims[dim])
        return self._first_fitting(kernel, [(dim, "the largest dimension; none is the residual width") for dim in dims])

    def _is_added(self, kernel: Parameter, size: int, width: int) -> bool:
        """Return whether a kernel looks like a table of positions. If it were added in shards, all blocks would be sharded so."""
        if len(kernel.dims) > 2:
            return sum(other > 1 for other in kernel.dims) == 2
        is_only_one = self._num_with_size[size] == 1 and kernel.bias is None and not kernel.num_stacked
        return is_only_one and size <= _MAX_WIDTHS_OF_TABLE * width and size not in (2 * width, 3 * width)

    def _may_replicate(self, kernel: Parameter) -> bool:
        if kernel.num_elements > self._num_replicable:
            return False
        self._num_replicable -= kernel.num_elements
        return True

    def _first_fitting(self, kernel: Parameter, wanted: list[tuple[int, str]]) -> Choice:
        for dim, reason in wanted:
            if kernel.dims[dim] % self._num_shards == 0:
                return Choice(dim, reason)
        sizes = " nor ".join(str(kernel.dims[dim]) for dim, _ in wanted)
        divides = "divides" if len(wanted) > 1 else "does not divide"
        return Choice(None, f"{'neither ' if len(wanted) > 1 else ''}{sizes} {divides} by {self._num_shards}")


def _head_sizes(kernels: list[Parameter], width: int) -> set[int]:
    """Return the sizes of heads: attention of flax has kernels (width, heads, size) and (heads, size, width)."""
    queries = {kernel.dims[-2:] for kernel in kernels if len(kernel.dims) >= 3 and kernel.dims[0] == width}
    outputs = {kernel.dims[:-1] for kernel in kernels if len(kernel.dims) == 3 and kernel.dims[-1] == width}
    return {size for _, size in queries & outputs}


def _head_dims(kernel: Parameter, width: int, head_sizes: set[int]) -> tuple[int, int] | None:
    last = len(kernel.dims) - 1
    if kernel.dims[0] == width and kernel.dims[last] in head_sizes:
        return last - 1, last
    if last == 2 and kernel.dims[last] == width and kernel.dims[1] in head_sizes:
        return 0, 1
    return None

"""Square kernels of a residual stream: which of them read from the stream, and which add to it. Pure, any process.

Shapes do not distinguish the query, key, value and output of attention if all are square. In this order decide: sub-modules
(three kernels in one, a single one next to it), a fused kernel next to it, which ones have a bias, whole words of names, and
the order of names.
"""

from __future__ import annotations

from typing import Literal

from raysgd.pipeline.sharding.parameters import Module, Parameter, words_of

Role = Literal["column", "row"]

#: Words of names that say what the layers of attention and gated layers are. A word counts only as a whole, and as the last
#: one of a name that says something: the name output_query is that of a query.
_COLUMN_WORDS = {"q", "query", "k", "key", "v", "value", "wq", "wk", "wv", "up", "gate", "wi"}
_ROW_WORDS = {"o", "out", "output", "wo", "down"}
_WORDS_WITHOUT_MEANING = {
    "dense", "fc", "kernel", "layer", "lin", "linear", "module", "proj", "projection", "weight", "w", "weights", "c",
}  # fmt: skip


class SquareKernels:
    """Decides on the square kernels of a module whose residual stream has the given width.

    Attributes:
        width: The width of the stream.
        roles: For each square kernel, "column" if it is sharded by its outputs or "row" if by its inputs, and why.
    """

    def __init__(self, module: Module, width: int) -> None:
        self.roles: dict[Parameter, tuple[Role, str]] = {}
        self._module = module
        self.width = width
        self._consumed: set[Parameter] = set()
        self._ancestors: dict[Parameter, list[Module]] = {}
        self._list_ancestors(module, [])
        for group in self._defer(module):
            self._decide([group], [])

    def is_square(self, kernel: Parameter) -> bool:
        others = [size for size in kernel.dims[-2:] if size != self.width]
        return not others and (len(kernel.dims) == 2 or kernel.dims[0] != self.width)

    def ancestors(self, kernel: Parameter) -> list[Module]:
        """Return the modules that hold a kernel, the innermost first."""
        return self._ancestors[kernel]

    def _list_ancestors(self, module: Module, above: list[Module]) -> None:
        holders = [module, *above]
        for parameter in module.own.values():
            self._ancestors[parameter] = holders
        for child in module.children.values():
            self._list_ancestors(child, holders)

    def _defer(self, module: Module) -> list[list[Parameter]]:
        """Decide within the module where it holds enough to decide; return the groups that are left to the module above."""
        own = [kernel for kernel in module.own.values() if kernel.is_kernel]
        below = [self._defer(child) for child in module.children.values()]
        groups = [[kernel] for kernel in own if self.is_square(kernel)]
        groups += [group for left in below for group in left]
        squares = [kernel for group in groups for kernel in group]
        others = [
            kernel for kernel in module.kernels()
            if not self.is_square(kernel) and kernel not in self._consumed and len(kernel.dims) == 2
        ]  # fmt: skip
        if not squares:
            return []
        if not others and len(squares) == 1:
            return groups
        if not others and len(squares) == 3:
            return [squares]
        self._decide(groups, others)
        self._consumed.update(others)
        return []

    def _decide(self, groups: list[list[Parameter]], others: list[Parameter]) -> None:
        squares = [kernel for group in groups for kernel in group]
        rows, why = self._find_rows(groups, squares, others)
        for kernel in squares:
            self.roles[kernel] = ("row" if kernel in rows else "column", why)

    def _find_rows(
        self, groups: list[list[Parameter]], squares: list[Parameter], others: list[Parameter]
    ) -> tuple[list[Parameter], str]:
        if len(squares) == 1:
            if self._has_open_kernel(squares[0], others):
                return squares, "adds the output of a fused kernel to the stream"
            return [], "a square kernel alone"
        if sorted(map(len, groups)) == [1, 3]:
            return min(groups, key=len), "three kernels in one sub-module, and one next to it"
        if _are_numbered(squares):
            return squares[1::2], "numbered layers alternate"
        for find, why in (
            (self._by_bias, "the one whose bias differs adds to the stream"),
            (self._by_words, "words of the names"),
            (self._by_missing_bias, "the one without a bias adds to the stream"),
        ):
            if rows := find(squares, others):
                return rows, why
        step = 4 if len(squares) % 4 == 0 else 2
        return squares[step - 1 :: step], "the order of the names"

    def _has_open_kernel(self, square: Parameter, others: list[Parameter]) -> bool:
        """Return whether a fused query, key and value is next to a kernel: none leads from its size back to the stream."""
        shapes = [kernel.dims for kernel in others]
        still_open = [kernel for kernel in others if kernel.dims[::-1] not in shapes]
        return (
            len(still_open) == 1
            and len(square.dims) == 2
            and self.width in still_open[0].dims
            and self.width < max(still_open[0].dims) <= 3 * self.width
            and still_open[0] in [kernel for holder in self.ancestors(square)[:2] for kernel in holder.kernels()]
        )

    def _by_bias(self, squares: list[Parameter], others: list[Parameter]) -> list[Parameter]:
        with_bias = [kernel for kernel in squares if kernel.bias is not None]
        without = [kernel for kernel in squares if kernel.bias is None]
        if len(with_bias) == 1 and len(squares) > 2:
            return with_bias
        keys = [kernel for kernel in others if [k.dims for k in others].count(kernel.dims) == 2]
        if len(squares) == 2 and keys and len(with_bias) == 1:
            return without if keys[0].bias is not None else with_bias
        return []

    def _by_missing_bias(self, squares: list[Parameter], others: list[Parameter]) -> list[Parameter]:
        without = [kernel for kernel in squares if kernel.bias is None]
        return without if len(without) == 1 and len(squares) == 4 else []

    def _by_words(self, squares: list[Parameter], others: list[Parameter]) -> list[Parameter]:
        roles = [role_of_name(kernel.path) for kernel in squares]
        if "row" in roles and roles.count("row") <= len(squares) // 2:
            return [kernel for kernel, role in zip(squares, roles, strict=True) if role == "row"]
        if roles.count(None) == 1 and roles.count("column") >= 2:
            return [squares[roles.index(None)]]
        return []


def role_of_name(path: tuple[str, ...]) -> Role | None:
    """Return what the last meaningful word of a path says: words are compared as a whole."""
    for key in reversed(path):
        words = [word for word in words_of(key) if not word.isdigit() and word not in _WORDS_WITHOUT_MEANING]
        if words:
            return "column" if words[-1] in _COLUMN_WORDS else "row" if words[-1] in _ROW_WORDS else None
    return None


def _are_numbered(kernels: list[Parameter]) -> bool:
    """Return whether the paths differ in numbers only, as those of Dense_0 and Dense_1 do."""
    names = {tuple(tuple(word for word in words_of(key) if not word.isdigit()) for key in k.path) for k in kernels}
    return len(names) == 1


def output_dim(kernel: Parameter, squares: SquareKernels | None) -> int:
    """Return the dimension of a kernel's outputs: the last one, or dimension 0 for kernels stored as (outputs, inputs)."""
    last = len(kernel.dims) - 1
    if last > 1:
        return last
    if squares is not None:
        for number, module in enumerate(squares.ancestors(kernel)):
            if vote := _vote(module, squares.width, may_be_fused=number < 2):
                return last if vote > 0 else 0
    if kernel.bias is not None and kernel.dims[0] != kernel.dims[1] and kernel.bias.dims == kernel.dims[:1]:
        return 0
    return 0 if kernel.bias is None and words_of(kernel.path[-1])[-1:] == ["weight"] else last


def _vote(module: Module, width: int, *, may_be_fused: bool) -> int:
    """Return a positive number if most kernels of a module are stored as (inputs, outputs), a negative one if the other way."""
    kernels = [kernel for kernel in module.kernels() if len(kernel.dims) == 2 and len(set(kernel.dims)) == 2]
    if biased := [(kernel.bias.dims, kernel.dims) for kernel in kernels if kernel.bias is not None]:
        return sum([1 if bias == dims[1:] else -1 for bias, dims in biased])
    # More kernels read from the stream than add to it: two of three in gated layers, key and value in attention.
    shapes = [kernel.dims for kernel in kernels if width in kernel.dims]
    vote = 0
    for shape in set(shapes):
        inner = sum(shape) - width
        number, back = shapes.count(shape), shapes.count(shape[::-1])
        if number > max(back, 1) or (may_be_fused and not back and inner in (2 * width, 3 * width)):
            vote += 1 if shape[0] == width else -1
    return vote

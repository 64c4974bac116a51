"""Logical workers: the units that data, random numbers and sums belong to, whatever number of processes runs them.

With ``Trainer(logical_workers=L)`` each process acts as a contiguous range of the L logical workers, one after the other.
What they compute is added up in a binary tree over the logical workers, so that the order of additions, and with it every
bit of the sum, does not depend on the number of processes.

The tree is that of pairwise summation (N. J. Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14,
1993): neighbours are added in pairs, level by level; the last node of a level with an odd number of nodes moves up alone. A
process adds every node whose leaves are all its own; the others' nodes at the borders of the ranges are exchanged.

Runs in the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from raysgd.errors import UsageError
from raysgd.session import generators

T = TypeVar("T")


def workers_of_rank(rank: int, world_size: int, num_workers: int) -> range:
    """Return the logical workers that a rank acts as: as many as others do, or one more, next to each other."""
    each, remainder = divmod(num_workers, world_size)
    first = rank * each + min(rank, remainder)
    return range(first, first + each + (rank < remainder))


class Node(NamedTuple):
    """A node of the tree: at ``level`` 0 are the leaves. Node (l, n) has the leaves from n * 2**l up to (n + 1) * 2**l."""

    level: int
    number: int


class TreeSum(Generic[T]):
    """Adds values in the order of the tree. Values are put from left to right; those of other processes may be left out.

    Args:
        num_leaves: Leaves of the whole tree.
        add: Returns the sum of a node's left and right child; may change and return the left one.
    """

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        self._num_leaves = num_leaves
        self._add = add
        self._nodes: list[tuple[Node, T]] = []

    def put(self, node: Node, value: T) -> None:
        """Add the value of a node, whose leaves are right of all those put so far."""
        level, number = node
        while self._width(level) > 1:
            if number % 2 == 0:
                if number + 1 < self._width(level):
                    break  # its sibling comes later, or in another process
            elif self._nodes and self._nodes[-1][0] == (level, number - 1):
                _, left = self._nodes.pop()
                value = self._add(left, value)
            else:
                break  # its sibling is in another process
            level, number = level + 1, number // 2
        self._nodes.append((Node(level, number), value))

    def take(self) -> list[tuple[Node, T]]:
        """Return the nodes that could not be added further, from left to right, and begin again without any."""
        nodes, self._nodes = self._nodes, []
        return nodes

    def take_root(self) -> T:
        """Return the sum of all leaves, and begin again."""
        ((_, root),) = self.take()
        return root

    def _width(self, level: int) -> int:
        """Return the number of nodes of a level."""
        return -(-self._num_leaves // (1 << level))


def border_nodes(leaves: range, num_leaves: int) -> list[Node]:
    """Return the nodes that a process with these leaves sends: the largest ones that have no other leaves.

    There are at most 2 * log2(num_leaves) of them, and only one if the ranges are equal powers of two.
    """
    tree: TreeSum[None] = TreeSum(num_leaves, lambda left, right: None)
    for leaf in leaves:
        tree.put(Node(0, leaf), None)
    return [node for node, _ in tree.take()]


class LogicalWorkers:
    """The logical workers of one process, and their random number generators.

    While the process acts as logical worker n, the generators of Python, NumPy and the framework are those of n, seeded with
    ``seed + 1 + n``. At all other times they are the run's, seeded with ``seed``, and equal on all ranks.

    Args:
        num_workers: Logical workers of the run.
        rank, world_size: Of this process.
        seed: The Trainer's; None counts as 0.

    Attributes:
        own: The numbers of the logical workers that this process acts as.
        acting: The one it acts as now, or None.
        equal_models: The models whose weights were set to those of rank 0.
        kept: What a framework has compiled for the sums; it refers to devices, and is dropped when the attempt ends.
        agreed: The arithmetics of steps of which all ranks know what is added; see `raysgd.session.logical_step`.
    """

    def __init__(self, num_workers: int, rank: int, world_size: int, seed: int | None) -> None:
        self.num_workers = num_workers
        self.world_size = world_size
        self.seed = seed or 0
        self.own = workers_of_rank(rank, world_size, num_workers)
        self.acting: int | None = None
        self.equal_models: WeakSet[Any] = WeakSet()
        self.kept: dict[str, Any] = {}
        self.agreed: WeakSet[Any] = WeakSet()
        self._states: dict[int, generators.States] = {}

    def range_of(self, rank: int) -> range:
        """Return the logical workers that a rank acts as."""
        return workers_of_rank(rank, self.world_size, self.num_workers)

    @contextmanager
    def acting_as(self, number: int) -> Iterator[None]:
        """Act as a logical worker: swap the generators."""
        if self.acting is not None:
            raise UsageError("a step of logical workers inside another one: end the loop over the first one before.")
        of_run = generators.read()
        if number in self._states:
            generators.write(self._states[number])
        else:
            generators.seed(self.seed + 1 + number)
        self.acting = number
        try:
            yield
        finally:
            self.acting = None
            self._states[number] = generators.read()
            generators.write(of_run)

    def check_outside(self, call: str) -> None:
        """Raise a UsageError if the process acts as a logical worker: other ranks may act as fewer or more of them."""
        if self.acting is not None:
            raise UsageError(
                f"{call} inside the loop over a step's logical workers runs once for each of them, and ranks have different "
                "numbers of them: call it after that loop, once per step."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the generators of the logical workers that have drawn something, JSON-able, by number."""
        return {str(number): generators.to_json(states) for number, states in sorted(self._states.items())}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore what `to_json` returned on all ranks together; the others begin with their seeds."""
        kept = {int(number): state for number, state in states.items() if int(number) in self.own}
        self._states = {number: generators.from_json(state) for number, state in kept.items()}

"""Which batch of a loader a backward pass belongs to, however far the loop reads ahead. Worker side.

A batch counts when its backward pass begins, not when it is handed out. The model is called with tensors of the batch; what it
returns is marked, so that the graph of a loss leads to its batches. Where the model gets other tensors, such as augmented ones,
the only batch that is still in memory and was not used is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raysgd.engine.gradients.accumulation import Accumulation
from raysgd.errors import UsageError
from raysgd.torch.passes import HandedBatch, places_of

#: The key of a mark in the metadata of a node of autograd.
_MARK = "raysgd.batch"


@dataclass(eq=False)
class _Entry:
    """A batch that was handed out.

    Attributes:
        is_known: The model was called with its tensors.
        is_computed: The model was called for it.
        is_counted: It is one of the batches of a step.
        is_end: The loop over the loader ended after it.
    """

    batch: HandedBatch
    is_known: bool = False
    is_computed: bool = False
    is_counted: bool = False
    is_end: bool = False


class UsedBatches:
    """The batches that a step's loop has read, of which its passes use one after another.

    Args:
        accumulation: Is informed of a batch when its first backward pass begins, and of those that were skipped before it.

    Attributes:
        num_rows: Rows of the newest backward pass that count on this rank; None: no loader has said it.
        is_ambiguous: It is not known to which batch the newest pass belongs.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._open: list[_Entry] = []  # without a backward pass so far, in the order in which they were handed out
        self._current: _Entry | None = None  # that of the newest backward pass
        self._called: _Entry | None = None  # for which the model was called last
        self._has_calls = False  # the loop calls the model, not only parts of it
        self._has_new = False  # a batch was handed out since one was computed
        self._is_over = False  # the optimizer was called since then
        self.num_rows: int | None = None
        self.is_ambiguous = False

    # -- the loader -----------------------------------------------------------------------------------------------------

    def hand_out(self, batch: HandedBatch) -> None:
        """A loader hands out a batch."""
        # What is gone from memory was skipped. A complete step is not begun anew before the optimizer has used it.
        while self._open and not self._accumulation.is_complete and self._is_gone(self._open[0]):
            self._count(self._open.pop(0))
        self._open.append(_Entry(batch))
        self._has_new = True

    def begin(self, num_rows: int) -> None:
        """The loop begins a batch of its own."""
        own = _Entry(HandedBatch((), num_rows), is_known=True, is_computed=True)
        self._open = [*(each for each in self._open if each.is_computed), own]

    def end(self) -> None:
        """The loop over the loader has ended, or was left; batches that it has read ahead may be used later."""
        if self._open:
            self._open[-1].is_end = True
        else:
            self._accumulation.on_end()

    # -- passes ---------------------------------------------------------------------------------------------------------

    def on_forward(self, inputs: Any, *, is_training: bool) -> bool:
        """The model is called; returns whether the step is complete after a backward pass of this batch."""
        entry = self._find(inputs)
        if entry is not None:
            entry.is_known, self.is_ambiguous = True, False
        elif is_training:
            entry = self._guess()
        self._called, self._has_calls = entry, True
        if entry is None or entry is self._current:
            return self._accumulation.will_complete
        self._take(entry)
        entry.is_computed = True
        skipped = [each for each in self._open[: self._open.index(entry)] if not each.is_counted]
        return self._accumulation.completes_with(len(skipped) + 1, is_last=entry.batch.is_last)

    def mark(self, outputs: Any) -> None:
        """Mark what the model returned as that of the batch for which it was called."""
        if self._called is not None:
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    metadata: Any = leaf.grad_fn.metadata
                    metadata[_MARK] = self._called

    def on_backward(self, loss: torch.Tensor | None) -> None:
        """A backward pass begins; without a loss, it is that of the batch for which the model was called last.

        Raises:
            UsageError: It belongs to a batch before one that was used.
        """
        computed = [each for each in self._open if each.is_computed]
        found: list[_Entry] = []
        if loss is None:
            found = [each for each in computed if each is self._called]
        elif len(computed) == 1 and not computed[0].is_counted:
            found = computed
        elif computed:
            marked = _marked(loss)
            found = [each for each in computed if each in marked]
            if not found and self._current not in marked:
                found = computed[-1:]
        elif not self._has_calls and (entry := self._guess()) is not self._current and entry is not None:
            found = [entry]
        if any(each.is_counted for each in found):
            raise UsageError(
                "the backward passes of the batches of a step are not made in the order in which the batches were read, and a "
                "later one was counted already: call engine.backward for the batches in their order."
            )
        for each in found:
            self._use(each)
        if found:
            self.num_rows = sum(each.batch.num_rows for each in found)

    def end_batch(self) -> None:
        """The optimizer was called."""
        self._is_over = True
        if self._current is not None and self._current.is_end and not self._open:
            self._current.is_end = False
            self._accumulation.on_end()

    def end_step(self) -> None:
        """The gradients of the step were used or dropped."""
        self._open = [each for each in self._open if not each.is_counted]
        self.end_batch()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _take(self, entry: _Entry) -> None:
        if not entry.is_computed:
            self._has_new = self._is_over = False

    def _use(self, entry: _Entry) -> None:
        self._take(entry)
        for each in self._open[: self._open.index(entry)]:
            self._count(each)
        self._accumulation.on_batch(is_last=entry.batch.is_last)
        self._open = [each for each in self._open if each is not entry and (each.is_computed or not each.is_counted)]
        self._current = entry

    def _count(self, skipped: _Entry) -> None:
        if not skipped.is_counted:
            skipped.is_counted = True
            self._accumulation.on_batch(is_last=skipped.batch.is_last)
            if skipped.is_end:
                self._accumulation.on_end()

    def _is_gone(self, entry: _Entry) -> bool:
        return not (entry.is_computed or entry.batch.is_alive())

    def _find(self, inputs: Any) -> _Entry | None:
        """Return the batch whose tensors, or parts of them, are among the inputs of the model."""
        entries = [*self._open, *([] if self._current is None else [self._current])]
        if not entries or torch.compiler.is_compiling():
            return None
        places = places_of(inputs)
        for is_exact in (True, False):
            for each in entries:
                if each.batch.has_any(places, is_exact=is_exact):
                    return each
        return None

    def _guess(self) -> _Entry | None:
        """Return the batch that a pass belongs to whose inputs are not those of a loader."""
        self.is_ambiguous = False
        computed = [each for each in self._open if each.is_computed and not each.is_counted]
        newest = computed[-1] if computed else self._current
        unused = [each for each in self._open if not (each.is_computed or each.is_counted)]
        if not unused:
            return newest
        is_same = not self._has_new or (newest is not None and newest.is_known and newest.batch.is_alive())
        if newest is not None and is_same and not self._is_over:
            self.is_ambiguous = not newest.is_known
            return newest
        alive = [each for each in unused if each.batch.is_alive()]
        self.is_ambiguous = len(alive) > 1
        return alive[0] if alive else unused[-1]


def _marked(loss: Any) -> set[_Entry]:
    """Return the batches on whose outputs a loss depends."""
    found: set[_Entry] = set()
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (entry := node.metadata.get(_MARK)) is not None:
            found.add(entry)
        else:
            nodes.extend(following for following, _ in node.next_functions)
    return found

"""Which batches a loop has read ahead: they were handed out, and the model was not trained on them so far. Worker side, pure.

A batch counts when it is handed out, unless the loop is seen to use an earlier one afterwards: then it was read ahead, and it
counts when it is used too. So does what another thread than the one that trains has read. Models that `raysgd.torch` has
prepared see which batch they are called with. Other loops count as they read, or state how far they have read ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd.data.order.position import Position
from raysgd.errors import ConfigError, UsageError

#: How many batches may be read ahead; earlier ones count.
MAX_AHEAD = 1024


class SeenBatch(Protocol):
    """A batch that can be recognized, without being kept in memory."""

    def is_alive(self) -> bool:
        """Return whether anything refers to it."""


Matches = Callable[[Any], bool]


@dataclass(eq=False)
class _Entry:
    """A batch that was handed out.

    Attributes:
        before: The position before it.
        seen: How to recognize it; None: nothing can.
        is_listed: It is one of an epoch of which the loop has read all batches before it has used one.
    """

    before: Position
    seen: SeenBatch | None
    is_listed: bool = False
    is_used: bool = False
    is_known: bool = False

    def is_alive(self) -> bool:
        return self.seen is not None and self.seen.is_alive()

    def is_settled(self) -> bool:
        """Return whether it was used for sure; what was guessed may turn out to be wrong."""
        return self.is_used and (self.is_known or not self.is_alive())


class HandedOut:
    """The batches of one dataset that were handed out last.

    Args:
        name: The dataset's, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a thread of the loop may read ahead
        self.clear()

    def clear(self) -> None:
        """Forget all batches: training resumes elsewhere."""
        self._entries: deque[_Entry] = deque(maxlen=MAX_AHEAD)
        self._num_ahead = 0
        self._trains_in = 0  # the thread that has called the model
        self._is_stated = self._is_guessed = self._is_used = False

    def add(self, seen: SeenBatch | None, before: Position) -> None:
        """Add a batch that is handed out now."""
        with self._lock:
            self._entries.append(_Entry(before, seen))
            is_read_elsewhere = self._trains_in not in (0, threading.get_ident())
            if not self._is_stated and (self._num_ahead or is_read_elsewhere):
                self._num_ahead += 1

    def end_iteration(self, *, is_whole: bool) -> None:
        """The loop over the batches has ended. If none of them was used, it has read all of them first, as into a list.

        Args:
            is_whole: It was over a whole epoch, not the rest of one.
        """
        if is_whole and not self._is_used:
            for each in self._entries:
                each.is_listed = True
        self._is_used = False

    def state_ahead(self, num_batches: int) -> None:
        """The loop has not used the newest batches.

        Raises:
            ConfigError: Not so many were handed out, or not so many can be left out.
        """
        if num_batches > len(self._entries):
            raise ConfigError(
                f"set_read_ahead({num_batches}): the loop has got {len(self._entries)} batches of dataset {self._name!r} since "
                f"it began or resumed, of which at most {MAX_AHEAD} can be left out."
            )
        self._num_ahead, self._is_stated = num_batches, True

    def first_unused(self) -> Position | None:
        """Return the position before the batches that were read ahead; None if there are none.

        Raises:
            UsageError: It is not known which these are.
        """
        with self._lock:
            ahead = list(self._entries)[max(0, len(self._entries) - self._num_ahead) :]
        while ahead and not self._is_stated and not ahead[0].is_alive():
            ahead.pop(0)  # dropped without being used
        if not ahead:
            return None
        if self._is_stated or not (self._is_guessed or ahead[0].is_listed):
            return ahead[0].before
        if ahead[0].is_listed:
            raise UsageError(
                f"the loop has read all batches of dataset {self._name!r} before it trained on them, and it is not known whether "
                "a training that resumes reads all rows again, or those that are left: train on each batch before the next is "
                "read, or call set_read_ahead(num_batches) of the shard before save_checkpoint; 0 is for data that is kept and "
                "read whole at each start."
            )
        raise UsageError(
            f"the loop has read batches of dataset {self._name!r} ahead, and called the model with other tensors than theirs, so "
            "that it is not known which of them the checkpoint has to count: change and move tensors in to_torch(collate_fn=, "
            "device=) or in the model, or call set_read_ahead(num_batches) of the shard before save_checkpoint."
        )

    def has_unused(self) -> bool:
        """Return whether there are batches that are not known to be used."""
        return bool(self._entries) and not self._entries[-1].is_settled()

    def find(self, matches: Matches) -> bool:
        """The model is called; returns whether that is with one of the batches that were not used before."""
        with self._lock:
            for each in self._open():
                if each.seen is not None and matches(each.seen):
                    each.is_known = True
                    self._use(each, is_guessed=False)
                    return True
        return False

    def guess(self) -> None:
        """The model is trained on other tensors: the oldest batch in memory is used, unless the last one still is."""
        with self._lock:
            batches = self._open()
            unused = [each for each in batches if not each.is_used]
            last = next((each for each in reversed(batches) if each.is_used), None)
            if not unused or (last is not None and last.is_known and last.is_alive()):
                return
            alive = [each for each in unused if each.is_alive()]
            self._use(alive[0] if alive else unused[-1], is_guessed=len(alive) > 1)

    def _use(self, entry: _Entry, *, is_guessed: bool) -> None:
        for number, each in enumerate(reversed(self._entries)):
            if each is entry:
                each.is_used = self._is_used = True
                self._trains_in = threading.get_ident()
                self._is_guessed = is_guessed
                if not self._is_stated:
                    self._num_ahead = number
                return
            each.is_used = False  # that was a guess

    def _open(self) -> list[_Entry]:
        """Return the batch that is known to be the last that was used, and those after it."""
        found: list[_Entry] = []
        for each in reversed(self._entries):
            found.append(each)
            if each.is_settled():
                break
        return found[::-1]


class Passes:
    """Shows the passes of prepared models to the datasets of a session, and their batches to `BatchSizes` of the session.

    Args:
        on_batch: Called with the name of a dataset and each batch that it hands out, and with None at the end of an epoch.

    Attributes:
        describe: Returns how to recognize a batch, or None. Without it, none is.
    """

    def __init__(self, on_batch: Callable[[str, Any], None] = lambda name, batch: None) -> None:
        self.describe: Callable[[Any], SeenBatch | None] | None = None
        self.on_batch = on_batch
        self._datasets: weakref.WeakSet[HandedOut] = weakref.WeakSet()

    def follow(self, name: str) -> HandedOut:
        """Return the batches of a dataset, of which none is handed out yet."""
        handed_out = HandedOut(name)
        self._datasets.add(handed_out)
        return handed_out

    def recognize(self, batch: Any) -> SeenBatch | None:
        """Return how to recognize a batch; None: nothing can."""
        return None if self.describe is None or batch is None else self.describe(batch)

    def has_unused(self) -> bool:
        """Return whether a dataset has handed out batches that are not known to be used."""
        return self.describe is not None and any(each.has_unused() for each in self._datasets)

    def on_pass(self, matches: Matches, *, is_training: bool) -> None:
        """A model is called, so that gradients are computed.

        Args:
            matches: Whether a batch is among the inputs.
            is_training: The model is in training mode.
        """
        datasets = list(self._datasets)
        is_found = [each.find(matches) for each in datasets]
        if is_training and not any(is_found):
            for each in datasets:
                each.guess()

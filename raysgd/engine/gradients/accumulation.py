"""Where one optimizer step ends and the next begins, when its gradients are those of several batches. Pure."""

from __future__ import annotations


class Accumulation:
    """Counts the batches of a step. A batch may have several backward passes, whose gradients add up, or none.

    A step is complete with the first backward pass of its last batch: after ``steps`` batches, or with the last batch of a
    loader. A batch begins with its first backward pass: `UsedBatches` calls `on_batch` for those of a loader, and for those that
    have none; of others, it is the one that follows a call of the optimizer.

    Args:
        steps: Batches per step.

    Attributes:
        is_last_batch: The last batch of a loader has begun.
        was_skipped: The last step was skipped, because its gradients overflowed.
        has_computed: The model was called since the last backward pass.
        is_unclear: No loader says whether this unfinished batch is one with several losses, or several batches.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.is_last_batch = False
        self.was_skipped = False
        self.has_computed = False
        self.is_unclear = False
        self._count = 0  # batches since the last step
        self._num_passes = 0  # backward passes since the last step
        self._is_announced = False  # a loader hands out batches
        self._begins = True  # the next backward pass is the first of a batch that is not counted yet
        self._is_first = True  # the next backward pass is the first of its batch
        self._is_complete = False
        self._steps_since_scheduler = 0

    @property
    def will_complete(self) -> bool:
        """Whether the step is complete after the next backward pass."""
        return self._is_complete or self.is_last_batch or self._count + self._begins >= self.steps

    def completes_with(self, num_batches: int, *, is_last: bool) -> bool:
        """Return whether the step is complete after the next backward pass, if so many batches begin before it.

        Args:
            num_batches: Batches, of which the pass is of the last one.
            is_last: Whether that is the last one of its loader.
        """
        return self._is_complete or is_last or self._count + num_batches >= self.steps

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the step are complete, and the optimizer has not used them yet."""
        return self._is_complete

    @property
    def is_open(self) -> bool:
        """Whether gradients were collected that no optimizer step has used yet."""
        return self._num_passes > 0

    @property
    def num_batches(self) -> int:
        """The batches of the step so far."""
        return self._count

    @property
    def is_first_pass(self) -> bool:
        """Whether the next backward pass is the first one of its batch."""
        return self._is_first

    def on_batch(self, *, is_last: bool = False) -> None:
        """A batch begins, and is counted even if it has no backward pass."""
        self._is_announced, self.is_last_batch = True, is_last
        self._count += 1
        self._begins, self._is_first, self.is_unclear = False, True, False

    def on_end(self) -> None:
        """The loader that hands out batches has ended, or was left."""
        self._is_announced, self.is_last_batch = False, False
        if not self.is_open:  # they were batches of another loop
            self._count, self._begins = 0, True

    def on_forward(self) -> None:
        """The model was called."""
        self.has_computed = True

    def on_backward(self) -> None:
        """A backward pass was made."""
        self._count += self._begins
        self.is_unclear = not (self._is_first or self._is_announced) and (self.has_computed or self.is_unclear)
        self._is_complete = self._is_complete or self.is_last_batch or self._count >= self.steps
        self._num_passes += 1
        self._begins = self._is_first = self.has_computed = False

    def end_batch(self) -> None:
        """The optimizer was called, which ends a batch."""
        self._begins = self._is_first = True
        self.is_unclear = False

    def resume(self, num_batches: int) -> None:
        """Continue a step of which so many batches were used."""
        self._count, self._num_passes = num_batches, 1

    def discard(self) -> None:
        """The gradients of a complete step were dropped."""
        self._count, self._num_passes, self._is_complete = 0, 0, False
        self.end_batch()

    def on_step(self, *, skipped: bool) -> None:
        """The optimizer has made its step, or left it out."""
        self.discard()
        self.was_skipped = skipped
        self._steps_since_scheduler += not skipped

    def may_schedule(self) -> bool:
        """Whether a call of the scheduler between two steps of the optimizer counts.

        It does not if the optimizer has made no step since the last one that counted, and is within an unfinished step or has
        skipped one.
        """
        return self._steps_since_scheduler > 0 or not (self.is_open or self.was_skipped)

    def on_schedule(self) -> None:
        """The scheduler has made a step: for the step of the optimizer that is complete, or for those made before."""
        self._steps_since_scheduler = -1 if self._is_complete else 0

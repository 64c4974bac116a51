"""Where one optimizer step ends and the next begins, when its gradients are those of several batches. Pure."""

from __future__ import annotations


class Accumulation:
    """Counts the batches of a step.

    A step is complete after ``steps`` batches, or with the last batch of a loader.

    Args:
        steps: Batches per step.

    Attributes:
        count: Batches whose backward pass was made since the last step.
        is_last_batch: The loader has handed out its last batch.
        was_skipped: The last step was skipped, because its gradients overflowed.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.count = 0
        self.is_last_batch = False
        self.was_skipped = False
        self._is_complete = False
        self._steps_since_scheduler = 0

    @property
    def will_complete(self) -> bool:
        """Whether the next backward pass completes the step."""
        return self.is_last_batch or self.count + 1 >= self.steps

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the step are complete, and the optimizer has not used them yet."""
        return self._is_complete

    @property
    def is_open(self) -> bool:
        """Whether gradients were collected that no optimizer step has used yet."""
        return self.count > 0

    def on_backward(self) -> None:
        """A backward pass was made."""
        completes = self.will_complete
        self.count = 1 if self._is_complete else self.count + 1  # the user has left out an optimizer step
        self._is_complete = completes

    def discard(self) -> None:
        """The gradients of a complete step were dropped."""
        self.count, self._is_complete = 0, False

    def on_step(self, *, skipped: bool) -> None:
        """The optimizer has made its step, or left it out."""
        self.count, self._is_complete, self.was_skipped = 0, False, skipped
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

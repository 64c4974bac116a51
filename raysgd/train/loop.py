"""`train`: the one loop over epochs. What a step, a validation, a report and a checkpoint are, a `Stepper` says. Worker side.

It needs no framework: torch's and JAX's trainings run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from raysgd.errors import ConfigError
from raysgd.session import context, rank_state


@dataclass
class LoopPosition:
    """The progress of a training; part of each checkpoint.

    Attributes:
        epoch: The epoch that is trained, from 0.
        epoch_steps: Optimizer steps of that epoch that are done.
        steps: Optimizer steps that are done.
        validated: The step after which the newest validation ran.
        reported: The step of the newest report; -1 if there is more to report of it.
        saved: The step after which the newest checkpoint was saved.
        is_pending: The validation, report and checkpoint that are due after the newest step are still to come.
    """

    epoch: int = 0
    epoch_steps: int = 0
    steps: int = 0
    validated: int = -1
    reported: int = -1
    saved: int = -1
    is_pending: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The end of a training, and what it does after how many steps (``_every``) or epochs. None: never for that reason.

    Attributes:
        epochs, steps: It ends after the first of them that is reached; after `steps` also within an epoch.
        report_every: Reports; there are others after validations, at the ends of epochs and before checkpoints.
        validate_every, validate_every_epochs, validates_last: Validations, and whether one follows the last step.
        save_every, save_every_epochs, saves_last: Checkpoints, and whether one follows the last step. One follows a stop.
        validates_before_saving: Whether only validated weights are saved.
    """

    epochs: int | None = None
    steps: int | None = None
    report_every: int = 1
    validate_every: int | None = None
    validate_every_epochs: int | None = None
    validates_last: bool = False
    save_every: int | None = None
    save_every_epochs: int | None = None
    saves_last: bool = True
    validates_before_saving: bool = False

    def has_all_steps(self, at: LoopPosition) -> bool:
        return self.steps is not None and at.steps >= self.steps

    def is_over(self, at: LoopPosition) -> bool:
        return self.has_all_steps(at) or (self.epochs is not None and at.epoch >= self.epochs)

    def validates(self, at: LoopPosition, *, is_epoch_over: bool) -> bool:
        """Return whether a validation is due by itself, or before the checkpoint that is due."""
        epochs = at.epoch + is_epoch_over
        is_last = self.is_over(replace(at, epoch=epochs))

        def is_due(every: int | None, every_epochs: int | None, last: bool) -> bool:
            return _divides(every, at.steps) or (is_epoch_over and _divides(every_epochs, epochs)) or (is_last and last)

        return is_due(self.validate_every, self.validate_every_epochs, self.validates_last) or (
            self.validates_before_saving and is_due(self.save_every, self.save_every_epochs, self.saves_last)
        )


class Stepper(ABC):
    """One kind of training, as `train` calls it at each place of the loop.

    Attributes:
        position: How far it has come: a new one, or that of the checkpoint it resumes from.
    """

    position: LoopPosition

    @abstractmethod
    def train_epoch(self) -> Iterator[None]:
        """Train on the rest of the epoch; yields after each optimizer step, which `train` then counts."""

    @abstractmethod
    def validate(self) -> None:
        """Validate; what it finds belongs to the next report."""

    @abstractmethod
    def report(self) -> None:
        """Report the newest metrics."""

    @abstractmethod
    def save(self) -> None:
        """Save a checkpoint with the position."""

    def is_epoch_over(self) -> bool:
        """Return whether the newest step was the last of its epoch; False if that is not known before the epoch has ended."""
        return False

    def record(self, *, is_same_step: bool) -> None:  # noqa: B027 - most have nothing to do here
        """Record a place from which training may continue by `raysgd.session.live`.

        Args:
            is_same_step: It is recorded again, after what was due after the step.
        """

    def after_step(self) -> None:  # noqa: B027
        """Called when a step is made and counted, before its validation."""

    def end_step(self) -> None:  # noqa: B027
        """End a step, after its validation and before its report."""

    def end_epoch(self) -> None:  # noqa: B027
        """End an epoch, after its validation and before its report."""

    def after_epoch(self, epoch: int) -> None:  # noqa: B027
        """Called when an epoch is reported and saved, or the last step of all has ended the training within it."""


def train(stepper: Stepper, settings: LoopSettings, should_stop: Callable[[], bool]) -> None:
    """Train from the stepper's position to the end, or until the run is asked to stop.

    Raises:
        ConfigError: An epoch has no step.
    """
    at, due, is_stopping = stepper.position, _Due(stepper, settings), False
    if at.is_pending:  # training continues from where the step was made
        is_epoch_over = stepper.is_epoch_over()
        due.after_step(is_epoch_over=is_epoch_over)
        if is_epoch_over and settings.has_all_steps(at):
            due.after_epoch()
    steps: Iterator[None] = iter(())  # of the epoch; named, since data that is left early must be open when it is saved
    while not settings.is_over(at) and not is_stopping:
        steps = stepper.train_epoch()
        for _ in steps:
            at.steps, at.epoch_steps = at.steps + 1, at.epoch_steps + 1
            is_epoch_over = stepper.is_epoch_over()
            stepper.after_step()
            at.is_pending = True
            stepper.record(is_same_step=False)  # before ranks exchange anything again
            due.after_step(is_epoch_over=is_epoch_over)
            is_stopping = should_stop()  # all ranks find it at the same step, as they ask at each
            if is_stopping or settings.has_all_steps(at):
                break
        else:
            is_epoch_over = True
        if is_epoch_over:
            due.after_epoch()
    if (settings.saves_last or is_stopping) and at.saved != at.steps:
        due.save()
    if at.epoch_steps and settings.has_all_steps(at):
        stepper.after_epoch(at.epoch)


class _Due:
    """Does what is due after a step, each once and in this order: validation, report, checkpoint."""

    def __init__(self, stepper: Stepper, settings: LoopSettings) -> None:
        self._stepper, self._settings, self._at = stepper, settings, stepper.position

    def after_step(self, *, is_epoch_over: bool) -> None:
        settings, at = self._settings, self._at
        if settings.validates(at, is_epoch_over=is_epoch_over):
            self._validate()
        self._stepper.end_step()
        if is_epoch_over or at.validated == at.steps or _divides(settings.report_every, at.steps):
            self._report()
        if not is_epoch_over:  # else once the epoch has ended
            if _divides(settings.save_every, at.steps):
                self.save()
            self._record()

    def after_epoch(self) -> None:
        settings, at = self._settings, self._at
        if not at.epoch_steps:
            raise ConfigError("the training data has no batch for this worker.")
        if settings.validates(at, is_epoch_over=True):
            self._validate()
        self._stepper.end_epoch()
        at.epoch, at.epoch_steps = at.epoch + 1, 0
        self._report()
        is_due = _divides(settings.save_every, at.steps) and at.saved != at.steps
        if is_due or _divides(settings.save_every_epochs, at.epoch):
            self.save()
        self._stepper.after_epoch(at.epoch - 1)
        self._record()

    def save(self) -> None:
        if self._settings.validates_before_saving:
            self._validate()
        self._report()  # so that a resumed training reports what an uninterrupted one does
        self._at.saved, self._at.is_pending = self._at.steps, False
        self._stepper.save()

    def _record(self) -> None:
        self._at.is_pending = False
        self._stepper.record(is_same_step=True)

    def _validate(self) -> None:
        if self._at.validated != self._at.steps:
            with (
                context.current().progress.evaluation,
                rank_state.keep_generators(),
            ):  # a validation must not change the training
                self._stepper.validate()
            self._at.validated, self._at.reported = self._at.steps, -1

    def _report(self) -> None:
        if self._at.reported != self._at.steps:
            self._at.reported = self._at.steps
            self._stepper.report()


def _divides(interval: int | None, number: int) -> bool:
    return interval is not None and number % interval == 0

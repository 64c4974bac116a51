"""What a fault is: where it happens, and what it is given to act on. The kinds are in `raysgd.testing.faults`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Protocol

from raysgd.checkpoint.store import CheckpointStore
from raysgd.config.checks import check_choice, check_count
from raysgd.errors import ConfigError

#: Where a rank can be when a fault happens; see `Fault`.
PHASES = ("start", "report", "collective", "save", "write", "half_written", "written", "committed", "load")
#: Those in which the thread that writes checkpoints is the one that breaks.
IN_WRITER = frozenset({"write", "half_written", "written"})
#: Those that are of one checkpoint.
OF_CHECKPOINT = IN_WRITER | {"save", "committed"}
#: Those in which train_func's own thread is.
IN_TRAINING = frozenset(PHASES) - IN_WRITER


@dataclass(frozen=True)
class Moment:
    """Where a rank is.

    Attributes:
        step: Reports it has made, those of the run before its attempt included.
        checkpoint: Number of the checkpoint that the phase is of; 0 for other phases.
        files: In the phase ``"written"``, the names of the files that were.
    """

    phase: str
    step: int
    checkpoint: int = 0
    files: tuple[str, ...] = ()


class Scene(Protocol):
    """What a fault can reach in the process that it happens in."""

    moment: Moment
    store: CheckpointStore
    random: Random

    @property
    def controller(self) -> str:
        """The name of the TrainerActor."""

    def slow_down(self, delay_s: float, steps: int) -> None:
        """Let this report and those after it last longer."""

    def slow_writes(self, delay_s: float, times: int) -> None:
        """Let this write and those after it last longer."""

    def fail_writes(self, error: int, times: int, for_s: float | None) -> None:
        """Let this write and those after it fail with an errno."""

    def hold(self, memory: object) -> None:
        """Keep something until the attempt is over."""

    def cut_group(self) -> int:
        """Shut the connections of the process group down; returns how many there were."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Fault:
    """Something that goes wrong, once: at the first moment that is not before the one it is planned for.

    Attributes:
        rank: Whose process it happens in.
        step: After so many reports of that rank, counted over the whole run as ``training_iteration`` is; 0: any.
        phase: Where it happens. ``"start"``: train_func is entered. ``"report"``: right after a report. ``"collective"``:
            before a `barrier`, a `broadcast`, a function of ``torch.distributed``, or a backward pass that reduces
            gradients. ``"save"``, ``"load"``: at the call. ``"write"``, ``"half_written"``, ``"written"``: in the thread that
            writes this rank's part, before the first byte, in the middle of a file, and before anybody is told that the
            part is safe; of ranks that give a state. ``"committed"``: at the first call of the rank's session that finds
            the checkpoint committed. None: the usual one of its kind.
        checkpoint: In the phases of a checkpoint the lowest number it may have; 0: any.

    Raises:
        ConfigError: There is no such place.
    """

    rank: int = 0
    step: int = 0
    phase: str | None = None
    checkpoint: int = 0

    usual_phase: ClassVar[str] = "report"
    phases: ClassVar[frozenset[str]] = frozenset(PHASES)
    needs_state: ClassVar[bool] = False  # it can only happen on a rank that gives a state to checkpoints
    in_driver: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("rank", "step", "checkpoint"):
            check_count(f"{kind}({name})", getattr(self, name), minimum=0)
        if self.phase is not None:
            check_choice(f"{kind}(phase)", self.phase, [phase for phase in PHASES if phase in self.phases])
        if self.checkpoint and self.where not in OF_CHECKPOINT:
            allowed = ", ".join(repr(phase) for phase in PHASES if phase in OF_CHECKPOINT & self.phases)
            raise ConfigError(
                f"{kind}(checkpoint={self.checkpoint}) happens in the phase {self.where!r}, which is of no checkpoint; "
                f"give a phase of {allowed or 'another kind of fault'}."
            )

    @property
    def where(self) -> str:
        """Its phase."""
        return self.phase or self.usual_phase

    def is_due(self, moment: Moment) -> bool:
        """Whether it may happen now."""
        return self.where == moment.phase and self.step <= moment.step and self.checkpoint <= moment.checkpoint

    def act(self, scene: Scene) -> None:
        """Make it happen."""
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if not self._is_default(f)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _is_default(self, spec: dataclasses.Field[Any]) -> bool:
        made = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        return bool(getattr(self, spec.name) == made)

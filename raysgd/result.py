"""What a run gives its readers: results, events, its description and its status. Plain data, shared by all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The keys that raysgd adds to every result. A metric of the user with such a name is refused.
AUTOMATIC_KEYS = frozenset(
    {"training_iteration", "timestamp", "time_this_iter_s", "time_total_s", "world_size", "attempt"}
)
#: The metric that raysgd adds if train_func reads a dataset. This name is refused for a metric of the user, too.
DATA_WAIT_FRACTION = "data_wait_fraction"


class Result(dict[str, Any]):
    """One round of reports: a dict of metrics with the automatic keys, so ``**result`` and ``tune.report(result)`` work.

    Its items are the metrics of the lowest rank in the round (or over all ranks, as ``reduce=`` says), plus

    - ``training_iteration``: number of this round, from 1, which continues after failures and resumes;
    - ``timestamp``: time of that rank's report, in seconds since the epoch;
    - ``time_this_iter_s``, ``time_total_s``: seconds since that rank's previous report, and of training in total;
    - ``world_size``, ``attempt``: number of workers in the attempt, and number of the attempt, from 1.

    Attributes:
        workers: Each rank's own metrics, in rank order, without the automatic keys.
        ranks: The ranks of ``workers``. A rank that finished early is in no later round.
    """

    __slots__ = ("ranks", "workers")

    def __init__(
        self,
        metrics: Mapping[str, Any],
        workers: list[dict[str, Any]] | None = None,
        ranks: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(metrics)
        self.workers: list[dict[str, Any]] = [dict(metrics)] if workers is None else workers
        self.ranks = ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Result, (dict(self), self.workers, self.ranks)


@dataclass(frozen=True)
class Event:
    """An event of a run, as in ``events.jsonl``.

    Attributes:
        kind: ``run_start``, ``attempt_start``, ``worker_up``, ``entered``, ``left``, ``resize``, ``preemption``, ``regroup``,
            ``paused``, ``resumed``, ``controller_restart``, ``checkpoint``, ``checkpoint_deleted``, ``failure``, ``continued``,
            ``hang``, ``mismatch``, ``straggler``, ``warning``, ``sample``, ``stop``, ``cancel``, ``run_end``.
        timestamp: Seconds since the epoch.
        data: Details that JSON can hold.
    """

    kind: str
    timestamp: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that a callback gets, also as ``Trainer.run_info`` and ``ResultStream.run_info``.

    Attributes:
        name: The run's name, the last part of ``run_dir``.
        run_dir: Path or URI of the folder that holds the run's files.
        config: The config given to train_func, with secrets redacted.
        num_workers: Number of workers; the minimum for an elastic group.
        backend: Name of the backend.
        resources: A dict per worker: the rows of the resource table.
        started_s: When the run began, in seconds since the epoch; 0 if that is not known.
        warnings: The texts of the run's warnings so far; it grows during the run. Empty in workers.
        read_earlier: Returns the results of the runs that this one was resumed from, up to the checkpoints, oldest first; none
            in workers. Runs in other Trainers' folders belong to the training if they have the same train_func.
        read_goodput: Returns `goodput`; None in workers, and in other processes than the driver.
    """

    name: str
    run_dir: str
    config: dict[str, Any]
    num_workers: int
    backend: str
    resources: list[dict[str, Any]] = field(default_factory=list)
    started_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    read_earlier: Callable[[], list[Result]] = field(default=list, repr=False, compare=False)
    read_goodput: Callable[[], float | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def goodput(self) -> float | None:
        """The part of the workers' time so far, without pauses, that was training and evaluation; None if it is not known.

        `raysgd why` says what the rest was.
        """
        return self.read_goodput()

    @property
    def label(self) -> str:
        """The names of the Trainer's folder and of the run, which no other run has: ``train_func_.../run_001``."""
        return "/".join(self.run_dir.partition("?")[0].rstrip("/").split("/")[-2:])


#: The states of a run that has ended, and those of one that is live; see `RunStatus`.
ENDED = frozenset({"done", "stopped", "cancelled", "error"})
LIVE = frozenset({"starting", "running", "recovering", "paused", "ending"})
#: Why a run was cancelled that is a trial, as its files have it.
ENDED_BY_SEARCH = "the search ended this trial"


@dataclass(frozen=True)
class RunStatus:
    """The state of a Trainer's latest run.

    Attributes:
        state: ``"idle"`` (no run yet), ``"starting"``, ``"running"``, ``"recovering"``, ``"paused"``, ``"ending"``; or how
            it ended: ``"done"``, ``"stopped"``, ``"cancelled"``, ``"error"``.
        name: Last part of ``run_dir``.
        run_dir: Path or URI of the run's folder.
        attempt: Number of the latest attempt.
        world_size: Number of ranks that run now.
        iteration: Number of the latest round that all ranks have reported.
        num_failures: Number of failures so far.
        checkpoint: Path or URI of the newest checkpoint on storage, or None.
    """

    state: str = "idle"
    name: str = ""
    run_dir: str = ""
    attempt: int = 0
    world_size: int = 0
    iteration: int = 0
    num_failures: int = 0
    checkpoint: str | None = None

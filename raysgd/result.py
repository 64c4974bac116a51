"""What a run tells its readers: results, events, and the description of the run. Plain data, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The keys raysgd adds to every result; a user's metric of such a name is refused.
AUTOMATIC_KEYS = frozenset(
    {"training_iteration", "timestamp", "time_this_iter_s", "time_total_s", "world_size", "attempt"}
)
#: The metric raysgd adds where train_func reads a dataset; a user's of this name is refused too.
DATA_WAIT_FRACTION = "data_wait_fraction"


class Result(dict[str, Any]):
    """One round of reports: a dict of metrics with the automatic keys, so ``**result`` and ``tune.report(result)`` work.

    Its items are the metrics of the lowest rank that took part in the round (or what ``reduce=`` made of all ranks), plus

    - ``training_iteration``: number of this round, from 1, going on through failures and resumes;
    - ``timestamp``: seconds since the epoch at which that rank reported;
    - ``time_this_iter_s``, ``time_total_s``: seconds since its report before, and of training in all;
    - ``world_size``, ``attempt``: workers in the attempt, and the attempt's number from 1.

    Attributes:
        workers: Each rank's own metrics, in rank order, without the automatic keys.
        ranks: The ranks ``workers`` belongs to; a rank that has finished early takes no further part.
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
    """Something that happened to a run, as in ``events.jsonl``.

    Attributes:
        kind: ``run_start``, ``attempt_start``, ``worker_up``, ``resize``, ``preemption``, ``regroup``, ``paused``,
            ``resumed``, ``controller_restart``, ``checkpoint``, ``checkpoint_deleted``, ``failure``, ``hang``,
            ``straggler``, ``warning``, ``sample``, ``attempt_end``, ``run_end``.
        timestamp: Seconds since the epoch.
        data: JSON-able details.
    """

    kind: str
    timestamp: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInfo:
    """What a callback gets told about its run.

    Attributes:
        name: The run's name, the last part of ``run_dir``.
        run_dir: Path or URI of the folder that holds the run's files.
        config: The config given to train_func, with secrets redacted.
        num_workers: Workers at the start; of an elastic group the least it may have.
        backend: Name of the backend.
        resources: The resource table's rows, a dict per worker.
    """

    name: str
    run_dir: str
    config: dict[str, Any]
    num_workers: int
    backend: str
    resources: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class RunStatus:
    """How the latest run of a Trainer stands.

    Attributes:
        state: ``"idle"`` (there was none), ``"starting"``, ``"running"``, ``"recovering"``, ``"paused"``, ``"ending"``; or how
            it ended: ``"done"``, ``"stopped"``, ``"cancelled"``, ``"error"``.
        name: Last part of ``run_dir``.
        run_dir: Path or URI of the run's folder.
        attempt: Number of the last attempt.
        world_size: Ranks that run at the moment.
        iteration: The last round that all ranks have reported.
        num_failures: Of the run so far.
        checkpoint: The newest on storage; None: there is none.
    """

    state: str = "idle"
    name: str = ""
    run_dir: str = ""
    attempt: int = 0
    world_size: int = 0
    iteration: int = 0
    num_failures: int = 0
    checkpoint: str | None = None

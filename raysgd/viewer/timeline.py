"""What happened in a run and when, from the events of its journal: worker processes, attempts, checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raysgd._util.metric_names import flatten
from raysgd.callbacks.values import clip, short

#: How many checkpoints, and how many events of other kinds, a page gets. The oldest are left out.
MAX_CHECKPOINTS = 2000
MAX_EVENTS = 2000
#: Events that the timeline shows in another form.
_DRAWN = frozenset({"worker_up", "entered", "left", "attempt_start", "checkpoint", "checkpoint_deleted", "sample"})
_MAX_TEXT = 2000
_LABELS = {"pause": "paused"}


@dataclass
class Life:
    """A worker process in one rank.

    Attributes:
        rank: Its rank.
        node: Its node.
        pid: Its process id.
        start: When it was ready, in seconds since the epoch.
        inside: When it was in train_func in this rank: pairs of begin and end; None: it still is.
        end: When the rank was left; None: it is still held.
        how: Why: ``"died"``, ``"left"`` (released, or got another rank), ``"end"`` (of the run), ``""`` (not yet).
    """

    rank: int
    node: str
    pid: int
    start: float
    inside: list[list[float | None]] = field(default_factory=list)
    end: float | None = None
    how: str = ""

    def leave(self, timestamp: float) -> None:
        """End the time in train_func."""
        if self.inside and self.inside[-1][1] is None:
            self.inside[-1][1] = timestamp


@dataclass
class Attempt:
    """One attempt of a run: its start, the first entry into train_func, its end, and why it ended."""

    number: int
    world_size: int
    start: float
    checkpoint: str | None = None
    entered: float | None = None
    end: float | None = None
    why: str = ""


@dataclass
class Saved:
    """A checkpoint: the iteration it belongs to, when its commit was, and seconds and bytes of its writing, if known."""

    number: int
    iteration: int
    committed: float
    seconds: float | None
    num_bytes: int | None
    metrics: str
    is_deleted: bool = False


class Timeline:
    """Collects the events of a run, in order."""

    def __init__(self) -> None:
        self._lives: list[Life] = []
        self._held: dict[int, Life] = {}
        self._ready: dict[int, Life] = {}
        self._lost_at: float | None = None
        self._lost_ranks: frozenset[int] = frozenset()
        self._attempts: list[Attempt] = []
        self._checkpoints: dict[int, Saved] = {}
        self._num_checkpoints = 0
        self._events: list[dict[str, Any]] = []
        self._num_events = 0
        self._adders: dict[str, Callable[[float, Mapping[str, Any]], None]] = {
            "worker_up": self._add_worker,
            "attempt_start": self._start_attempt,
            "entered": self._enter,
            "left": self._leave,
            "failure": self._fail,
            "regroup": self._regroup,
            "controller_restart": self._restart,
            "paused": self._pause,
            "checkpoint": self._save,
            "checkpoint_deleted": self._delete,
            "run_end": self._end,
        }

    def add(self, kind: str, timestamp: float, data: Mapping[str, Any]) -> None:
        """Add an event."""
        if kind not in _DRAWN:
            self._note(kind, timestamp, data)
        if (add := self._adders.get(kind)) is not None:
            add(timestamp, data)

    def to_json(self) -> dict[str, Any]:
        """Return the collected as JSON can hold it."""
        return {
            "workers": [asdict(life) | self._death_of(life) for life in self._lives],
            "attempts": [asdict(attempt) for attempt in self._attempts],
            "checkpoints": [asdict(saved) for saved in self._checkpoints.values()],
            "num_checkpoints": self._num_checkpoints,
            "events": self._events,
            "num_events": self._num_events,
        }

    def _add_worker(self, timestamp: float, data: Mapping[str, Any]) -> None:
        rank = data["rank"]
        self._ready[rank] = Life(rank, str(data.get("node", "")), data.get("pid", 0), timestamp)

    def _start_attempt(self, timestamp: float, data: Mapping[str, Any]) -> None:
        self._form(timestamp)
        checkpoint = data.get("checkpoint")
        name = None if checkpoint is None else str(checkpoint).rpartition("/")[2]
        self._attempts.append(Attempt(data["attempt"], data["world_size"], timestamp, name))

    def _death_of(self, life: Life) -> dict[str, Any]:
        """Return the end of a process that has died while the next group is not formed yet; empty for others."""
        has_died = life.end is None and life.rank in self._lost_ranks and self._held.get(life.rank) is life
        return {"end": self._lost_at, "how": "died"} if has_died else {}

    def _form(self, timestamp: float) -> None:
        """A group is complete: end the processes that are not in it, and start those that are new."""
        if not self._ready:
            return
        for rank, before in list(self._held.items()):
            after = self._ready.get(rank)
            if after is None or (after.node, after.pid) != (before.node, before.pid):
                has_died = rank in self._lost_ranks
                self._end_lives({rank: before}, self._lost_at or timestamp, "died" if has_died else "left")
                del self._held[rank]
        for rank, life in sorted(self._ready.items()):
            if rank not in self._held:
                self._held[rank] = life
                self._lives.append(life)
        self._ready = {}
        self._lost_at, self._lost_ranks = None, frozenset()

    def _enter(self, timestamp: float, data: Mapping[str, Any]) -> None:
        timestamp = data.get("timestamp", timestamp)
        if self._attempts and self._attempts[-1].entered is None:
            self._attempts[-1].entered = timestamp
        if (life := self._held.get(data["rank"])) is not None:
            life.leave(timestamp)
            life.inside.append([timestamp, None])

    def _leave(self, timestamp: float, data: Mapping[str, Any]) -> None:
        if (life := self._held.get(data["rank"])) is not None:
            life.leave(timestamp)

    def _fail(self, timestamp: float, data: Mapping[str, Any]) -> None:
        self._end_attempt(timestamp, str(data.get("error", "")))
        self._lost_at = timestamp
        if not data.get("raised"):  # otherwise their processes live
            self._lost_ranks |= set(data.get("ranks", ()))

    def _regroup(self, timestamp: float, data: Mapping[str, Any]) -> None:
        self._end_attempt(timestamp, str(data.get("why", "")))
        self._lost_at = timestamp

    def _restart(self, timestamp: float, data: Mapping[str, Any]) -> None:
        """The controller's process died, and all workers with it."""
        self._end_attempt(timestamp, "the controller was restarted")
        self._lost_at, self._lost_ranks = timestamp, frozenset(self._held)

    def _pause(self, timestamp: float, data: Mapping[str, Any]) -> None:
        self._end_attempt(timestamp, "paused")
        self._end_held(timestamp, "left")

    def _end(self, timestamp: float, data: Mapping[str, Any]) -> None:
        self._form(timestamp)
        self._end_attempt(timestamp, str(data.get("kind", "")))
        self._end_held(timestamp, "end")

    def _end_attempt(self, timestamp: float, why: str) -> None:
        if self._attempts and self._attempts[-1].end is None:
            self._attempts[-1].end, self._attempts[-1].why = timestamp, clip(why, _MAX_TEXT)
            for life in self._held.values():
                life.leave(timestamp)

    def _end_held(self, timestamp: float, how: str) -> None:
        lost = {rank: life for rank, life in self._held.items() if rank in self._lost_ranks}
        self._end_lives(lost, self._lost_at or timestamp, "died")
        self._end_lives(self._held, timestamp, how)
        self._held, self._lost_ranks = {}, frozenset()

    @staticmethod
    def _end_lives(lives: Mapping[int, Life], timestamp: float, how: str) -> None:
        for life in lives.values():
            if life.end is None:
                life.end, life.how = timestamp, how

    def _delete(self, timestamp: float, data: Mapping[str, Any]) -> None:
        if (saved := self._checkpoints.get(data["number"])) is not None:
            saved.is_deleted = True

    def _save(self, timestamp: float, data: Mapping[str, Any]) -> None:
        metrics = ", ".join(f"{name} {short(value)}" for name, value in flatten(data.get("metrics") or {}).items())
        saved = Saved(
            data["number"],
            data["iteration"],
            timestamp,
            data.get("seconds"),
            data.get("size_bytes"),
            clip(metrics, 300),
        )
        self._num_checkpoints += saved.number not in self._checkpoints
        self._checkpoints[saved.number] = saved
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            del self._checkpoints[next(iter(self._checkpoints))]

    def _note(self, kind: str, timestamp: float, data: Mapping[str, Any]) -> None:
        self._num_events += 1
        note: dict[str, Any] = {"time": timestamp, "kind": kind, "text": describe(kind, data)}
        if kind == "regroup":  # drawn as that for which the group forms again
            note["label"] = _LABELS.get(data.get("cause", kind), data.get("cause", kind))
        if stacks := data.get("stacks"):
            note["stacks"] = {str(rank): str(stack) for rank, stack in stacks.items()}
        ranks = data.get("ranks", [data["rank"]] if isinstance(data.get("rank"), int) else [])
        self._events.append({**note, "ranks": ranks})
        if len(self._events) > MAX_EVENTS:
            del self._events[0]


def describe(kind: str, data: Mapping[str, Any]) -> str:
    """Return an event's details as one text."""
    match kind:
        case "warning":
            rank = data.get("rank")
            return (f"rank {rank}: " if rank is not None else "") + str(data.get("message", ""))
        case "resize":
            return f"{data.get('old')} workers before, {data.get('new')} now"
        case "failure":
            return f"{data.get('error', '')} ({data.get('action', '')})"
        case "run_end":
            message = str(data.get("message") or "")
            return f"{data.get('kind', '')}: {message}" if message else str(data.get("kind", ""))
        case "run_start":
            return str(data.get("name", ""))
    shown = flatten({name: value for name, value in data.items() if name not in ("stacks", "collectives")})
    why = shown.pop("why", None)
    rank = shown.get("rank")
    if why is not None:
        return clip((f"rank {rank}: " if rank is not None else "") + str(why), _MAX_TEXT)
    return clip(", ".join(f"{name} {value}" for name, value in shown.items()), _MAX_TEXT)

"""How far train_func has come, and where its time went, for the liveness checks of the controller. Worker side."""

from __future__ import annotations

import gc
import math
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident, get_native_id
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from raysgd.goodput.spans import Step

Clock = Callable[[], float]
#: How far two clocks may move apart: crystals differ by some 20 parts in a million.
CLOCK_DRIFT = 2e-5
#: Steps are kept in windows of so many: the first ones, the newest ones, and some between, at equal distances.
WINDOW_STEPS = 16
NUM_FIRST, NUM_BETWEEN, NUM_NEWEST = 16, 64, 32
#: How many changes of a step are kept.
MAX_CHANGES = 100
#: In place of the index of a use: the step ends.
END = -1
#: The numbers of a step begin with these, before its changes.
_HEAD = 2


class Spent(NamedTuple):
    """The time of train_func, from its beginning to its last step.

    A step begins with a report or with a batch, whichever the loop makes more often, or in a script after one of its optimizer's
    steps.

    Attributes:
        steps: How many steps have begun.
        total_s: Seconds since train_func was entered.
        data_s: Seconds of these in reading batches.
    """

    steps: int = 0
    total_s: float = 0.0
    data_s: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """A worker's answer to a heartbeat call.

    Attributes:
        calls: Session calls of train_func in this attempt.
        idle_s: Seconds since the last one, or since train_func was entered.
        longest_pause_s: The longest time between two of them; 0 before the second.
        phase: The last one, such as ``"report"``.
        is_inside: Whether train_func is running.
        clock_s: The monotonic clock of its node when it answered.
    """

    calls: int = 0
    idle_s: float = 0.0
    longest_pause_s: float = 0.0
    phase: str = ""
    is_inside: bool = False
    clock_s: float = 0.0


class NodeClock(NamedTuple):
    """The clock of a node, compared with that of the controller.

    Attributes:
        ahead_s: What is added to the node's monotonic clock to get seconds since the epoch, as the controller counts them.
        error_s: How wrong that may be: half of the time that the answer took.
        read_s: The node's monotonic clock when it was read.
    """

    ahead_s: float
    error_s: float
    read_s: float

    @classmethod
    def best(cls, before: NodeClock | None, asked_s: float, answered_s: float, read_s: float) -> NodeClock:
        """Return the best reading, if a new one was asked for and answered at these times of the controller."""
        new = cls((asked_s + answered_s) / 2 - read_s, max(0.0, answered_s - asked_s) / 2, read_s)
        if before is None or new.error_s <= before.error_s + (read_s - before.read_s) * CLOCK_DRIFT:
            return new
        return before


def is_kept(window: int, newest: int) -> bool:
    """Return whether a window is kept when there are windows up to ``newest``. One that is not is never kept later."""
    distance = 1 << (newest // NUM_BETWEEN).bit_length()
    return window < NUM_FIRST or window > newest - NUM_NEWEST or window % distance == 0


class SpanRecorder:
    """The newest steps of one thread, and some of the earlier ones. That thread calls all but `copy`.

    Which steps are kept follows from their numbers alone, so that all ranks keep the same ones.

    Args:
        now: The time at which step 0 begins, in seconds.
        use: The index of its use.
    """

    def __init__(self, now: float, use: int) -> None:
        # One flat array for a step: its number, its reports, and then the time and the use of each change.
        self._numbers = array("d", (0, 0, now, use))
        self._windows = {0: [self._numbers]}

    def begin_step(self, number: int, reports: int, now: float, use: int) -> None:
        """End the step and begin the next one, with this use."""
        now = max(now, self._numbers[-2])  # when the newest use began
        self._numbers.extend((now, END))
        window = number // WINDOW_STEPS
        if window not in self._windows:
            kept = {each: steps for each, steps in self._windows.items() if is_kept(each, window)}
            self._windows = {**kept, window: []}
        self._numbers = array("d", (number, reports, now, use))
        self._windows[window].append(self._numbers)

    def change(self, now: float, use: int) -> None:
        """Another use begins."""
        numbers = self._numbers
        if len(numbers) < _HEAD + 2 * MAX_CHANGES:
            numbers.append(now)
            numbers.append(use)

    def insert(self, since: float, now: float, use: int, after: int) -> None:
        """The time since then had a use that is known only now; ``after`` is the use from now on."""
        numbers = self._numbers
        while len(numbers) > _HEAD + 2 and numbers[-2] >= since:
            del numbers[-2:]
        self.change(max(since, numbers[-2]), use)
        self.change(now, after)

    @property
    def newest(self) -> array[float]:
        """The newest step, as `copy` returns it."""
        return self._numbers

    def copy(self) -> list[array[float]]:
        """Return the kept steps, each as one array: number, reports, and the time and the use of each change. Any thread may ask.

        The use of the newest change may not be there yet.
        """
        # A list and an array are copied at once, whatever the recording thread does.
        return [numbers[:] for steps in list(self._windows.values()) for numbers in steps[:]]


class Uses:
    """Divides the time of one thread among uses, so that each second has exactly one.

    At each moment the innermost ``with`` block of the thread's stopwatches has it, and outside all of them `base`.

    Attributes:
        thread: Identifier of the timed thread: the one that made the object, until `Progress.enter` changes it.
        base: The use outside all blocks.
        running: It, and the uses of the blocks that the thread is in, the innermost last.
        recorder: Keeps when each use began.
    """

    __slots__ = ("_since", "base", "clock", "recorder", "running", "thread")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.begin(Stopwatch(self))

    def begin(self, base: Stopwatch) -> None:
        """Start to count for this thread, outside all blocks."""
        self.thread = get_ident()
        self.base, self.running, self._since = base, [base], self.clock()
        self.recorder = SpanRecorder(self._since, base.index)

    def enter(self, use: Stopwatch) -> None:
        self.settle()
        self.running.append(use)
        self.recorder.change(self._since, use.index)

    def leave(self) -> None:
        self.settle()
        if len(self.running) > 1:  # the block was entered since `begin`
            self.running.pop()
            self.recorder.change(self._since, self.running[-1].index)

    def settle(self) -> None:
        """Count the time up to now."""
        now = self.clock()
        # Python changes threads at calls and jumps only: another thread sees both changes, or none.
        self.running[-1].seconds += now - self._since
        self._since = now

    def change_base(self, base: Stopwatch) -> None:
        """Have another use outside all blocks from now on."""
        self.settle()
        self.base = self.running[0] = base
        self.recorder.change(self._since, self.running[-1].index)

    def seconds_of(self, watches: Collection[Stopwatch]) -> list[float]:
        """Return the seconds of all stopwatches up to now. Any thread may ask."""
        while True:
            since, running = self._since, self.running[-1]
            seconds = [watch.seconds for watch in watches]
            now = self.clock()
            # The timed thread counts meanwhile, as may this one if Python collects garbage here: then read again.
            if self._since is since:
                return [
                    spent_s + (now - since) * (watch is running)
                    for watch, spent_s in zip(watches, seconds, strict=True)
                ]


class Stopwatch:
    """Adds up the time of one use: that of the timed thread in its ``with`` blocks.

    Other threads may enter them too; they are not counted. See `Uses`.

    Attributes:
        seconds: Added up until another use began.
        index: The place of the use in `USES`.
    """

    __slots__ = ("_depth", "_uses", "index", "seconds")

    def __init__(self, uses: Uses, index: int = 0) -> None:
        self.seconds = 0.0
        self.index = index
        self._uses = uses
        self._depth = 0

    @property
    def is_running(self) -> bool:
        """Whether the timed thread is in such a block."""
        return self._depth > 0

    def __enter__(self) -> None:
        if get_ident() == self._uses.thread:
            self._depth += 1
            self._uses.enter(self)

    def __exit__(self, *_: object) -> None:
        if get_ident() == self._uses.thread and self._depth:
            self._depth -= 1
            self._uses.leave()

    def add(self, seconds: float) -> None:
        """Count time that has just passed, which the thread spent here without a block."""
        running, now = self._uses.running[-1], self._uses.clock()
        self.seconds += seconds
        running.seconds -= seconds
        self._uses.recorder.insert(now - seconds, now, self.index, running.index)


#: What the time of train_func is used for: before the first batch or report, and afterwards outside all other uses.
SETUP, TRAINING = "setup", "training"
#: The uses that are measured: reading batches, ``save_checkpoint``, waiting for other ranks, waiting for what the driver's script
#: gives, compiling, evaluations, callbacks of the worker, and Python's garbage collector.
DATA, CHECKPOINT, WAITING, SCRIPT = "data", "checkpoint", "waiting", "script"
COMPILING, EVALUATION, CALLBACKS, GARBAGE = "compiling", "evaluation", "callbacks", "garbage"
USES = (SETUP, TRAINING, DATA, CHECKPOINT, WAITING, SCRIPT, COMPILING, EVALUATION, CALLBACKS, GARBAGE)


class BatchSizes:
    """Adds up how large the batches of a rank were, and how long it computed with each; from that follows what depends on it.

    Attributes:
        sums: By dataset, the number of batches; their rows and their values; the seconds of computing; and over all batches, the
            sums of values squared, of values times seconds, and of seconds squared. Only of the first `_MAX_SOURCES`.
    """

    _MAX_SOURCES = 4

    def __init__(self, uses: Uses, computing: Stopwatch) -> None:
        self.sums: dict[str, list[float]] = {}
        self._uses = uses
        self._computing = computing
        self._since_s = 0.0
        self._before = ("", 0, 0)

    def add(self, source: str, batch: Any) -> None:
        """Count a batch that the loop gets now, and the seconds of computing since the one before as that one's.

        Batches of an evaluation are not counted. Nor is the last one of an epoch: what the loop does after it belongs to no step.

        Args:
            source: Its dataset.
            batch: None: the epoch has ended.
        """
        if batch is None or self._uses.base is not self._computing:
            self._before = ("", 0, 0)
            return
        computed_s = self._computing.seconds
        took_s, self._since_s = computed_s - self._since_s, computed_s
        (known, rows, values), self._before = self._before, (source, *count_values(batch))
        if not values or (known not in self.sums and len(self.sums) >= self._MAX_SOURCES):
            return
        count, all_rows, all_values, seconds, squares, products, seconds_squared = self.sums.get(known, [0.0] * 7)
        # One assignment: a thread that reads meanwhile does not mix two batches.
        self.sums[known] = [
            count + 1,
            all_rows + rows,
            all_values + values,
            seconds + took_s,
            squares + values * values,
            products + values * took_s,
            seconds_squared + took_s * took_s,
        ]


def count_values(batch: Any) -> tuple[int, int]:
    """Return the rows of a batch, by its first array, and the values of all its arrays; of what has none, rows of one value."""
    if (shape := getattr(batch, "shape", None)) is not None:
        return (int(shape[0]) if len(shape) else 1), math.prod(shape)
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if not isinstance(batch, (list, tuple)) or not batch:
        return 1, 1
    if not (hasattr(batch[0], "shape") or isinstance(batch[0], (Mapping, list, tuple))):
        return len(batch), len(batch)
    counted = [count_values(part) for part in batch]
    return counted[0][0], sum(values for _, values in counted)


class Progress:
    """The session calls of one attempt. The training thread notes them, and other threads read them, without a lock.

    A thread that writes checkpoints notes its progress too, by `wrote`.

    Attributes:
        data: Runs while a batch is read.
        checkpoint: Runs in ``save_checkpoint``, which waits for storage that is slower than saves are made.
        waiting: Runs while the rank is known to wait for others.
        script: Runs while all ranks wait for what the driver's script gives to the run.
        compiling, evaluation, callbacks, garbage: Run in these.
        batches: The sizes of the batches that were read.
        sent_bytes: Bytes of the gradients that this rank has averaged with others, as far as that is seen.
        node_clock: The clock by which the steps are timed, as the controller has read it; None before it has.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._uses = uses = Uses(clock)
        self._watches = watches = {use: Stopwatch(uses, index) for index, use in enumerate(USES)}
        self._setup, self._training, self.data = watches[SETUP], watches[TRAINING], watches[DATA]
        self.checkpoint, self.waiting, self.script = watches[CHECKPOINT], watches[WAITING], watches[SCRIPT]
        self.compiling, self.evaluation = watches[COMPILING], watches[EVALUATION]
        self.callbacks, self.garbage = watches[CALLBACKS], watches[GARBAGE]
        uses.begin(self._setup)
        self.node_clock: NodeClock | None = None
        self.batches = BatchSizes(uses, self._training)
        self.sent_bytes = 0
        self._clock = clock
        self._calls = 0
        self._entered_at = self._marked_at = self._wrote_at = clock()
        self._longest_pause_s = 0.0
        self._phase = ""
        self._num_reports = 0
        self._num_batches = 0
        self._steps = 0
        self._optimizer_steps: dict[int, int] = {}
        self._trains: Callable[[], bool] | None = None
        self._spent: tuple[int, float, float] = Spent()
        self._asked = (self._entered_at, 0.0)
        self._native_id = get_native_id()

    def enter(self) -> None:
        """Start the times, because this thread enters train_func now: forming the group is not part of its time."""
        self._entered_at = self._marked_at = self._clock()
        self._asked = (self._entered_at, 0.0)
        self._uses.begin(self._setup)
        self._native_id = get_native_id()

    def mark(self, phase: str) -> None:
        """Note a session call of train_func."""
        now = self._clock()
        pause_s = now - self._marked_at
        if self._calls and pause_s > self._longest_pause_s:
            self._longest_pause_s = pause_s
        self._marked_at = now
        self._phase = phase
        self._calls += 1
        if self._trains is not None and self._trains():
            self.on_pass(None)
        if phase == "report":
            self._num_reports = count = self._num_reports + 1
        elif phase == "batch":
            self._num_batches = count = self._num_batches + 1
        else:
            return
        self._count_steps(count, now)

    def on_optimizer_step(self, optimizer: int) -> None:
        """An optimizer has made a step; ``optimizer``: its identity, because loops may have several."""
        self._optimizer_steps[optimizer] = count = self._optimizer_steps.get(optimizer, 0) + 1
        self._count_steps(count, self._clock())

    def _count_steps(self, count: int, now: float) -> None:
        """Begin a step if there are more reports, batches or optimizer steps than there were of any of them."""
        if count > self._steps:
            if not self._steps:
                self._uses.change_base(self._training)
            self._steps = count
            self._uses.recorder.begin_step(count, self._num_reports, now, self._uses.running[-1].index)
            # One assignment: a thread that reads meanwhile does not mix two steps. A plain tuple is made fastest.
            self._spent = (count, now - self._entered_at, self.data.seconds)

    def on_pass(self, trains: Callable[[], bool] | None) -> None:
        """The model is called: what follows is evaluation, up to a pass of training or a session call after ``model.train()``.

        Args:
            trains: Says whether the model is to be trained again. None: this pass is of training.
        """
        base = self._training if trains is None else self.evaluation
        if self._steps and self._uses.base is not base and get_ident() == self._uses.thread:
            self._uses.change_base(base)
            self._trains = trains

    def uses(self) -> dict[str, float]:
        """Return what the time since train_func was entered was used for, in seconds, which add up to all of it.

        Without uses that had none. Any thread may ask.
        """
        seconds = zip(self._watches, self._uses.seconds_of(self._watches.values()), strict=True)
        return {use: round(spent_s, 4) for use, spent_s in seconds if spent_s > 0}

    def since_last_step(self) -> dict[str, float]:
        """Return what the time since the newest step began was used for, in seconds; empty before the first. Timed thread."""
        if not self._steps:
            return {}
        from raysgd.goodput.spans import Step  # the controller imports this module without it

        sums: dict[str, float] = {}
        for use, start, end in Step.of(self._uses.recorder.newest, self._clock(), USES, MAX_CHANGES).spans():
            sums[use] = sums.get(use, 0.0) + (end - start) / 1e6
        return {use: round(seconds, 4) for use, seconds in sums.items() if use in self._watches}

    def work(self) -> dict[str, Any]:
        """Return what was read and exchanged since train_func was entered; see `BatchSizes.sums`. Any thread may ask."""
        batches = {source: [round(each, 9) for each in sums] for source, sums in self.batches.sums.copy().items()}
        found = {"batches": batches, "sent_bytes": self.sent_bytes}
        return {name: value for name, value in found.items() if value}

    def steps(self, now: float) -> tuple[Step, ...]:
        """Return the newest steps in detail, up to ``now``, and some of the earlier ones. Any thread may ask."""
        from raysgd.goodput.spans import Step  # the controller imports this module without it

        return tuple(Step.of(numbers, now, USES, MAX_CHANGES) for numbers in self._uses.recorder.copy())

    @property
    def spent(self) -> Spent:
        """The parts of the time up to the last step."""
        return Spent(*self._spent)

    def cpu_wait_s(self) -> float | None:
        """Return the seconds that the timed thread could have run, and others had the processors. None where nothing says it."""
        try:
            with open(f"/proc/self/task/{self._native_id}/schedstat", encoding="ascii") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def data_wait_fraction(self) -> float:
        """Return the fraction of time spent waiting for batches since the last call, or since train_func was entered."""
        now, waited_s = self._clock(), self.data.seconds
        asked_at, waited_before_s = self._asked
        self._asked = now, waited_s
        return round((waited_s - waited_before_s) / max(now - asked_at, 1e-9), 4)

    @contextmanager
    def timed_garbage_collection(self) -> Iterator[None]:
        """Measure the use `GARBAGE` inside."""

        def on_phase(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                self.garbage.__enter__()
            else:
                self.garbage.__exit__()

        gc.callbacks.append(on_phase)
        try:
            yield
        finally:
            gc.callbacks.remove(on_phase)

    def wrote(self) -> None:
        """Note that storage has accepted a part of a checkpoint, or is tried again; called from any thread."""
        self._wrote_at = self._clock()

    def heartbeat(self, *, is_inside: bool) -> Heartbeat:
        """Return the progress as it is now."""
        # While train_func waits for storage, progress of storage counts.
        since = max(self._marked_at, self._wrote_at) if self.checkpoint.is_running else self._marked_at
        idle_s = self._clock() - since
        return Heartbeat(self._calls, idle_s, self._longest_pause_s, self._phase, is_inside, self._clock())

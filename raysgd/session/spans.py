"""Records when each use of the time of train_func began, step by step, in bounded memory. Worker side."""

from __future__ import annotations

from array import array

from raysgd.goodput.spans import Step

#: Steps are kept in windows of so many: the first ones, the newest ones, and some between, at equal distances.
WINDOW_STEPS = 16
NUM_FIRST, NUM_BETWEEN, NUM_NEWEST = 16, 64, 32
#: How many changes of a step are kept; what comes after them is one use more, `MANY`.
MAX_CHANGES = 100
MANY = "many short uses"
#: The index of the use that ends a step, and the place of the first use's begin in a step's numbers.
_END, _FIRST = -1, 2
_MAX_NUMBERS = _FIRST + 2 * MAX_CHANGES


def is_kept(window: int, newest: int) -> bool:
    """Return whether a window is kept when there are windows up to ``newest``. One that is not is never kept later."""
    distance = 1 << (newest // NUM_BETWEEN).bit_length()
    return window < NUM_FIRST or window > newest - NUM_NEWEST or window % distance == 0


class SpanRecorder:
    """The newest steps of one thread, and some of the earlier ones. That thread calls all but `steps`.

    Which steps are kept follows from their numbers alone, so that all ranks keep the same ones.

    Args:
        now: The time at which step 0 begins, in seconds.
        use: The index of its use.
    """

    def __init__(self, now: float, use: int) -> None:
        self._windows: dict[int, list[array[float]]] = {0: []}
        self._begin(0, 0, now, use)

    def _begin(self, number: int, reports: int, now: float, use: int) -> None:
        # One flat array for a step: its number, its reports, and then the time and the use of each change.
        self._numbers = array("d", (number, reports, now, use))
        self._windows[number // WINDOW_STEPS].append(self._numbers)

    def begin_step(self, number: int, reports: int, now: float, use: int) -> None:
        """End the step and begin the next one, with this use."""
        self._numbers.extend((now, _END))
        window = number // WINDOW_STEPS
        if window not in self._windows:
            kept = {each: steps for each, steps in self._windows.items() if is_kept(each, window)}
            self._windows = {**kept, window: []}
        self._begin(number, reports, now, use)

    def change(self, now: float, use: int) -> None:
        """Another use begins."""
        numbers = self._numbers
        if len(numbers) < _MAX_NUMBERS:
            numbers.append(now)
            numbers.append(use)

    def insert(self, since: float, now: float, use: int, after: int) -> None:
        """The time since then had a use that is known only now; ``after`` is the use from now on."""
        numbers = self._numbers
        while len(numbers) > _FIRST + 2 and numbers[-2] >= since:
            del numbers[-2:]
        self.change(max(since, numbers[-2]), use)
        self.change(now, after)

    def steps(self, now: float, names: tuple[str, ...]) -> tuple[Step, ...]:
        """Return the kept steps. Any thread may ask.

        Args:
            now: When the step that runs ends, as far as is known.
            names: The uses by their indices.
        """
        # A list is copied at once, whatever the recording thread does; each array, too.
        found = [numbers[:] for steps in list(self._windows.values()) for numbers in steps[:]]
        return tuple(_step(numbers, now, names) for numbers in found)


def _step(numbers: array[float], now: float, names: tuple[str, ...]) -> Step:
    # The use of the newest change may not be there yet.
    pairs = zip(numbers[_FIRST::2], numbers[_FIRST + 1 :: 2], strict=False)
    changes = [(round(at * 1e6), int(use)) for at, use in pairs]
    uses = [(at, names[use]) for at, use in changes if use != _END]
    end = next((at for at, use in changes if use == _END), round(now * 1e6))
    if len(uses) == MAX_CHANGES:
        uses[-1] = uses[-1][0], MANY
    return Step(int(numbers[0]), int(numbers[1]), tuple(uses), max(end, uses[-1][0]))

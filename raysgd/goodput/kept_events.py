"""As many events of a run as show what its time was used for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from raysgd.result import Event

#: How many samples of a rank in an attempt, and of all of them, are kept: some for each period that is shown.
_OF_RANK, _OF_ALL = 256, 32_768


class KeptEvents:
    """The events of a run, oldest first, with some of its samples.

    The sums in a sample are those since its rank entered train_func. Samples that are left out change no sum, only when it was.
    """

    def __init__(self) -> None:
        self._others: list[tuple[int, Event]] = []
        self._samples: dict[tuple[int, int], list[tuple[int, Event]]] = {}  # by attempt and rank
        self._count = self._attempt = self._num_samples = self._num_left = 0

    def add(self, event: Event) -> None:
        """Add the next event."""
        self._count += 1
        self._attempt += event.kind == "attempt_start"
        if event.kind != "sample":
            self._others.append((self._count, event))
            return
        self._samples.setdefault((self._attempt, event.data["rank"]), []).append((self._count, event))
        self._num_samples += 1
        if self._num_samples > max(min(_OF_RANK * len(self._samples), _OF_ALL), 2 * self._num_left):
            for own in self._samples.values():  # the first and the last stay
                del own[1:-1:2]
            self._num_samples = self._num_left = sum(map(len, self._samples.values()))

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in their order."""
        samples = [each for own in self._samples.values() for each in own]
        return (event for _, event in sorted([*self._others, *samples], key=lambda each: each[0]))

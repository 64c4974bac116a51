"""Which ranks slow an attempt down, while it runs: by the rules of `raysgd why`, with stricter thresholds. Pure.

Ranks that train together take equally long for a step, because the fast ranks wait for the slow one. So the rules compare what
each rank uses its time for, without waiting for others. Where that is not seen, they compare what is certainly a rank's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from raysgd.goodput.evidence import MIN_STEPS, Evidence, Readings
from raysgd.goodput.findings import Finding
from raysgd.goodput.ledger import Ledger
from raysgd.goodput.rules import OF_RANKS

#: A window ends when each rank has made this many steps, or after this many seconds if each rank has made `MIN_STEPS`.
WINDOW_STEPS = 20
WINDOW_S = 30.0
#: A window ends after this many seconds in any case; ranks with fewer than `MIN_STEPS` are left out.
MAX_WINDOW_S = 300.0
#: So many windows in a row must show a cause before it is reported, and as many without it end it.
NUM_WINDOWS = 3
#: A cause is reported while the run is live if it costs this part of a step, as a rank does that takes 1.5 times as long, and
#: these seconds.
SLOW_SHARE = 1 / 3
MIN_EXCESS_S = 0.005
#: So many ranks are found in a window at most.
_MAX_FOUND = 8


class StragglerPolicy:
    """Finds the stragglers of one attempt. Each is reported once per cause, and again after a recovery.

    Args:
        now: The current time, in seconds of the clock that all calls use.
        nodes: The node of each rank, as users see it.
    """

    def __init__(self, now: float, nodes: Mapping[int, str]) -> None:
        self._began = now
        self._nodes = nodes
        self._readings = Readings(only_ends=True)
        self._num_seen: Counter[tuple[str, int]] = Counter()  # windows in a row, by cause and rank
        self._num_calm: dict[tuple[str, int], int] = {}  # of those that are reported

    def on_sample(self, data: Mapping[str, Any], now: float) -> None:
        """A worker has sent a sample."""
        self._readings.add(now, data)

    def remove(self, rank: int) -> None:
        """Stop comparing a rank."""
        self._readings.remove(rank)

    def find_stragglers(self, now: float) -> list[Finding]:
        """Return the stragglers to report now."""
        if not self._is_over(now - self._began):
            return []
        found = {(each.cause, each.rank): each for each in self._find() if each.rank is not None}
        self._began, self._readings = now, self._readings.newest()
        self._num_seen = Counter({key: self._num_seen[key] + 1 for key in found})
        calm = {key: 0 if key in found else number + 1 for key, number in self._num_calm.items()}
        self._num_calm = {key: number for key, number in calm.items() if number < NUM_WINDOWS}
        news = [key for key in found if self._num_seen[key] >= NUM_WINDOWS and key not in self._num_calm]
        self._num_calm |= dict.fromkeys(news, 0)
        return [found[key] for key in news]

    def _is_over(self, age_s: float) -> bool:
        fewest = self._readings.fewest_steps()
        return fewest >= WINDOW_STEPS or (age_s >= WINDOW_S and fewest >= MIN_STEPS) or age_s >= MAX_WINDOW_S

    def _find(self) -> list[Finding]:
        """Return what slows the ranks down in this window: the worst one first, and then what the others show without it."""
        found: list[Finding] = []
        paces = self._readings.paces(from_start=False)
        while len(paces) > 1 and len(found) < _MAX_FOUND:
            evidence = Evidence(Ledger(), {"training": 1.0}, self._nodes, paces, busy=self._readings.busy)
            causes = [each for rule in OF_RANKS if (each := rule(evidence)) is not None and each.rank is not None]
            worst = max(causes, key=lambda each: each.share, default=None)
            if worst is None or worst.share < SLOW_SHARE or worst.share * evidence.step_s < MIN_EXCESS_S:
                break
            found.append(worst)
            paces = {rank: pace for rank, pace in paces.items() if rank != worst.rank}
        return found

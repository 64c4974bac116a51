"""The pace of streams: at once after a pause, at a given rate under load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.journal.frame_log import Pacer


def test_burst_passes_at_once_and_then_one_per_interval() -> None:
    pacer = Pacer(0.5, burst=2)
    assert [pacer.spend(10.0) for _ in range(2)] == [0.0, 0.0]
    assert pacer.spend(10.0) == pytest.approx(0.5)


def test_pause_refills_the_burst_only() -> None:
    pacer = Pacer(0.5, burst=2)
    pacer.spend(0.0)
    pacer.spend(0.0)
    assert pacer.spend(0.25) == pytest.approx(0.25)
    assert [pacer.spend(1000.0) for _ in range(2)] == [0.0, 0.0]
    assert pacer.spend(1000.0) == pytest.approx(0.5)


def test_without_an_interval_nothing_waits() -> None:
    pacer = Pacer(0.0, burst=1)
    assert [pacer.spend(5.0) for _ in range(3)] == [0.0] * 3


@given(st.floats(0.001, 10), st.integers(1, 8), st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_flushes_never_exceed_rate_and_burst(interval: float, burst: int, pauses: list[float]) -> None:
    pacer, now, sent = Pacer(interval, burst), 0.0, []
    for pause in pauses:
        now += pause
        now += pacer.spend(now)
        sent.append(now)
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            assert last - first + 1 <= burst + (sent[last] - sent[first]) / interval + 1e-6

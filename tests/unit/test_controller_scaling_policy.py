"""When an elastic group grows: how long it waits for joining workers, and between two growths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.policies.growth import ScalingPolicy

#: Promised numbers, written out.
FLAP_S = 60.0
MAX_PAUSE_S = 300.0
MIN_PAUSE_S = 10.0
SETTLE_S = 1.0

TIMES = st.floats(0, 1e6)


@given(first=TIMES, later=st.floats(0, SETTLE_S))
def test_growth_waits_for_workers_that_become_ready_within_settle_time(first: float, later: float) -> None:
    policy = ScalingPolicy()
    assert policy.grow_at() is None
    policy.on_worker_ready(first)
    policy.on_worker_ready(first + later)
    assert policy.grow_at() == first + later + SETTLE_S


@given(grown=TIMES, joined=st.floats(0, 100))
def test_growths_are_separated_by_the_minimum_pause(grown: float, joined: float) -> None:
    policy = ScalingPolicy()
    policy.on_grown(grown)
    assert policy.grow_at() is None
    policy.on_worker_ready(grown + joined)
    at = policy.grow_at()
    assert at is not None and at >= grown + MIN_PAUSE_S and at >= grown + joined + SETTLE_S


@pytest.mark.parametrize(("num_losses", "pause"), [(1, 20), (2, 40), (10, MAX_PAUSE_S)])
def test_group_that_loses_workers_right_after_growth_grows_less_often(num_losses: int, pause: float) -> None:
    policy, now = ScalingPolicy(), 0.0
    for _ in range(num_losses):
        policy.on_grown(now)
        policy.on_worker_lost(now + 1)
        now += 2
    policy.on_grown(now)
    policy.on_worker_ready(now)
    assert policy.grow_at() == now + pause


def test_loss_of_several_workers_at_once_counts_once() -> None:
    policy = ScalingPolicy()
    policy.on_grown(0)
    for _ in range(8):
        policy.on_worker_lost(1)
    policy.on_worker_ready(2)
    assert policy.grow_at() == 2 * MIN_PAUSE_S


@pytest.mark.parametrize(("after_s", "pause"), [(FLAP_S - 1, 2 * MIN_PAUSE_S), (FLAP_S + 1, MIN_PAUSE_S)])
def test_only_losses_soon_after_a_growth_count(after_s: float, pause: float) -> None:
    policy = ScalingPolicy()
    policy.on_grown(0)
    policy.on_worker_lost(after_s)
    policy.on_grown(75)
    policy.on_worker_ready(75)
    assert policy.grow_at() == 75 + pause


def test_stable_growth_resets_the_pause() -> None:
    policy = ScalingPolicy()
    policy.on_grown(0)
    policy.on_worker_lost(1)
    policy.on_grown(20)
    later = 20 + 2 * MIN_PAUSE_S + FLAP_S + 1
    policy.on_grown(later)
    policy.on_worker_ready(later)
    assert policy.grow_at() == later + MIN_PAUSE_S

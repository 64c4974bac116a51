"""Which ranks are reported as stragglers while they train, given what each used its time for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.policies.straggler import StragglerPolicy
from raysgd.goodput.findings import Finding

#: Promised numbers, written out.
MAX_WINDOW_S = 300.0
NUM_WINDOWS = 3
WINDOW_STEPS = 20


class Step(NamedTuple):
    """Seconds one rank spends in a step."""

    training: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    waiting: float = 0.0


def together(*steps: Step) -> list[Step]:
    """Return the steps of ranks that wait for the slowest rank and then exchange gradients."""
    longest = max(map(sum, steps))
    return [step._replace(waiting=1.0005 * longest - sum(step)) for step in steps]


class Ranks:
    """The ranks of an attempt, stepped one window at a time."""

    def __init__(self, size: int, *, gpu_percent: int | None = None) -> None:
        self.now = 100.0
        self.policy = StragglerPolicy(self.now, {rank: f"node{rank}" for rank in range(size)})
        self.gpu_percent = gpu_percent
        self.gone: set[int] = set()
        self.steps = [3] * size  # after the first ones, which are left out
        self.spent = [Step(5.0)] * size
        self.sample()

    def sample(self) -> None:
        for rank, spent in enumerate(self.spent):
            if rank not in self.gone:
                data = {
                    "rank": rank,
                    "steps": self.steps[rank],
                    "uses": spent._asdict(),
                    "gpu_percent": self.gpu_percent,
                }
                self.policy.on_sample(data, self.now)

    def window(self, steps: Sequence[Step], num_steps: int = WINDOW_STEPS) -> list[Finding]:
        for rank, step in enumerate(steps):
            self.steps[rank] += num_steps
            self.spent[rank] = Step._make(
                before + num_steps * each for before, each in zip(self.spent[rank], step, strict=True)
            )
        self.now += num_steps * max(map(sum, steps))
        self.sample()
        return self.policy.find_stragglers(self.now)

    def windows(self, steps: Sequence[Step], count: int = 2 * NUM_WINDOWS) -> list[tuple[int | None, str]]:
        return [(found.rank, found.cause) for _ in range(count) for found in self.window(steps)]


# -- properties --------------------------------------------------------------------------------------------------------

SIZES = st.integers(2, 9)
SECONDS = st.floats(0.02, 5.0)
CAUSES = {"training": "straggler", "data": "data"}


@given(st.data(), SIZES, SECONDS, st.floats(0.0, 0.5), st.booleans())
def test_equal_ranks_with_noise_are_not_stragglers(
    data: st.DataObject, size: int, seconds: float, reading: float, is_synchronous: bool
) -> None:
    ranks = Ranks(size)
    noise = st.lists(st.floats(0.82, 1.22), min_size=size, max_size=size)
    for _ in range(2 * NUM_WINDOWS):
        steps = [Step((1 - reading) * seconds * each, reading * seconds * each) for each in data.draw(noise)]
        assert ranks.window(together(*steps) if is_synchronous else steps) == []


@given(st.data(), SIZES, SECONDS, st.sampled_from([*CAUSES]), st.floats(1.0, 20.0), st.booleans())
def test_slowed_rank_is_reported_once_with_its_cause_and_node(
    data: st.DataObject, size: int, seconds: float, use: str, slowed: float, is_synchronous: bool
) -> None:
    slow = data.draw(st.integers(0, size - 1))
    steps = [Step(0.7 * seconds, 0.3 * seconds)] * size
    steps[slow] = steps[slow]._replace(**{use: getattr(steps[slow], use) + slowed * seconds})
    ranks = Ranks(size)
    steps = together(*steps) if is_synchronous else steps
    assert ranks.windows(steps, NUM_WINDOWS - 1) == []
    (found,) = ranks.window(steps)
    assert (found.rank, found.cause) == (slow, CAUSES[use])
    assert f"rank {slow} on node{slow} " in found.text
    assert found.gain == pytest.approx(1 + slowed, rel=0.01)
    assert ranks.windows(steps) == []


SLOW = together(Step(0.1), Step(0.3), Step(0.1))
FAST = together(Step(0.1), Step(0.1), Step(0.1))


@given(st.lists(st.tuples(st.integers(1, 2 * NUM_WINDOWS), st.integers(1, 2 * NUM_WINDOWS)), max_size=6))
def test_straggler_is_reported_again_only_after_recovery(episodes: list[tuple[int, int]]) -> None:
    ranks, is_reported = Ranks(3), False
    for num_slow, num_fast in episodes:
        expected = [] if is_reported or num_slow < NUM_WINDOWS else [(1, "straggler")]
        assert ranks.windows(SLOW, num_slow) == expected
        is_reported = is_reported or bool(expected)
        assert ranks.windows(FAST, num_fast) == []
        is_reported = is_reported and num_fast < NUM_WINDOWS


# -- examples ----------------------------------------------------------------------------------------------------------


def test_slow_windows_must_be_consecutive() -> None:
    ranks = Ranks(3)
    for _ in range(5):
        assert ranks.windows(SLOW, NUM_WINDOWS - 1) == []
        assert ranks.windows(FAST, 1) == []


def test_straggler_is_reported_again_for_another_cause() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW) == [(1, "straggler")]
    assert ranks.windows(together(Step(0.1), Step(0.1, data=0.3), Step(0.1))) == [(1, "data")]


def test_several_stragglers_are_reported() -> None:
    steps = together(Step(0.1), Step(0.4), Step(0.1), Step(0.1), Step(0.1, data=0.25))
    assert Ranks(5).windows(steps) == [(1, "straggler"), (4, "data")]


def test_slow_data_offset_by_fast_compute_is_not_a_straggler() -> None:
    assert Ranks(3).windows(together(Step(0.3, 0.01), Step(0.3, 0.015), Step(0.29, 0.01))) == []


def test_single_rank_is_not_a_straggler() -> None:
    assert Ranks(1).windows([Step(1.0)]) == []


@pytest.mark.parametrize(("excess_s", "found"), [(0.0045, []), (0.006, [(1, "straggler")])])
def test_small_excess_is_not_a_straggler(excess_s: float, found: list[tuple[int, str]]) -> None:
    assert Ranks(3).windows(together(Step(0.001), Step(0.001 + excess_s), Step(0.001))) == found


# -- invisible waiting -------------------------------------------------------------------------------------------------


def test_ranks_with_invisible_waiting_are_compared_by_data_time() -> None:
    """All steps of the user's own DistributedDataParallel take as long as those of the slowest rank."""
    assert Ranks(3).windows([Step(0.3), Step(0.3), Step(0.3)]) == []
    assert Ranks(3).windows([Step(0.3), Step(0.1, data=0.2), Step(0.31)]) == [(1, "data")]


def test_checkpoint_time_may_include_waiting() -> None:
    """Fast ranks wait for the slow rank when a state is gathered from all ranks."""
    assert Ranks(3).windows([Step(0.1, checkpoint=0.2), Step(0.3), Step(0.1, checkpoint=0.2)]) == []


def test_data_time_with_gpus_may_include_waiting() -> None:
    """On a fast rank, a copy to the GPU waits for the kernels before it."""
    assert Ranks(3, gpu_percent=90).windows([Step(0.3), Step(0.1, data=0.2), Step(0.3)]) == []


def test_independent_ranks_are_compared_by_step_time() -> None:
    assert Ranks(2).windows([Step(0.1), Step(0.16)]) == [(1, "straggler")]
    assert Ranks(2).windows([Step(0.1), Step(0.14)]) == []


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_steps", "step_s", "is_over"),
    [(19, 0.1, False), (20, 0.1, True), (5, 5.9, False), (5, 6.1, True), (4, 20.0, False)],
)
def test_window_ends_after_20_steps_or_after_30_seconds_with_5_steps(
    num_steps: int, step_s: float, is_over: bool
) -> None:
    ranks = Ranks(3)
    steps = together(Step(step_s / 2), Step(step_s), Step(step_s / 2))
    found = [straggler.rank for _ in range(3) for straggler in ranks.window(steps, num_steps)]
    assert found == ([1] if is_over else [])


def test_rank_without_steps_does_not_delay_detection() -> None:
    """Rank 2 evaluates, for example, and does not wait for other ranks."""
    ranks = Ranks(3)
    found: list[Finding] = []
    while not found and ranks.now < 100 + (NUM_WINDOWS + 1) * (MAX_WINDOW_S + 2):
        steps, spent = ranks.steps[2], ranks.spent[2]
        found = ranks.window([Step(1.0), Step(2.0), Step(1.0)], 1)
        ranks.steps[2], ranks.spent[2] = steps, spent
    assert 3 * MAX_WINDOW_S <= ranks.now - 100 <= 3 * (MAX_WINDOW_S + 3)
    assert [straggler.rank for straggler in found] == [1]


def test_ranks_that_are_gone_are_not_compared() -> None:
    ranks = Ranks(4)
    assert ranks.windows([Step(0.1)] * 4, NUM_WINDOWS) == []
    ranks.gone = {2, 3}
    for rank in (2, 3):
        ranks.policy.remove(rank)
    assert ranks.windows(SLOW, NUM_WINDOWS) == [(1, "straggler")]


def test_time_before_first_step_is_not_counted() -> None:
    ranks = Ranks(2)
    ranks.policy = StragglerPolicy(ranks.now, {})
    ranks.spent = [Step(1.0), Step(500.0)]  # rank 1 downloaded the data
    ranks.sample()
    assert ranks.windows([Step(0.1), Step(0.1)]) == []

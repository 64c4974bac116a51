"""Which ranks are reported as stragglers, given the time that each rank spent per phase and window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.policies.straggler import Straggler, StragglerPolicy
from raysgd.session.progress import Heartbeat, Spent

#: Promised numbers, written out.
ALIKE_SHARE = 0.1
MAX_WINDOW_S = 300.0
MIN_EXCESS_S = 0.005
NUM_WINDOWS = 3
SLOW_FACTOR = 1.5
WINDOW_S = 30.0
WINDOW_STEPS = 20

PHASES = ("compute", "data", "checkpoint")


class Step(NamedTuple):
    """Seconds one rank spends in a step."""

    compute: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    waiting: float = 0.0


def together(*steps: Step) -> list[Step]:
    """Return the steps of ranks that wait for the slowest rank and then exchange gradients."""
    longest = max(map(sum, steps))
    return [step._replace(waiting=1.0005 * longest - sum(step)) for step in steps]


class Ranks:
    """The ranks of an attempt, stepped one window at a time."""

    def __init__(self, size: int, has_gpu: bool = False) -> None:
        self.now = 100.0
        self.policy = StragglerPolicy(self.now)
        self.has_gpu = has_gpu
        self.gone: set[int] = set()
        self.spent = [Spent(1, 5.0) for _ in range(size)]
        self.answer()

    def answer(self) -> None:
        for rank, spent in enumerate(self.spent):
            if rank not in self.gone:
                self.policy.on_heartbeat(rank, Heartbeat(is_inside=True, spent=spent, has_gpu=self.has_gpu))

    def window(self, steps: Sequence[Step], num_steps: int = WINDOW_STEPS) -> list[Straggler]:
        for rank, step in enumerate(steps):
            spent = [num_steps * each for each in (1, sum(step), step.data, step.checkpoint, step.waiting)]
            self.spent[rank] = Spent._make(before + more for before, more in zip(self.spent[rank], spent, strict=True))
        self.now += num_steps * max(map(sum, steps))
        self.answer()
        return self.policy.find_stragglers(self.now)

    def windows(self, steps: Sequence[Step], count: int = 2 * NUM_WINDOWS) -> list[tuple[int, str]]:
        return [(found.rank, found.phase) for _ in range(count) for found in self.window(steps)]


# -- properties --------------------------------------------------------------------------------------------------------

SIZES = st.integers(2, 9)
SECONDS = st.floats(0.02, 5.0)


def shares() -> st.SearchStrategy[Step]:
    """Draw how a step of one second is divided into phases."""
    return st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(
        lambda parts: Step(*(p / sum(parts) for p in parts))
    )


def times(step: Step, factor: float) -> Step:
    return Step._make(factor * seconds for seconds in step)


@given(st.data(), SIZES, SECONDS, shares(), st.booleans())
def test_equal_ranks_with_noise_are_not_stragglers(
    data: st.DataObject, size: int, seconds: float, parts: Step, is_synchronous: bool
) -> None:
    ranks = Ranks(size)
    noise = st.lists(st.floats(0.82, 1.22), min_size=size, max_size=size)
    for _ in range(2 * NUM_WINDOWS):
        steps = [times(parts, seconds * factor) for factor in data.draw(noise)]
        assert ranks.window(together(*steps) if is_synchronous else steps) == []


@given(st.data(), SIZES, SECONDS, shares(), st.sampled_from(PHASES), st.floats(0.7, 20.0), st.booleans())
def test_slowed_rank_is_reported_with_phase_and_times(
    data: st.DataObject, size: int, seconds: float, parts: Step, phase: str, slowed: float, is_synchronous: bool
) -> None:
    slow = data.draw(st.integers(0, size - 1))
    steps = [times(parts, seconds)] * size
    steps[slow] = steps[slow]._replace(**{phase: getattr(steps[slow], phase) + slowed * seconds})
    ranks = Ranks(size)
    steps = together(*steps) if is_synchronous else steps
    assert ranks.windows(steps, NUM_WINDOWS - 1) == []
    (straggler,) = ranks.window(steps)
    assert (straggler.rank, straggler.phase) == (slow, phase)
    assert straggler.own_s == pytest.approx((1 + slowed) * seconds)
    assert straggler.others_s == pytest.approx(seconds)
    assert straggler.step_s == pytest.approx(sum(steps[slow]))
    assert straggler.since_s == pytest.approx(ranks.now - 100.0)
    assert ranks.windows(steps) == []


@given(
    st.integers(2, 5).flatmap(
        lambda size: st.tuples(
            st.lists(
                st.lists(st.builds(Step, *[st.floats(0.0, 1.0)] * 4), min_size=size, max_size=size),
                min_size=NUM_WINDOWS,
                max_size=8,
            ),
            st.permutations(range(size)),
        )
    )
)
def test_detection_does_not_depend_on_rank_order(given_steps: tuple[list[list[Step]], list[int]]) -> None:
    windows, order = given_steps
    one, other = Ranks(len(order)), Ranks(len(order))
    for steps in windows:
        found = {straggler.rank: straggler for straggler in one.window(steps)}
        moved = {order[straggler.rank]: straggler for straggler in other.window([steps[rank] for rank in order])}
        assert found.keys() == moved.keys()
        for rank, straggler in found.items():
            assert (straggler.phase, straggler.own_s, straggler.others_s) == (
                moved[rank].phase,
                moved[rank].own_s,
                moved[rank].others_s,
            )


@pytest.mark.parametrize("is_unseen_last", [True, False])
def test_windows_with_and_without_visible_waiting_are_consecutive(is_unseen_last: bool) -> None:
    seen = [Step(0.1, 0.6), Step(0.1, 0.1)]
    unseen = [Step(0.1, 0.3), Step(0.3, 0.1)]  # equally long: one may wait in a collective
    ranks = Ranks(2)
    first, last = (seen, unseen) if is_unseen_last else (unseen, seen)
    assert ranks.windows(first, NUM_WINDOWS - 1) == []
    assert ranks.windows(last, 1) == [(0, "data")]


SLOW = together(Step(0.1), Step(0.3), Step(0.1))
FAST = together(Step(0.1), Step(0.1), Step(0.1))
HALF = together(Step(0.1), Step(0.14), Step(0.1))


@given(st.lists(st.tuples(st.integers(1, 2 * NUM_WINDOWS), st.integers(1, 2 * NUM_WINDOWS)), max_size=6))
def test_straggler_is_reported_again_only_after_recovery(episodes: list[tuple[int, int]]) -> None:
    ranks, is_reported = Ranks(3), False
    for num_slow, num_fast in episodes:
        expected = [] if is_reported or num_slow < NUM_WINDOWS else [(1, "compute")]
        assert ranks.windows(SLOW, num_slow) == expected
        is_reported = is_reported or bool(expected)
        assert ranks.windows(FAST, num_fast) == []
        is_reported = is_reported and num_fast < NUM_WINDOWS


# -- examples ----------------------------------------------------------------------------------------------------------


def test_slightly_slow_rank_has_not_recovered() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW) == [(1, "compute")]
    assert ranks.windows(HALF) == []
    assert ranks.windows(SLOW) == []
    assert ranks.windows(FAST) == []
    assert ranks.windows(SLOW) == [(1, "compute")]


def test_slightly_slow_window_does_not_count_as_recovered() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW) == [(1, "compute")]
    assert ranks.windows(HALF, 1) == ranks.windows(FAST, NUM_WINDOWS - 1) == []
    assert ranks.windows(SLOW) == []


def test_slow_windows_must_be_consecutive() -> None:
    ranks = Ranks(3)
    for _ in range(5):
        assert ranks.windows(SLOW, NUM_WINDOWS - 1) == []
        assert ranks.windows(HALF, 1) == []


def test_straggler_is_reported_again_for_another_phase() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW) == [(1, "compute")]
    assert ranks.windows(together(Step(0.1), Step(0.1, data=0.3), Step(0.1))) == [(1, "data")]


def test_reported_phase_has_the_largest_difference() -> None:
    ranks = Ranks(3)
    assert ranks.windows(together(Step(0.5), Step(0.5, data=0.4), Step(0.5))) == [(1, "data")]
    ranks = Ranks(2)
    assert ranks.windows(together(Step(0.2, 0.1, checkpoint=0.5), Step(0.2, 0.1))) == [(0, "checkpoint")]


def test_several_stragglers_are_reported() -> None:
    ranks = Ranks(5)
    steps = together(Step(0.1), Step(0.4), Step(0.1), Step(0.1), Step(0.1, data=0.25))
    assert ranks.windows(steps) == [(1, "compute"), (4, "data")]


def test_slow_data_offset_by_fast_compute_is_not_a_straggler() -> None:
    assert Ranks(3).windows(together(Step(0.3, 0.01), Step(0.1, 0.2), Step(0.29, 0.01))) == []


def test_single_rank_is_not_a_straggler() -> None:
    assert Ranks(1).windows([Step(1.0)]) == []


def test_small_excess_is_not_a_straggler() -> None:
    below = 0.9 * MIN_EXCESS_S
    assert Ranks(3).windows(together(Step(0.001), Step(0.001 + below), Step(0.001))) == []
    assert Ranks(3).windows(together(Step(0.001), Step(0.001 + 1.2 * MIN_EXCESS_S), Step(0.001))) == [(1, "compute")]
    # No rank makes a step longer that consists of the exchange of gradients.
    waiting = [Step(0.01, waiting=1.0), Step(0.02, waiting=0.99), Step(0.01, waiting=1.0)]
    assert Ranks(3).windows(waiting) == []


@pytest.mark.parametrize(("excess", "found"), [(0.09, []), (0.11, [(1, "compute")])])
def test_excess_below_a_tenth_of_the_step_is_not_a_straggler(excess: float, found: list[tuple[int, str]]) -> None:
    steps = [Step(0.05, waiting=0.95), Step(0.05 + excess, waiting=0.95 - excess), Step(0.05, waiting=0.95)]
    assert Ranks(3).windows(steps) == found


# -- invisible waiting -------------------------------------------------------------------------------------------------


def test_ranks_with_invisible_waiting_are_compared_by_data_time() -> None:
    """All steps of the user's own DistributedDataParallel take as long as those of the slowest rank."""
    assert Ranks(3).windows([Step(0.3), Step(0.3), Step(0.3)]) == []
    assert Ranks(3).windows([Step(0.3), Step(0.1, data=0.2), Step(0.31)]) == [(1, "data")]


@pytest.mark.parametrize(("waiting", "found"), [(0.009, [(1, "data")]), (0.011, [])])
def test_ranks_that_wait_for_a_hundredth_of_the_step_are_seen_to_wait(
    waiting: float, found: list[tuple[int, str]]
) -> None:
    fast = Step(1 - waiting, waiting=waiting)
    assert Ranks(3).windows([fast, Step(0.5 - waiting, data=0.5, waiting=waiting), fast]) == found


@pytest.mark.parametrize(("longer", "found"), [(0.09, [(1, "data")]), (0.11, [])])
def test_steps_that_differ_by_less_than_a_tenth_are_equally_long(longer: float, found: list[tuple[int, str]]) -> None:
    assert Ranks(3).windows([Step(1.0), Step(0.5 + longer, data=0.5), Step(1.0)]) == found


def test_checkpoint_time_may_include_waiting() -> None:
    """Fast ranks wait for the slow rank when a state is gathered from all ranks."""
    gathers = [Step(0.1, checkpoint=0.2), Step(0.3), Step(0.1, checkpoint=0.2)]
    assert Ranks(3).windows(gathers) == []


def test_data_time_with_gpus_may_include_waiting() -> None:
    """On a fast rank, a copy to the GPU waits for the kernels before it."""
    copies = [Step(0.1, data=0.2), Step(0.3), Step(0.1, data=0.2)]
    assert Ranks(3, has_gpu=True).windows(copies) == []
    assert Ranks(3, has_gpu=True).windows([Step(0.1), Step(0.3), Step(0.1)]) == [(1, "compute")]


def test_independent_ranks_are_compared_by_step_time() -> None:
    assert Ranks(2).windows([Step(0.1), Step(0.1 * SLOW_FACTOR + 0.001)]) == [(1, "compute")]
    assert Ranks(2).windows([Step(0.1), Step(0.1 * (1 + ALIKE_SHARE) + 0.001)]) == []


# -- windows -----------------------------------------------------------------------------------------------------------


def test_window_of_long_steps_ends_by_time() -> None:
    ranks = Ranks(3)
    steps = together(Step(4.0), Step(10.0), Step(4.0))
    num_steps = round(WINDOW_S / 10) + 1
    found = [straggler for _ in range(NUM_WINDOWS) for straggler in ranks.window(steps, num_steps)]
    assert [(straggler.rank, straggler.phase) for straggler in found] == [(1, "compute")]
    assert found[0].since_s == pytest.approx(ranks.now - 100.0)


@pytest.mark.parametrize(
    ("num_steps", "step_s", "is_over"),
    [(19, 0.1, False), (20, 0.1, True), (3, 9.9, False), (3, 10.1, True), (2, 20.0, False)],
)
def test_window_ends_after_20_steps_or_after_30_seconds_with_3_steps(
    num_steps: int, step_s: float, is_over: bool
) -> None:
    ranks = Ranks(3)
    steps = together(Step(step_s / 2), Step(step_s), Step(step_s / 2))
    found = [straggler.rank for _ in range(3) for straggler in ranks.window(steps, num_steps)]
    assert found == ([1] if is_over else [])


def test_window_with_too_few_steps_is_extended() -> None:
    ranks = Ranks(2)
    steps = together(Step(1.0), Step(20.0))
    assert [len(ranks.window(steps, 1)) for _ in range(9)] == [0] * 8 + [1]


def test_rank_without_steps_does_not_delay_detection() -> None:
    """Rank 2 evaluates, for example, and does not wait for other ranks."""
    ranks = Ranks(3)
    found: list[Straggler] = []
    while not found and ranks.now < 100 + (NUM_WINDOWS + 1) * (MAX_WINDOW_S + 2):
        spent = ranks.spent[2]
        found = ranks.window([Step(1.0), Step(2.0), Step(1.0)], 1)
        ranks.spent[2] = spent
    assert 3 * MAX_WINDOW_S <= ranks.now - 100 <= 3 * (MAX_WINDOW_S + 2)
    # Rank 2 made too few steps to have a pace: it is neither the fastest nor the slowest.
    assert [(straggler.rank, straggler.others_s) for straggler in found] == [(1, pytest.approx(1.0))]


def test_returned_dead_and_starting_ranks_are_not_compared() -> None:
    ranks = Ranks(4)
    assert ranks.windows([Step(0.1)] * 4, NUM_WINDOWS) == []
    ranks.gone = {2, 3}
    ranks.policy.on_heartbeat(2, Heartbeat(is_inside=False, spent=ranks.spent[2]))  # it has returned
    ranks.policy.remove(3)  # it is dead
    assert ranks.windows(SLOW, NUM_WINDOWS) == [(1, "compute")]
    late = Ranks(2)
    late.policy = StragglerPolicy(late.now)
    late.gone = {0}
    late.policy.on_heartbeat(0, Heartbeat(is_inside=True))  # it is still starting
    assert late.windows([Step(0.1), Step(0.3)]) == []


def test_new_attempt_starts_with_empty_windows() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW, NUM_WINDOWS) == [(1, "compute")]
    again = Ranks(3)
    assert again.windows(SLOW, NUM_WINDOWS - 1) == []
    assert again.windows(SLOW, 1) == [(1, "compute")]


def test_time_before_first_step_is_not_counted() -> None:
    ranks = Ranks(2)
    ranks.spent = [Spent(), Spent()]
    ranks.policy = StragglerPolicy(ranks.now)
    ranks.answer()
    ranks.spent = [Spent(1, 1.0), Spent(1, 500.0)]  # rank 1 downloaded the data
    ranks.answer()
    assert ranks.windows([Step(0.1), Step(0.1)]) == []


# -- the report --------------------------------------------------------------------------------------------------------


def test_message_names_rank_node_and_step_times() -> None:
    straggler = Straggler(2, "data", own_s=0.312, others_s=0.0987, step_s=0.32, since_s=12.3456789)
    assert straggler.describe("node-7 (10.0.0.7)") == (
        "rank 2 on node-7 (10.0.0.7) is slow: 0.31 s a step of its own, the others 98.7 ms; "
        "most of the difference in: data"
    )
    assert straggler.to_event("node-7") == {
        "rank": 2,
        "node": "node-7",
        "phase": "data",
        "own_s": 0.312,
        "others_s": 0.0987,
        "step_s": 0.32,
        "since_s": 12.345679,
    }


def test_times_of_a_straggler_are_in_milliseconds_below_a_tenth_of_a_second() -> None:
    assert Straggler(1, "data", 0.1, 0.0994, 1.0, 3.0).describe("n") == (
        "rank 1 on n is slow: 0.10 s a step of its own, the others 99.4 ms; most of the difference in: data"
    )

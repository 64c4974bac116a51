"""Which ranks are stragglers: what their time went into, window by window, in; who is told of, out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.straggler_policy import (
    ALIKE_SHARE,
    MAX_WINDOW_S,
    MIN_EXCESS_S,
    NUM_WINDOWS,
    SLOW_FACTOR,
    WINDOW_S,
    WINDOW_STEPS,
    Straggler,
    StragglerPolicy,
)
from raysgd.session.progress import Pulse, Spent

PHASES = ("compute", "data", "checkpoint")


class Step(NamedTuple):
    """Seconds one rank spends in a step."""

    compute: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    waiting: float = 0.0


def together(*steps: Step) -> list[Step]:
    """The steps of ranks of which all wait for the slowest, and then exchange gradients."""
    longest = max(map(sum, steps))
    return [step._replace(waiting=1.0005 * longest - sum(step)) for step in steps]


class Ranks:
    """The ranks of an attempt, which make a window's steps at a time."""

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
                self.policy.answered(rank, Pulse(is_inside=True, spent=spent, has_gpu=self.has_gpu))

    def window(self, steps: Sequence[Step], num_steps: int = WINDOW_STEPS) -> list[Straggler]:
        for rank, step in enumerate(steps):
            spent = [num_steps * each for each in (1, sum(step), step.data, step.checkpoint, step.waiting)]
            self.spent[rank] = Spent._make(before + more for before, more in zip(self.spent[rank], spent, strict=True))
        self.now += num_steps * max(map(sum, steps))
        self.answer()
        return self.policy.judge(self.now)

    def windows(self, steps: Sequence[Step], count: int = 2 * NUM_WINDOWS) -> list[tuple[int, str]]:
        return [(told.rank, told.phase) for _ in range(count) for told in self.window(steps)]


# -- properties --------------------------------------------------------------------------------------------------------

SIZES = st.integers(2, 9)
SECONDS = st.floats(0.02, 5.0)


def shares() -> st.SearchStrategy[Step]:
    """How a step of one second divides."""
    return st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(
        lambda parts: Step(*(p / sum(parts) for p in parts))
    )


def times(step: Step, factor: float) -> Step:
    return Step._make(factor * seconds for seconds in step)


@given(st.data(), SIZES, SECONDS, shares(), st.booleans())
def test_ranks_that_are_alike_but_for_noise_are_no_stragglers(
    data: st.DataObject, size: int, seconds: float, parts: Step, is_synchronous: bool
) -> None:
    ranks = Ranks(size)
    noise = st.lists(st.floats(0.82, 1.22), min_size=size, max_size=size)
    for _ in range(2 * NUM_WINDOWS):
        steps = [times(parts, seconds * factor) for factor in data.draw(noise)]
        assert ranks.window(together(*steps) if is_synchronous else steps) == []


@given(st.data(), SIZES, SECONDS, shares(), st.sampled_from(PHASES), st.floats(0.7, 20.0), st.booleans())
def test_exactly_the_one_that_was_slowed_is_named(
    data: st.DataObject, size: int, seconds: float, parts: Step, phase: str, slowed: float, is_synchronous: bool
) -> None:
    slow = data.draw(st.integers(0, size - 1))
    steps = [times(parts, seconds)] * size
    steps[slow] = steps[slow]._replace(**{phase: getattr(steps[slow], phase) + slowed * seconds})
    ranks = Ranks(size)
    steps = together(*steps) if is_synchronous else steps
    assert ranks.windows(steps, NUM_WINDOWS - 1) == []
    (told,) = ranks.window(steps)
    assert (told.rank, told.phase) == (slow, phase)
    assert told.own_s == pytest.approx((1 + slowed) * seconds)
    assert told.others_s == pytest.approx(seconds)
    assert told.step_s == pytest.approx(sum(steps[slow]))
    assert told.since_s == pytest.approx(ranks.now - 100.0)
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
def test_it_does_not_matter_which_rank_it_is(given_steps: tuple[list[list[Step]], list[int]]) -> None:
    windows, order = given_steps
    one, other = Ranks(len(order)), Ranks(len(order))
    for steps in windows:
        told = {straggler.rank: straggler for straggler in one.window(steps)}
        moved = {order[straggler.rank]: straggler for straggler in other.window([steps[rank] for rank in order])}
        assert told.keys() == moved.keys()
        for rank, straggler in told.items():
            assert (straggler.phase, straggler.own_s, straggler.others_s) == (
                moved[rank].phase,
                moved[rank].own_s,
                moved[rank].others_s,
            )


@pytest.mark.parametrize("is_unseen_last", [True, False])
def test_windows_in_which_waiting_is_seen_and_others_in_which_it_is_not_make_a_row(is_unseen_last: bool) -> None:
    seen = [Step(0.1, 0.6), Step(0.1, 0.1)]
    unseen = [Step(0.1, 0.3), Step(0.3, 0.1)]  # as long as each other: one may wait in a collective
    ranks = Ranks(2)
    first, last = (seen, unseen) if is_unseen_last else (unseen, seen)
    assert ranks.windows(first, NUM_WINDOWS - 1) == []
    assert ranks.windows(last, 1) == [(0, "data")]


SLOW = together(Step(0.1), Step(0.3), Step(0.1))
FAST = together(Step(0.1), Step(0.1), Step(0.1))
HALF = together(Step(0.1), Step(0.14), Step(0.1))


@given(st.lists(st.tuples(st.integers(1, 2 * NUM_WINDOWS), st.integers(1, 2 * NUM_WINDOWS)), max_size=6))
def test_it_is_told_again_only_after_it_recovered(episodes: list[tuple[int, int]]) -> None:
    ranks, is_told = Ranks(3), False
    for num_slow, num_fast in episodes:
        expected = [] if is_told or num_slow < NUM_WINDOWS else [(1, "compute")]
        assert ranks.windows(SLOW, num_slow) == expected
        is_told = is_told or bool(expected)
        assert ranks.windows(FAST, num_fast) == []
        is_told = is_told and num_fast < NUM_WINDOWS


# -- one by one --------------------------------------------------------------------------------------------------------


def test_what_is_a_little_slow_is_no_recovery() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW) == [(1, "compute")]
    assert ranks.windows(HALF) == []
    assert ranks.windows(SLOW) == []
    assert ranks.windows(FAST) == []
    assert ranks.windows(SLOW) == [(1, "compute")]


def test_windows_that_are_not_in_a_row_do_not_add_up() -> None:
    ranks = Ranks(3)
    for _ in range(5):
        assert ranks.windows(SLOW, NUM_WINDOWS - 1) == []
        assert ranks.windows(HALF, 1) == []


def test_another_phase_is_told_too() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW) == [(1, "compute")]
    assert ranks.windows(together(Step(0.1), Step(0.1, data=0.3), Step(0.1))) == [(1, "data")]


def test_the_phase_is_the_one_that_makes_the_difference_not_the_longest() -> None:
    ranks = Ranks(3)
    assert ranks.windows(together(Step(0.5), Step(0.5, data=0.4), Step(0.5))) == [(1, "data")]
    ranks = Ranks(2)
    assert ranks.windows(together(Step(0.2, 0.1, checkpoint=0.5), Step(0.2, 0.1))) == [(0, "checkpoint")]


def test_two_slow_ones_of_five() -> None:
    ranks = Ranks(5)
    steps = together(Step(0.1), Step(0.4), Step(0.1), Step(0.1), Step(0.1, data=0.25))
    assert ranks.windows(steps) == [(1, "compute"), (4, "data")]


def test_a_rank_whose_data_is_slow_and_whose_computing_is_fast_is_not_slow() -> None:
    assert Ranks(3).windows(together(Step(0.3, 0.01), Step(0.1, 0.2), Step(0.29, 0.01))) == []


def test_a_world_of_one_has_nobody_to_compare_with() -> None:
    assert Ranks(1).windows([Step(1.0)]) == []


def test_milliseconds_and_small_shares_are_nothing() -> None:
    below = 0.9 * MIN_EXCESS_S
    assert Ranks(3).windows(together(Step(0.001), Step(0.001 + below), Step(0.001))) == []
    assert Ranks(3).windows(together(Step(0.001), Step(0.001 + 1.2 * MIN_EXCESS_S), Step(0.001))) == [(1, "compute")]
    # A step that consists of the exchange of gradients is not made longer by any rank.
    waiting = [Step(0.01, waiting=1.0), Step(0.02, waiting=0.99), Step(0.01, waiting=1.0)]
    assert Ranks(3).windows(waiting) == []


# -- waiting that nobody saw -------------------------------------------------------------------------------------------


def test_ranks_that_wait_unseen_are_compared_by_their_data() -> None:
    """The user's own DistributedDataParallel: all steps take as long as those of the slowest."""
    assert Ranks(3).windows([Step(0.3), Step(0.3), Step(0.3)]) == []
    assert Ranks(3).windows([Step(0.3), Step(0.1, data=0.2), Step(0.31)]) == [(1, "data")]


def test_a_checkpoint_may_hold_waiting_too() -> None:
    """Of a state that is gathered from all ranks, where the fast ones wait for the slow one."""
    gathers = [Step(0.1, checkpoint=0.2), Step(0.3), Step(0.1, checkpoint=0.2)]
    assert Ranks(3).windows(gathers) == []


def test_with_gpus_reading_may_hold_waiting_too() -> None:
    """A copy to the GPU waits for what it does before, in the ranks that are fast."""
    copies = [Step(0.1, data=0.2), Step(0.3), Step(0.1, data=0.2)]
    assert Ranks(3, has_gpu=True).windows(copies) == []
    assert Ranks(3, has_gpu=True).windows([Step(0.1), Step(0.3), Step(0.1)]) == [(1, "compute")]


def test_ranks_that_do_not_wait_at_all_are_compared_by_their_steps() -> None:
    assert Ranks(2).windows([Step(0.1), Step(0.1 * SLOW_FACTOR + 0.001)]) == [(1, "compute")]
    assert Ranks(2).windows([Step(0.1), Step(0.1 * (1 + ALIKE_SHARE) + 0.001)]) == []


# -- windows -----------------------------------------------------------------------------------------------------------


def test_long_steps_are_judged_by_the_clock() -> None:
    ranks = Ranks(3)
    steps = together(Step(4.0), Step(10.0), Step(4.0))
    num_steps = round(WINDOW_S / 10) + 1
    told = [straggler for _ in range(NUM_WINDOWS) for straggler in ranks.window(steps, num_steps)]
    assert [(straggler.rank, straggler.phase) for straggler in told] == [(1, "compute")]
    assert told[0].since_s == pytest.approx(ranks.now - 100.0)


def test_a_window_of_very_few_steps_goes_on() -> None:
    ranks = Ranks(2)
    steps = together(Step(1.0), Step(20.0))
    assert [len(ranks.window(steps, 1)) for _ in range(9)] == [0] * 8 + [1]


def test_who_makes_no_steps_for_long_holds_up_nobody() -> None:
    """Rank 2 evaluates, say, and waits for nobody."""
    ranks = Ranks(3)
    told: list[Straggler] = []
    while not told and ranks.now < 100 + (NUM_WINDOWS + 1) * (MAX_WINDOW_S + 2):
        spent = ranks.spent[2]
        told = ranks.window([Step(1.0), Step(2.0), Step(1.0)], 1)
        ranks.spent[2] = spent
    # Its few steps are no pace: it is left out, not taken for the fastest or the slowest.
    assert [(straggler.rank, straggler.others_s) for straggler in told] == [(1, pytest.approx(1.0))]


def test_who_has_returned_or_not_begun_is_not_compared() -> None:
    ranks = Ranks(4)
    assert ranks.windows([Step(0.1)] * 4, NUM_WINDOWS) == []
    ranks.gone = {2, 3}
    ranks.policy.answered(2, Pulse(is_inside=False, spent=ranks.spent[2]))  # it has returned
    ranks.policy.left(3)  # it is dead
    assert ranks.windows(SLOW, NUM_WINDOWS) == [(1, "compute")]
    late = Ranks(2)
    late.policy = StragglerPolicy(late.now)
    late.gone = {0}
    late.policy.answered(0, Pulse(is_inside=True))  # it still gets ready
    assert late.windows([Step(0.1), Step(0.3)]) == []


def test_a_new_attempt_starts_afresh() -> None:
    ranks = Ranks(3)
    assert ranks.windows(SLOW, NUM_WINDOWS) == [(1, "compute")]
    again = Ranks(3)
    assert again.windows(SLOW, NUM_WINDOWS - 1) == []
    assert again.windows(SLOW, 1) == [(1, "compute")]


def test_the_time_before_the_first_step_counts_for_nothing() -> None:
    ranks = Ranks(2)
    ranks.spent = [Spent(), Spent()]
    ranks.policy = StragglerPolicy(ranks.now)
    ranks.answer()
    ranks.spent = [Spent(1, 1.0), Spent(1, 500.0)]  # it downloaded the data
    ranks.answer()
    assert ranks.windows([Step(0.1), Step(0.1)]) == []


# -- what is told ------------------------------------------------------------------------------------------------------


def test_the_user_reads_who_and_where_and_by_how_much() -> None:
    straggler = Straggler(2, "data", own_s=0.312, others_s=0.0987, step_s=0.32, since_s=12.3456789)
    assert straggler.told("node-7 (10.0.0.7)") == (
        "rank 2 on node-7 (10.0.0.7) is slow: 0.31 s a step of its own, the others 98.7 ms; "
        "most of the difference in: data"
    )
    assert straggler.event("node-7") == {
        "rank": 2,
        "node": "node-7",
        "phase": "data",
        "own_s": 0.312,
        "others_s": 0.0987,
        "step_s": 0.32,
        "since_s": 12.345679,
    }

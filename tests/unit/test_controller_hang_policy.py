"""Which workers hang: what was seen of them in, verdicts out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.hang_policy import AUTO_FACTOR, AUTO_MIN_S, BUSY_SHARE, Hang, HangPolicy, blame
from raysgd.session.progress import Progress, Pulse

TIMEOUT_S = 10.0


def policy(progress_timeout_s: float | str | None = None, ranks: int = 3) -> HangPolicy:
    return HangPolicy(TIMEOUT_S, progress_timeout_s, range(ranks), 0.0)


def inside(calls: int, idle_s: float, longest_pause_s: float = 1.0, phase: str = "report") -> Pulse:
    return Pulse(calls, idle_s, longest_pause_s, phase, is_inside=True)


def verdicts(hangs: list[Hang]) -> list[tuple[int, str]]:
    return [(hang.rank, hang.kind) for hang in hangs]


# -- heartbeats --------------------------------------------------------------------------------------------------------


def test_a_worker_that_answers_is_alive() -> None:
    watched = policy()
    for second in range(100):
        for rank in range(3):
            watched.answered(rank, Pulse(), float(second))
        assert watched.judge(float(second)) == [] and watched.suspects(float(second)) == []


def test_a_worker_that_says_nothing_is_looked_at_and_then_ended() -> None:
    watched = policy(ranks=2)
    watched.answered(0, Pulse(), 9.0)
    assert watched.suspects(9.5) == [1]
    watched.looked(1, 5.0, 0.0, True, 4.0)
    watched.looked(1, 5.0, 0.0, True, 9.5)
    assert watched.judge(10.0) == []
    (hang,) = watched.judge(10.1)
    assert (hang.rank, hang.kind) == (1, "silent")
    assert "10.1 s" in hang.why and "SIGSTOP" in hang.why


def test_one_that_says_nothing_and_works_is_busy() -> None:
    """A C call that holds the interpreter's lock, such as a large matrix product in an extension of the user's."""
    watched = policy(ranks=1)
    for second in range(4, 60):
        watched.looked(0, second * 0.9, 0.0, False, float(second))
        assert watched.judge(float(second)) == []
    for second in range(60, 66):  # it is done, and still says nothing
        watched.looked(0, 60 * 0.9, 0.0, False, float(second))
    assert verdicts(watched.judge(65.0)) == [(0, "silent")]


def test_one_that_is_stopped_is_not_busy_whatever_it_did_before() -> None:
    watched = policy(ranks=1)
    for second in range(4, 11):
        watched.looked(0, second * 0.9, 0.0, False, float(second))
    watched.looked(0, 9.9, 0.0, True, 11.0)
    assert verdicts(watched.judge(11.0)) == [(0, "silent")]


def test_one_that_an_overloaded_machine_lets_run_now_and_then_is_busy() -> None:
    watched, cpu_s = policy(ranks=1), 0.0
    for tick in range(8, 80):
        cpu_s += 0.5 if tick % 6 == 0 else 0.0
        watched.looked(0, cpu_s, 0.0, False, tick / 2)
        assert watched.judge(tick / 2) == []


def test_one_that_an_overloaded_machine_does_not_let_run_at_all_is_busy() -> None:
    """It waits for a CPU nearly all the time; one that sleeps does not, but for Ray's threads that wake up in it."""
    for waits, found in ((0.9, []), (0.2, [(0, "silent")])):
        watched = policy(ranks=1)
        for second in range(4, 30):
            watched.looked(0, second * 0.01, second * waits, False, float(second))
        assert verdicts(watched.judge(30.0)) == found


def test_the_little_that_rays_own_threads_do_is_no_work() -> None:
    watched = policy(ranks=1)
    for second in range(4, 12):
        watched.looked(0, second * BUSY_SHARE / 5, 0.0, False, float(second))
    assert verdicts(watched.judge(12.0)) == [(0, "silent")]


def test_a_node_that_says_nothing_either_is_lost() -> None:
    watched = policy(ranks=2)
    watched.answered(0, Pulse(), 10.0)
    watched.looked(1, 1.0, 0.0, False, 4.0)
    watched.looked(1, 2.0, 0.0, False, 5.0)  # busy when last seen
    watched.unreachable(1)
    (hang,) = watched.judge(10.5)
    assert (hang.rank, hang.kind) == (1, "lost") and "node" in hang.why


def test_an_answer_makes_good_for_all_that_was() -> None:
    watched = policy(ranks=1)
    watched.unreachable(0)
    watched.answered(0, Pulse(), 10.5)
    assert watched.judge(20.0) == []
    assert watched.suspects(12.0) == []


def test_who_has_left_is_not_missed() -> None:
    watched = policy(ranks=1)
    watched.left(0)
    watched.answered(0, Pulse(), 1.0)
    watched.looked(0, 1.0, 0.0, False, 1.0)
    watched.unreachable(0)
    assert watched.judge(100.0) == [] and watched.suspects(100.0) == []


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 3.0)), max_size=60))
def test_nobody_is_ended_who_answered_within_the_timeout(answers: list[tuple[int, float]]) -> None:
    watched, now = policy(), 0.0
    last = dict.fromkeys(range(3), 0.0)
    for rank, pause_s in answers:
        now += pause_s
        watched.answered(rank, Pulse(), now)
        last[rank] = now
        ended = {hang.rank for hang in watched.judge(now)}
        assert ended == {rank for rank, at in last.items() if now - at > TIMEOUT_S}


# -- progress ----------------------------------------------------------------------------------------------------------


def test_without_a_limit_a_rank_may_take_as_long_as_it_likes() -> None:
    watched = policy()
    watched.answered(0, inside(5, 1e6), 1.0)
    assert watched.judge(1.0) == []


def test_the_rank_that_is_behind_is_the_one_the_others_wait_for() -> None:
    watched = policy(5.0)
    for rank, pulse in enumerate([inside(8, 6.0), inside(7, 6.5, phase="batch"), inside(8, 6.1)]):
        watched.answered(rank, pulse, 1.0)
    (hang,) = watched.judge(1.0)
    assert (hang.rank, hang.kind) == (1, "stuck")
    assert "6.5 s" in hang.why and "last batch" in hang.why and "5 s" in hang.why


def test_of_ranks_that_are_equally_far_the_one_that_is_longest_there() -> None:
    watched = policy(5.0)
    for rank, idle_s in enumerate([6.0, 6.2, 6.1]):
        watched.answered(rank, inside(7, idle_s), 1.0)
    assert verdicts(watched.judge(1.0)) == [(1, "stuck")]


def test_of_ranks_that_are_equally_far_the_one_that_waits_for_nobody_is_to_blame() -> None:
    watched = policy(5.0)
    for rank, idle_s in enumerate([6.3, 6.1, 6.2]):
        watched.answered(rank, inside(7, idle_s), 1.0)
    (hang,) = watched.judge(1.0)
    waiting = "all_reduce (torch/distributed/distributed_c10d.py:3000) _call (raysgd/workers/entry.py:190)"
    sleeping = "sleep (train.py:3) _call (raysgd/workers/entry.py:190)"
    assert blame(hang, {0: waiting, 1: sleeping, 2: waiting}).rank == 1
    assert blame(hang, {0: "it cannot be read", 1: sleeping, 2: waiting}).rank == 1
    assert blame(hang, {0: waiting, 1: waiting, 2: waiting}).rank == 0
    assert blame(hang, {}).rank == 0


def test_ranks_that_wait_for_a_slow_one_are_not_ended_for_it() -> None:
    watched = policy(5.0, ranks=2)
    watched.answered(0, inside(8, 6.0), 1.0)
    watched.answered(1, inside(4, 0.5), 1.0)
    assert watched.judge(1.0) == []


def test_a_rank_that_has_returned_or_not_entered_is_not_stuck() -> None:
    watched = policy(5.0, ranks=2)
    watched.answered(0, Pulse(9, 100.0, 1.0, "report", is_inside=False), 1.0)
    watched.answered(1, inside(3, 1.0), 1.0)
    assert watched.judge(1.0) == []


def test_before_the_first_call_the_time_since_it_was_entered_counts() -> None:
    watched = policy(5.0, ranks=1)
    watched.answered(0, inside(0, 6.0, 0.0, ""), 1.0)
    (hang,) = watched.judge(1.0)
    assert "since it entered train_func" in hang.why


def test_auto_takes_the_pace_of_the_run() -> None:
    watched = policy("auto", ranks=2)
    watched.answered(0, inside(0, 1e5, 0.0), 1.0)  # a first epoch of unknown length
    assert watched.judge(1.0) == []
    slow = AUTO_MIN_S / AUTO_FACTOR * 2
    for idle_s, expected in ((AUTO_MIN_S * 2 - 1, []), (AUTO_MIN_S * 2 + 1, [(0, "stuck")])):
        watched.answered(0, inside(4, idle_s, slow), 1.0)
        watched.answered(1, inside(5, idle_s, 0.01), 1.0)
        assert verdicts(watched.judge(1.0)) == expected


def test_auto_does_not_take_a_fast_loop_at_its_word() -> None:
    watched = policy("auto", ranks=1)
    watched.answered(0, inside(1000, AUTO_MIN_S - 1, 0.01), 1.0)
    assert watched.judge(1.0) == []


# -- what a worker counts ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 100.0), max_size=20), st.floats(0.0, 100.0))
def test_progress_is_what_was_marked(pauses: list[float], idle_s: float) -> None:
    now = 0.0
    progress = Progress(lambda: now)
    now = 7.0
    progress.enter()
    for pause_s in pauses:
        now += pause_s
        progress.mark("batch")
    now += idle_s
    pulse = progress.pulse(is_inside=True)
    assert pulse.calls == len(pauses) and pulse.is_inside
    assert abs(pulse.idle_s - idle_s) < 1e-6
    assert abs(pulse.longest_pause_s - max(pauses[1:], default=0.0)) < 1e-6
    assert pulse.phase == ("batch" if pauses else "")

"""Which workers are hung, given their heartbeats and the CPU time of their processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raysgd.controller.policies import hang as hang_policy
from raysgd.controller.policies.hang import Hang, HangPolicy, blame
from raysgd.session.progress import Heartbeat, Progress
from raysgd.workers.liveness.silence import BUSY_SHARE
from support.project import ROOT

#: Promised numbers, written out.
AUTO_FACTOR = 10.0
AUTO_MIN_S = 60.0

TIMEOUT_S = 10.0


def policy(progress_timeout_s: float | str | None = None, ranks: int = 3) -> HangPolicy:
    return HangPolicy(TIMEOUT_S, progress_timeout_s, range(ranks), 0.0)


def inside(calls: int, idle_s: float, longest_pause_s: float = 1.0, phase: str = "report") -> Heartbeat:
    return Heartbeat(calls, idle_s, longest_pause_s, phase, is_inside=True)


def hangs_when(watched: HangPolicy, *heartbeats: Heartbeat, seen_for_s: float = 6.0) -> list[Hang]:
    """Return the hangs once the ranks have stood for some time where their heartbeats say."""
    start = 1.0
    for now in (start, start + seen_for_s):
        for rank, heartbeat in enumerate(heartbeats):
            watched.on_heartbeat(rank, heartbeat, now)
        found = watched.find_hangs(now)
    return found


def kinds(hangs: list[Hang]) -> list[tuple[int, str]]:
    return [(hang.rank, hang.kind) for hang in hangs]


# -- heartbeats --------------------------------------------------------------------------------------------------------


def test_worker_with_heartbeats_is_not_hung() -> None:
    watched = policy()
    for second in range(100):
        for rank in range(3):
            watched.on_heartbeat(rank, Heartbeat(), float(second))
        assert watched.find_hangs(float(second)) == [] and watched.suspects(float(second)) == []


def test_silent_worker_is_suspected_and_then_hung() -> None:
    watched = policy(ranks=2)
    watched.on_heartbeat(0, Heartbeat(), 9.0)
    assert watched.suspects(9.5) == [1]
    watched.on_process_checked(1, 5.0, 0.0, True, 4.0)
    watched.on_process_checked(1, 5.0, 0.0, True, 9.5)
    assert watched.find_hangs(10.0) == []
    (hang,) = watched.find_hangs(10.1)
    assert (hang.rank, hang.kind) == (1, "silent")
    assert "10.1 s" in hang.why and "SIGSTOP" in hang.why


def test_silent_worker_that_uses_cpu_is_busy() -> None:
    """A C call may hold the interpreter's lock, such as a large matrix product in an extension of the user."""
    watched = policy(ranks=1)
    for second in range(4, 60):
        watched.on_process_checked(0, second * 0.9, 0.0, False, float(second))
        assert watched.find_hangs(float(second)) == []
    for second in range(60, 66):  # the call is over, and the worker is still silent
        watched.on_process_checked(0, 60 * 0.9, 0.0, False, float(second))
    assert kinds(watched.find_hangs(65.0)) == [(0, "silent")]


def test_stopped_process_is_hung_despite_earlier_cpu_use() -> None:
    watched = policy(ranks=1)
    for second in range(4, 11):
        watched.on_process_checked(0, second * 0.9, 0.0, False, float(second))
    watched.on_process_checked(0, 9.9, 0.0, True, 11.0)
    assert kinds(watched.find_hangs(11.0)) == [(0, "silent")]


def test_worker_with_little_cpu_on_overloaded_node_is_busy() -> None:
    watched, cpu_s = policy(ranks=1), 0.0
    for tick in range(8, 80):
        cpu_s += 0.5 if tick % 6 == 0 else 0.0
        watched.on_process_checked(0, cpu_s, 0.0, False, tick / 2)
        assert watched.find_hangs(tick / 2) == []


def test_worker_that_waits_for_a_cpu_is_busy() -> None:
    """A worker that waits for a CPU is runnable nearly all the time; in a sleeping one only Ray's threads wake up."""
    for waits, found in ((0.9, []), (0.2, [(0, "silent")])):
        watched = policy(ranks=1)
        for second in range(4, 30):
            watched.on_process_checked(0, second * 0.01, second * waits, False, float(second))
        assert kinds(watched.find_hangs(30.0)) == found


def test_cpu_time_of_ray_threads_does_not_count_as_busy() -> None:
    watched = policy(ranks=1)
    for second in range(4, 12):
        watched.on_process_checked(0, second * BUSY_SHARE / 5, 0.0, False, float(second))
    assert kinds(watched.find_hangs(12.0)) == [(0, "silent")]


def test_silent_worker_on_unreachable_node_is_lost() -> None:
    watched = policy(ranks=2)
    watched.on_heartbeat(0, Heartbeat(), 10.0)
    watched.on_process_checked(1, 1.0, 0.0, False, 4.0)
    watched.on_process_checked(1, 2.0, 0.0, False, 5.0)  # busy when last seen
    watched.on_unreachable(1)
    (hang,) = watched.find_hangs(10.5)
    assert (hang.rank, hang.kind) == (1, "lost") and "node" in hang.why


def test_lost_ranks_that_nothing_can_replace_are_waited_for() -> None:
    watched = HangPolicy(TIMEOUT_S, 5.0, range(3), 0.0, wait_s=120.0)
    for rank in (0, 1):
        watched.on_unreachable(rank)
    watched.on_heartbeat(2, inside(7, idle_s=100.0), 125.0)
    assert watched.cut_off(10.5) == [0, 1] and watched.cut_off(9.5) == []
    assert watched.find_hangs(129.0, can_replace=False) == [], "rank 2 waits for them in a collective"
    assert kinds(watched.find_hangs(129.0)) == [(0, "lost"), (1, "lost")]
    assert kinds(watched.find_hangs(131.0, can_replace=False)) == [(0, "lost"), (1, "lost")], "not for ever"


def test_ranks_of_one_cut_are_counted_together_although_they_answered_last_at_different_times() -> None:
    watched = policy(ranks=4)
    for rank, answered_at in ((0, 1.0), (2, 9.0), (3, 1.5)):
        watched.on_heartbeat(rank, Heartbeat(), answered_at)
    for rank in (0, 1, 3):
        watched.on_unreachable(rank)
    assert watched.cut_off(9.9) == []
    assert watched.cut_off(10.1) == [0, 1, 3], "rank 1 alone could be left out, all three cannot"
    watched.on_heartbeat(3, Heartbeat(), 10.2)
    assert watched.cut_off(10.3) == [0, 1]


def test_ranks_of_silent_nodes_are_known_before_they_are_lost() -> None:
    watched = policy(ranks=3)
    watched.on_heartbeat(2, Heartbeat(), 5.0)
    watched.on_unreachable(0)
    watched.on_process_checked(1, 1.0, 0.0, False, 5.0)
    assert watched.unreachable(6.0) == [0] and watched.find_hangs(6.0) == []
    watched.on_heartbeat(0, Heartbeat(), 7.0)
    assert watched.unreachable(7.5) == []
    watched.remove(0)
    assert watched.watched == {1, 2}


def test_stopped_rank_is_killed_while_lost_ones_are_waited_for() -> None:
    watched = HangPolicy(TIMEOUT_S, None, range(2), 0.0, wait_s=120.0)
    watched.on_unreachable(0)
    watched.on_process_checked(1, 1.0, 0.0, True, 9.0)
    assert kinds(watched.find_hangs(11.0, can_replace=False)) == [(1, "silent")]


def test_worker_that_was_cut_off_has_as_long_again_to_answer() -> None:
    """Its answer is sent again by TCP, whose pauses have doubled during the cut."""
    watched = policy(ranks=1)
    watched.on_process_checked(0, 1.0, 0.0, False, 4.0)
    watched.on_unreachable(0)
    for now in (25.0, 30.0, 45.0):
        watched.on_process_checked(0, 1.0, 0.0, False, now)
        assert watched.find_hangs(now + 1) == [] and watched.cut_off(now + 1) == []
    watched.on_process_checked(0, 1.0, 0.0, False, 51.0)
    assert watched.find_hangs(52.0) == []
    watched.on_process_checked(0, 1.0, 0.0, False, 53.0)
    assert kinds(watched.find_hangs(53.0)) == [(0, "silent")]


def test_heartbeat_clears_suspicion() -> None:
    watched = policy(ranks=1)
    watched.on_unreachable(0)
    watched.on_heartbeat(0, Heartbeat(), 10.5)
    assert watched.find_hangs(20.0) == []
    assert watched.suspects(12.0) == []


def test_removed_rank_is_not_watched() -> None:
    watched = policy(ranks=1)
    watched.remove(0)
    watched.on_heartbeat(0, Heartbeat(), 1.0)
    watched.on_process_checked(0, 1.0, 0.0, False, 1.0)
    watched.on_unreachable(0)
    assert watched.find_hangs(100.0) == [] and watched.suspects(100.0) == []


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 3.0)), max_size=60))
def test_exactly_ranks_without_heartbeat_within_timeout_are_hung(answers: list[tuple[int, float]]) -> None:
    watched, now = policy(), 0.0
    last = dict.fromkeys(range(3), 0.0)
    for rank, pause_s in answers:
        now += pause_s
        watched.on_heartbeat(rank, Heartbeat(), now)
        last[rank] = now
        ended = {hang.rank for hang in watched.find_hangs(now)}
        assert ended == {rank for rank, at in last.items() if now - at > TIMEOUT_S}


# -- progress ----------------------------------------------------------------------------------------------------------


def test_rank_without_progress_timeout_is_never_stuck() -> None:
    watched = policy()
    watched.on_heartbeat(0, inside(5, 1e6), 1.0)
    assert watched.find_hangs(1.0) == []


def test_stuck_rank_is_the_one_with_fewest_calls() -> None:
    (hang,) = hangs_when(policy(5.0), inside(8, 6.0), inside(7, 6.5, phase="batch"), inside(8, 6.1))
    assert (hang.rank, hang.kind) == (1, "stuck")
    assert "6.5 s" in hang.why and "last batch" in hang.why and "5 s" in hang.why


def test_source_file_that_marks_train_func_stacks_exists() -> None:
    assert (ROOT / hang_policy._INSIDE).is_file()
    assert all((ROOT / sign).is_file() for sign in hang_policy._WAITING if sign.startswith("raysgd/"))


def test_rank_idle_longest_is_stuck_among_equal_calls() -> None:
    found = hangs_when(policy(5.0), *(inside(7, idle_s) for idle_s in (6.0, 6.2, 6.1)))
    assert kinds(found) == [(1, "stuck")]


def test_rank_outside_collectives_is_blamed_among_equal_calls() -> None:
    (hang,) = hangs_when(policy(5.0), *(inside(7, idle_s) for idle_s in (6.3, 6.1, 6.2)))
    waiting = (
        "all_reduce (torch/distributed/distributed_c10d.py:3000) _call (raysgd/workers/process/train_thread.py:190)"
    )
    sleeping = "sleep (train.py:3) _call (raysgd/workers/process/train_thread.py:190)"
    assert blame(hang, {0: waiting, 1: sleeping, 2: waiting}).rank == 1
    assert blame(hang, {0: "it cannot be read", 1: sleeping, 2: waiting}).rank == 1
    assert blame(hang, {0: waiting, 1: waiting, 2: waiting}).rank == 0
    own = "wait (raysgd/backends/torch_transfers.py:140) train (train.py:7) _call (raysgd/workers/process/train_thread.py:190)"
    assert blame(hang, {0: own, 1: sleeping, 2: own}).rank == 1, "they wait for an operation that the loop began before"
    assert blame(hang, {}).rank == 0


def test_ranks_that_wait_for_a_slow_rank_are_not_stuck() -> None:
    assert hangs_when(policy(5.0, ranks=2), inside(8, 6.0), inside(4, 0.5)) == []


def test_rank_that_waited_for_a_slow_rank_gets_the_full_time_once_that_has_moved_on() -> None:
    watched = policy(5.0, ranks=2)
    assert hangs_when(watched, inside(4, 0.5, phase="save"), inside(5, 60.0, phase="barrier"), seen_for_s=60.0) == []
    watched.on_heartbeat(0, inside(6, 0.1), 61.1)  # released, and at its next call; rank 1 was asked a moment before
    assert watched.find_hangs(61.1) == []
    watched.on_heartbeat(1, inside(5, 65.0, phase="barrier"), 66.0)
    assert watched.find_hangs(66.0) == []
    (hang,) = watched.find_hangs(66.2)
    assert (hang.rank, hang.kind) == (1, "stuck")


def test_rank_outside_train_func_is_not_stuck() -> None:
    outside = Heartbeat(9, 100.0, 1.0, "report", is_inside=False)
    assert hangs_when(policy(5.0, ranks=2), outside, inside(3, 1.0)) == []


def test_idle_time_before_first_call_counts_from_entry() -> None:
    (hang,) = hangs_when(policy(5.0, ranks=1), inside(0, 6.0, 0.0, ""))
    assert "since it entered train_func" in hang.why


def test_auto_progress_timeout_follows_longest_pause() -> None:
    assert hangs_when(policy("auto", ranks=2), inside(0, 1e5, 0.0)) == []  # a first epoch of unknown length
    slow = AUTO_MIN_S / AUTO_FACTOR * 2
    for idle_s, expected in ((AUTO_MIN_S * 2 - 1, []), (AUTO_MIN_S * 2 + 1, [(0, "stuck")])):
        found = hangs_when(policy("auto", ranks=2), inside(4, idle_s, slow), inside(5, idle_s, 0.01), seen_for_s=idle_s)
        assert kinds(found) == expected


def test_auto_progress_timeout_has_a_minimum() -> None:
    for idle_s, expected in ((AUTO_MIN_S - 1, []), (AUTO_MIN_S + 1, [(0, "stuck")])):
        found = hangs_when(policy("auto", ranks=1), inside(1000, idle_s, 0.01), seen_for_s=idle_s)
        assert kinds(found) == expected


# -- progress that a worker counts -------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 100.0), max_size=20), st.floats(0.0, 100.0))
def test_heartbeat_reports_marked_progress(pauses: list[float], idle_s: float) -> None:
    now = 0.0
    progress = Progress(lambda: now)
    now = 7.0
    progress.enter()
    for pause_s in pauses:
        now += pause_s
        progress.mark("batch")
    now += idle_s
    heartbeat = progress.heartbeat(is_inside=True)
    assert heartbeat.calls == len(pauses) and heartbeat.is_inside
    assert abs(heartbeat.idle_s - idle_s) < 1e-6
    assert abs(heartbeat.longest_pause_s - max(pauses[1:], default=0.0)) < 1e-6
    assert heartbeat.phase == ("batch" if pauses else "")

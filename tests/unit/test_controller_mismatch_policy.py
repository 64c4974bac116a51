"""Which ranks wait in collectives that others do not join, given where each rank is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.backends.flight_recorder import Collective
from raysgd.controller.policies.mismatch import Mismatch, MismatchPolicy
from raysgd.session.progress import Heartbeat
from raysgd.workers.orders import Position

#: Promised numbers, written out.
WARN_AFTER_S = 30.0

TIMEOUT_S = 60.0
TICK_S = 5.0


def last(
    number: int, *, is_done: bool = False, operation: str = "gloo:all_reduce", group: str = "default_pg"
) -> Collective:
    return Collective(group, number, operation, ((3,),), is_done)


def waits(*collectives: Collective) -> Position:
    return Position(collectives, line="train.py:20 in train")


def computes(*collectives: Collective) -> Position:
    return Position(collectives, line="train.py:31 in evaluate")


def done(number: int) -> Collective:
    return last(number, is_done=True)


class Watched:
    """Ranks that stay where they are, seen every few seconds; ``None``: the rank has returned after these collectives."""

    def __init__(
        self, *positions: Position, returned: tuple[int, ...] = (), timeout_s: float | None = TIMEOUT_S
    ) -> None:
        self.policy = MismatchPolicy(timeout_s, range(len(positions)))
        self.positions = list(positions)
        self.begun: list[tuple[Collective, ...] | None] = [()] * len(
            positions
        )  # what each rank's record has; None: unread
        self.now = 0.0
        self.found: list[tuple[float, Mismatch]] = []
        for rank in returned:
            self.policy.on_returned(rank)

    def watch(self, seconds: float, *, is_blocked: bool = True) -> list[Mismatch]:
        """Return what is found in these seconds; ``is_blocked``: ranks that have begun a collective do nothing else."""
        before = len(self.found)
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            asked = self.policy.list_questions()
            for rank, position in enumerate(self.positions):
                is_pending = any(not one.is_done for one in position.collectives)
                waited_s = self.now if is_pending else 0.0
                seen = replace(position, waited_s=waited_s, blocked_s=waited_s if is_blocked else 0.0)
                if self.begun[rank] is not None:
                    begun = (each for each in self.begun[rank] or () if any(map(each.is_asked_for, asked[rank])))
                    seen = replace(seen, begun=tuple(begun))
                self.policy.on_position(rank, seen, self.now)
            if (mismatch := self.policy.find_mismatch(self.now)) is not None:
                self.found.append((self.now, mismatch))
        return [mismatch for _, mismatch in self.found[before:]]


def test_rank_that_waits_for_a_returned_rank_is_warned_about_and_then_ends_the_run() -> None:
    watched = Watched(computes(done(12)), waits(last(13)), returned=(0,))
    (warned,) = watched.watch(45)
    assert watched.found[0][0] <= WARN_AFTER_S + TICK_S and not warned.is_over
    assert warned.why.startswith(
        "rank 1 waits in collective 13 of default_pg (gloo:all_reduce) for 30 s; rank 0 has returned from train_func. "
        "The run fails after 60 s of waiting"
    )
    assert not any(mismatch.is_over for mismatch in watched.watch(10))
    over = watched.watch(10)[0]
    assert over.is_over and over.ranks == (1,) and "for 60 s; rank 0 has returned" in over.why


def test_time_since_the_newest_look_counts_as_waiting() -> None:
    policy = MismatchPolicy(TIMEOUT_S, range(2))
    policy.on_position(0, computes(done(12)), 100.0)
    policy.on_returned(0)
    policy.on_position(1, replace(waits(last(13)), waited_s=25.0, blocked_s=25.0), 100.0)
    assert policy.find_mismatch(104.0) is None
    warned = policy.find_mismatch(106.0)
    assert warned is not None and "for 31 s" in warned.why


@pytest.mark.parametrize(("seconds", "is_found"), [(14.9, True), (15.1, False)])
def test_position_counts_for_three_looks(seconds: float, is_found: bool) -> None:
    policy = MismatchPolicy(TIMEOUT_S, range(2))
    policy.on_position(0, computes(done(12)), 100.0)
    policy.on_returned(0)
    policy.on_position(1, replace(waits(last(13)), waited_s=30.0, blocked_s=30.0), 100.0)
    assert (policy.find_mismatch(100.0 + seconds) is not None) is is_found


def test_warning_comes_after_30_seconds_however_long_the_run_waits() -> None:
    watched = Watched(computes(done(12)), waits(last(13)), returned=(0,), timeout_s=600)
    assert watched.watch(WARN_AFTER_S - TICK_S) == []
    (warned,) = watched.watch(2 * TICK_S)
    assert not warned.is_over and "for 30 s" in warned.why


def test_all_ranks_that_wait_are_named() -> None:
    watched = Watched(waits(last(13)), computes(done(12)), waits(last(13)), returned=(1,))
    over = watched.watch(90)[-1]
    assert over.is_over and over.ranks == (0, 2)
    assert over.why.startswith("ranks 0, 2 wait in collective 13")


def test_ranks_in_different_collectives_end_the_run() -> None:
    for other in (last(5, operation="gloo:broadcast"), last(3, group="rows")):
        watched = Watched(waits(last(5)), waits(other, done(4)) if other.group == "rows" else waits(other))
        if other.group == "rows":
            watched.positions[0] = waits(last(5), last(2, is_done=True, group="rows"))
        over = watched.watch(90)[-1]
        assert over.is_over and over.ranks == (0, 1)
        assert f"rank 0 waits in {last(5).place}, rank 1 waits in {other.place} for" in over.why


def all_reduce_of(num_elements: int, *, number: int = 5, is_done: bool = False, dtype: str = "Float") -> Collective:
    return Collective("default_pg", number, "gloo:all_reduce", ((num_elements,),), is_done, dtypes=(dtype,))


def test_ranks_in_one_collective_with_other_sizes_or_dtypes_end_the_run() -> None:
    for other, says in ((all_reduce_of(8), "8 float32"), (all_reduce_of(4, dtype="Double"), "4 float64")):
        over = Watched(waits(all_reduce_of(4)), waits(other), waits(all_reduce_of(4))).watch(TIMEOUT_S)[-1]
        assert over.is_over and over.ranks == (0, 1, 2)
        assert over.why == (
            "ranks 0, 2 wait in collective 5 of default_pg (gloo:all_reduce of 4 float32), "
            f"rank 1 waits in collective 5 of default_pg (gloo:all_reduce of {says}) for 60 s"
        )


def test_same_number_of_elements_in_another_shape_is_the_same_collective() -> None:
    assert Watched(waits(all_reduce_of(4)), waits(replace(all_reduce_of(4), sizes=((2, 2),)))).watch(3600) == []


def test_rank_that_returned_from_a_smaller_collective_of_the_same_number_has_not_joined() -> None:
    """gloo lets a rank with fewer elements complete, and the other one waits for the rest."""
    watched = Watched(computes(all_reduce_of(4, is_done=True)), waits(all_reduce_of(8)), returned=(0,))
    over = watched.watch(TIMEOUT_S)[-1]
    assert over.is_over and over.ranks == (1,)
    assert over.why == (
        "rank 1 waits in collective 5 of default_pg (gloo:all_reduce of 8 float32) for 60 s; "
        "rank 0 has made collective 5 of default_pg (gloo:all_reduce of 4 float32); rank 0 has returned from train_func"
    )


def test_rank_that_has_passed_the_number_with_another_collective_has_not_joined() -> None:
    """Rank 0 waits in number 7, which rank 1 will not reach: it waits in number 5."""
    watched = Watched(waits(last(7)), waits(all_reduce_of(8)))
    watched.begun[0] = (all_reduce_of(4, is_done=True), last(6, is_done=True))
    over = watched.watch(90)[-1]
    assert over.is_over and over.ranks == (0, 1)
    assert "rank 0 has made collective 5 of default_pg (gloo:all_reduce of 4 float32)" in over.why


def test_rank_that_has_joined_and_returned_is_not_missing() -> None:
    """The rest of a slow collective, which rank 0 left while it ran, needs no train_func."""
    watched = Watched(computes(done(7)), waits(last(5)), returned=(0,))
    watched.begun[0] = (last(5),)
    assert watched.watch(3600) == []
    overwritten = Watched(computes(done(7)), waits(last(5)), returned=(0,))  # its record does not reach back so far
    assert overwritten.watch(3600) == []


def send(number: int, *, source: int = 0, target: int = 1, is_done: bool = False, is_here: bool = True) -> Collective:
    """A send of ``source``, or the receive of ``target``."""
    operation, transfer = ("gloo:send", "send") if is_here else ("gloo:recv", "receive")
    group = f"default_pg from rank {source} to rank {target}"
    return Collective(group, number, operation, (), is_done, ranks=(source, target), transfer=transfer)  # type: ignore[arg-type]


def receive(number: int, *, source: int = 0, target: int = 1, is_done: bool = False) -> Collective:
    return send(number, source=source, target=target, is_done=is_done, is_here=False)


def test_receive_that_the_returned_sender_never_made_ends_the_run() -> None:
    watched = Watched(computes(), waits(receive(3)), returned=(0,))
    watched.begun[0] = (send(2, is_done=True),)
    over = watched.watch(TIMEOUT_S)[-1]
    assert over.is_over and over.ranks == (1,)
    assert over.why == (
        "rank 1 waits in receive 3 of default_pg from rank 0 to rank 1 for 60 s; rank 0 has returned from train_func"
    )


def test_sends_of_all_ranks_to_the_next_one_wait_for_each_other() -> None:
    ring = [waits(send(1, source=rank, target=(rank + 1) % 3)) for rank in range(3)]
    over = Watched(*ring).watch(90)[-1]
    assert over.is_over and over.ranks == (0, 1, 2)


def test_send_and_collective_wait_for_each_other() -> None:
    over = Watched(waits(send(1)), waits(last(1))).watch(90)[-1]
    assert over.is_over and over.ranks == (0, 1)
    assert "rank 0 waits in send 1 of default_pg from rank 0 to rank 1, rank 1 waits in collective 1" in over.why


def test_slow_transfer_that_both_ranks_have_begun_is_no_mismatch() -> None:
    watched = Watched(waits(send(3)), waits(receive(3)))
    watched.begun = [(send(3),), (receive(3),)]
    assert watched.watch(3600) == []
    ahead = Watched(computes(), waits(receive(3)), returned=(0,))  # a receive out of order: the last send counts
    ahead.begun[0] = (send(9, is_done=True),)
    assert ahead.watch(3600) == []


def test_transfer_waits_in_hope_while_the_other_rank_computes() -> None:
    watched = Watched(computes(), waits(receive(3)))
    watched.begun[0] = None
    assert watched.watch(3600) == []


def test_receive_from_any_rank_is_hopeless_without_any_sender() -> None:
    from_any = Collective(
        "default_pg from any rank to rank 0",
        2,
        "gloo:recv_anysource",
        (),
        False,
        ranks=(0, 1, 2),
        transfer="receive from any rank",
    )
    watched = Watched(waits(from_any), computes(), computes(), returned=(1,))
    assert not any(found.is_over for found in watched.watch(600))
    watched.policy.on_returned(2)
    over = watched.watch(10)[-1]
    assert over.is_over and "rank 0 waits in receive 2 of default_pg from any rank to rank 0" in over.why


def test_barrier_of_raysgd_and_collective_wait_for_each_other() -> None:
    barrier = Collective("raysgd.barrier()", 1, "", (), is_done=False)
    over = Watched(waits(barrier, done(4)), waits(last(5))).watch(90)[-1]
    assert over.is_over
    assert "rank 0 waits in call 1 of raysgd.barrier(), rank 1 waits in collective 5" in over.why


def test_barrier_of_raysgd_does_not_wait_for_returned_ranks() -> None:
    barrier = Collective("raysgd.barrier()", 1, "", (), is_done=False)
    assert Watched(waits(barrier), computes(), returned=(1,)).watch(90) == []


def test_rank_that_computes_is_named_and_never_ends_the_run() -> None:
    watched = Watched(computes(done(4)), waits(last(5)), waits(last(5)))
    (warned,) = watched.watch(3600)
    assert not warned.is_over
    assert warned.why == (
        "ranks 1, 2 wait in collective 5 of default_pg (gloo:all_reduce) for 30 s; "
        "rank 0 is missing, it is at train.py:31 in evaluate"
    )


def test_run_is_not_ended_while_a_rank_computes_although_others_wait_without_hope() -> None:
    watched = Watched(computes(done(4)), computes(done(4)), waits(last(5)), returned=(0,))
    assert not any(mismatch.is_over for mismatch in watched.watch(600))
    watched.policy.on_returned(1)
    assert watched.watch(10)[-1].is_over


def test_rank_that_is_stuck_outside_of_collectives_is_left_to_the_hang_policy() -> None:
    """The run will not end for the ranks that wait without hope, so the stuck one may be killed."""
    stuck = Watched(computes(done(12)), waits(last(13)), computes(done(12)), returned=(0,))
    stuck.watch(90)
    assert not stuck.policy.will_end(stuck.now)
    all_wait = Watched(computes(done(12)), waits(last(13)), returned=(0,))
    all_wait.watch(40)
    assert all_wait.policy.will_end(all_wait.now)
    never_ended = Watched(computes(done(12)), waits(last(13)), returned=(0,), timeout_s=None)
    never_ended.watch(90)
    assert not never_ended.policy.will_end(never_ended.now)


def test_slow_collective_of_all_ranks_is_no_mismatch() -> None:
    assert Watched(*[waits(last(5))] * 3).watch(3600) == []


def test_ranks_of_other_groups_are_not_waited_for() -> None:
    rows, columns = (replace(last(2, group=name), ranks=ranks) for name, ranks in (("a", (0, 1)), ("b", (2, 3))))
    assert Watched(waits(rows), waits(rows), waits(columns), waits(columns)).watch(600) == []
    without_ranks = [replace(group, ranks=()) for group in (rows, rows, columns, columns)]
    assert Watched(*map(waits, without_ranks)).watch(600) == []


def test_deadlock_through_several_groups_is_found() -> None:
    """Rank 0 waits for 1, 1 for 2, and 2 for 0."""
    groups = {name: tuple(int(rank) for rank in name) for name in ("01", "12", "02")}
    first = {name: replace(last(1, group=name), ranks=ranks) for name, ranks in groups.items()}
    over = Watched(waits(first["01"]), waits(first["12"]), waits(first["02"])).watch(90)[-1]
    assert over.is_over and over.ranks == (0, 1, 2)


def test_rank_that_computes_while_its_collective_runs_does_not_wait() -> None:
    watched = Watched(computes(done(4)), waits(last(5)), returned=(0,))
    assert watched.watch(600, is_blocked=False) == []


def test_rank_that_computes_and_has_begun_the_collective_is_not_missing() -> None:
    """Of a rank that is not blocked only the numbers are known."""
    assert Watched(computes(last(5, is_done=True, operation="")), waits(last(5))).watch(600) == []


def test_nothing_is_found_once_a_rank_does_not_answer() -> None:
    watched = Watched(computes(done(4)), waits(last(5)), returned=(0,))
    watched.watch(TICK_S)
    assert watched.policy.find_mismatch(300.0) is None


def test_without_a_timeout_there_is_only_the_warning() -> None:
    (warned,) = Watched(computes(done(12)), waits(last(13)), returned=(0,), timeout_s=None).watch(600)
    assert not warned.is_over and warned.why.endswith("rank 0 has returned from train_func")


def test_short_timeout_shortens_everything() -> None:
    policy = MismatchPolicy(3.0, range(2))
    policy.on_returned(0)
    policy.on_heartbeat(1, Heartbeat(1, 0.6, is_inside=True))
    found = []
    for tenth in range(40):
        now = tenth / 10
        if policy.is_look_due(now):
            policy.on_position(0, computes(done(12)), now)
            policy.on_position(1, replace(waits(last(13)), waited_s=now, blocked_s=now), now)
        found.append(policy.find_mismatch(now))
    times = [tenth / 10 for tenth, mismatch in enumerate(found) if mismatch is not None]
    assert 1.5 <= times[0] <= 1.8 and times[1] >= 3.0


def test_positions_are_asked_for_only_while_a_rank_makes_no_call() -> None:
    policy = MismatchPolicy(TIMEOUT_S, range(2))
    policy.on_heartbeat(0, Heartbeat(5, 9.0, is_inside=True))
    policy.on_heartbeat(1, Heartbeat(5, 900.0, is_inside=False))
    assert not policy.is_look_due(100.0)
    policy.on_heartbeat(0, Heartbeat(5, 11.0, is_inside=True))
    assert [tenth / 10 for tenth in range(120) if policy.is_look_due(100.0 + tenth / 10)] == [0, 5, 10]


places = st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from(["gloo:all_reduce", "gloo:broadcast"]))


@given(st.lists(places, min_size=2, max_size=5), st.sets(st.integers(0, 4)))
def test_run_is_ended_only_if_every_rank_has_returned_or_waits(
    ranks: list[tuple[int, bool, str]], returned: set[int]
) -> None:
    positions = [waits(last(number, is_done=is_done, operation=operation)) for number, is_done, operation in ranks]
    inside = set(range(len(ranks))) - returned
    watched = Watched(*positions, returned=tuple(returned & set(range(len(ranks)))))
    is_over = any(mismatch.is_over for mismatch in watched.watch(90))
    pending = {rank for rank in inside if not ranks[rank][1]}
    if is_over:
        assert inside and pending == inside
    if pending == inside and len({ranks[rank] for rank in inside}) == 1 and not returned:
        assert not is_over

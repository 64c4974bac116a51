"""Checkpoints in the cluster's memory: which one a run resumes from, when it is stored, and how its parts arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.config import CheckpointConfig
from raysgd.controller import commands as c
from raysgd.controller.checkpoints.memory_copies import MemoryCheckpoints
from raysgd.session import events as e
from support.poll import turn_loop
from support.simulation import SimulatedRun, failed, finish, kill, part, running, saved, scoring, uri_of

MEMORY_ALONE = CheckpointConfig(storage_interval=100)


def hold(run: SimulatedRun, call: int = 0, made: int = 1, **flags: Any) -> None:
    """Save on all ranks, and keep the state of rank 0, or of all ranks, in memory."""
    for rank in range(run.num_ranks):
        gives = rank == 0 or flags.get("all_ranks", False)
        run.deliver(rank, saved(call, made, **flags), e.PartHeld(call, 10, {"n": rank}) if gives else part(call))


def store(run: SimulatedRun) -> None:
    """Complete every write from memory that was requested."""
    for command in run.all_of(c.StoreFromMemory):
        run.feed(c.MemoryCopyStored(command.manifest))
    run.commit()


def test_run_resumes_from_memory() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    hold(run, 0, 1)
    hold(run, 1, 2)
    assert [command.number for command in run.all_of(c.KeepInMemory)] == [1, 2]
    assert run.all_of(c.CommitCheckpoint) == []
    kill(run)
    run.ready()
    entered = run.entries[-1]
    assert entered.start.held is not None and (entered.start.held.number, entered.start.uri) == (2, None)
    assert (entered.start.iteration, entered.first_number) == (2, 3)
    assert entered.start.held.rank_states == {0: {"n": 0}, 1: {}}
    assert run.events("attempt_start")[-1]["memory"] == 2


def test_run_does_not_resume_from_incomplete_memory_checkpoint() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    run.deliver(0, saved(0), e.PartHeld(0, 10))
    kill(run)
    run.ready()
    assert run.entries[-1].start.held is None


def test_run_resumes_from_newer_of_memory_and_storage() -> None:
    run = running()
    run.save()  # on storage, not in memory
    run.commit()
    hold(run, 1, 2)
    kill(run)
    run.ready()
    assert run.entries[-1].start.held is not None and run.entries[-1].start.iteration == 2

    run.deliver(0, e.HoldFailed(0, "full"))
    run.save(0, 1)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[-1].start.held is None and run.entries[-1].start.uri == uri_of(3)


def test_checkpoint_in_memory_and_storage_is_read_from_memory() -> None:
    run = running()
    hold(run)
    run.deliver(0, part(0, "file"))
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[-1].start.held is not None and run.entries[-1].start.uri == uri_of(1)


def test_run_resumes_from_storage_when_memory_copy_is_lost() -> None:
    run = running()
    run.save()
    run.commit()
    hold(run, 1, 2)
    kill(run)
    run.feed(c.MemoryCopyLost(2))
    run.ready()
    assert (run.entries[-1].start.held, run.entries[-1].start.uri) == (None, uri_of(1))
    assert "no longer in the cluster's memory" in run.events("warning")[-1]["message"]


def test_memory_checkpoint_lost_during_read_is_skipped() -> None:
    run = running()
    run.save()
    run.commit()
    hold(run, 1, 2)
    kill(run)
    run.ready()
    run.deliver(1, e.StartUnusable("checkpoint 2 is no longer in memory"))
    for rank in range(2):
        run.leave(rank, e.Ended())
    run.ready()
    assert (run.entries[-1].start.held, run.entries[-1].start.uri) == (None, uri_of(1))


def test_checkpoint_of_dead_worker_is_stored_from_memory() -> None:
    run = running()
    hold(run)
    kill(run)  # before its bytes were safe
    run.ready()
    (command,) = run.all_of(c.StoreFromMemory)
    assert command.manifest.number == 1
    run.feed(c.MemoryCopyStored(command.manifest))
    run.commit()
    published = run.emitted("checkpoint")[-1].data
    assert (published["number"], published["from_memory"]) == (1, True)
    kill(run)
    run.ready()
    assert len(run.all_of(c.StoreFromMemory)) == 1, "the checkpoint is on storage already"


def test_checkpoint_that_its_worker_writes_is_not_stored_from_memory() -> None:
    run = running()
    hold(run)
    run.deliver(1, failed())
    run.end_stream(1)
    run.advance(1)
    assert run.outcome is not None and run.all_of(c.StoreFromMemory) == []
    run.deliver(0, part(0, "file"), e.Ended())
    run.end_stream(0)
    run.commit()
    assert run.is_closed and run.all_of(c.StoreFromMemory) == []
    assert [frame.data["number"] for frame in run.emitted("checkpoint")] == [1]


def test_number_of_checkpoint_in_writing_is_not_reused() -> None:
    run = running()
    hold(run)
    kill(run)
    run.ready()  # resumes from the checkpoint while it is being written
    kill(run)
    run.feed(c.MemoryCopyLost(1))
    run.ready()
    assert run.entries[-1].start.held is None and run.entries[-1].first_number == 2


def test_newest_memory_checkpoint_is_stored_at_the_end() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    hold(run)
    finish(run)
    assert not run.is_closed and run.outcome is None, "success is published when all checkpoints are durable"
    store(run)
    assert run.is_closed and run.outcome is not None and run.outcome.kind == "done"


def test_run_succeeds_with_warning_when_memory_checkpoint_cannot_be_stored() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    hold(run)
    finish(run)
    run.feed(c.MemoryCopyNotStored(1, "OSError: disk full"))
    assert run.is_closed and run.outcome is not None and run.outcome.kind == "done"
    assert "in memory alone and could not be written to storage: OSError" in run.events("warning")[-1]["message"]


def test_memory_checkpoint_saved_before_its_report_belongs_to_next_round() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    hold(run, 0, 0)  # a loop that saves first
    for rank in range(2):
        run.deliver(rank, scoring({"loss": 1}))
    finish(run)
    store(run)
    assert run.emitted("checkpoint")[-1].data["iteration"] == 1


def test_memory_checkpoint_of_all_ranks_keeps_group_size() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    hold(run, all_ranks=True)
    kill(run)
    assert run.keeps_size


def test_keep_in_memory_false_keeps_nothing_in_memory() -> None:
    run = running(checkpoint_config=CheckpointConfig(keep_in_memory=False))
    hold(run)
    assert run.all_of(c.KeepInMemory) == []


# -- references to parts -----------------------------------------------------------------------------------------------


class Memory:
    """Workers whose payloads the test puts."""

    def __init__(self) -> None:
        self.queues: dict[int, asyncio.Queue[Any]] = {}
        self.copied: list[list[dict[int, Any]]] = []
        self.stored: list[tuple[int, Any, str, str]] = []
        self.reached: list[list[dict[int, Any]]] = []
        self.waited_s: list[float] = []

    async def payloads(self, rank: int, attempt: int) -> AsyncIterator[Any]:
        queue = self.queues.setdefault(rank, asyncio.Queue())
        while True:
            yield await queue.get()

    async def reach(self, needed: Callable[[int], Mapping[int, Any]], *, timeout_s: float) -> bool:
        self.reached.append([dict(needed(rank)) for rank in range(2)])
        self.waited_s.append(timeout_s)
        return True

    async def store(self, rank: int, part: Any, folder: str, prefix: str) -> list[FileEntry]:
        self.stored.append((rank, part, folder, prefix))
        return [FileEntry(prefix, 1, 1)]

    def copy(self, checkpoints: Sequence[Mapping[int, Any]]) -> None:
        self.copied.append([dict(parts) for parts in checkpoints])


def manifest(number: int, **flags: Any) -> Manifest:
    fields: dict[str, Any] = {
        "attempt": 1,
        "iteration": 1,
        "time_total_s": 0.0,
        "world_size": 2,
        "metrics": {},
        "all_ranks": False,
        "is_files": False,
        "allow_pickle": False,
        "created_s": 0.0,
        "parts": {},
        "rank_states": {},
        **flags,
    }
    return Manifest(number=number, **fields)


class Held:
    """`MemoryCheckpoints` of an attempt whose first checkpoint is number 5, and the events that it fed to the machine."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.fed: list[tuple[int, int, e.WorkerEvent]] = []
        self.parts = MemoryCheckpoints(self.memory, uri_of, lambda *event: self.fed.append(event))
        self.parts.begin_attempt(2, 5, ())

    async def put(self, rank: int, payload: Any) -> None:
        self.memory.queues.setdefault(rank, asyncio.Queue()).put_nowait(payload)
        await turn_loop()


def parts_of(held: Held, checkpoint: Manifest, rank: int) -> dict[int, Any]:
    found = held.parts.for_rank(checkpoint, rank)
    assert found is not None
    return dict(found.parts)


def test_part_is_published_after_its_event_and_reference_arrived() -> None:
    async def scenario() -> None:
        held = Held()
        assert not held.parts.intercept(0, 2, saved(0))
        assert held.parts.intercept(0, 2, e.PartHeld(0, 10))
        assert held.fed == []
        await held.put(0, "ref0")
        await held.put(0, "ref1")
        assert held.parts.intercept(0, 2, e.PartHeld(1, 10))
        assert [(rank, attempt, event.call) for rank, attempt, event in held.fed] == [(0, 2, 0), (0, 2, 1)]  # type: ignore[union-attr]
        assert parts_of(held, manifest(6), rank=1) == {0: "ref1"}
        assert await held.parts.store(manifest(5)) == {0: [FileEntry("a0001-r00000", 1, 1)]}
        assert held.memory.stored == [(0, "ref0", uri_of(5), "a0001-r00000")]
        held.parts.keep(6)
        with pytest.raises(LookupError):
            await held.parts.store(manifest(5))
        held.parts.close()
        assert held.memory.copied[-1] == [], "copies on other nodes are released as well"

    asyncio.run(scenario())


def test_every_rank_gets_all_parts_of_sharded_arrays() -> None:
    async def scenario() -> None:
        held = Held()
        for rank in range(2):
            held.parts.intercept(rank, 2, saved(0, all_ranks=True))
            held.parts.intercept(rank, 2, e.PartHeld(0, 100_000_000, unsharded_digest=str(rank)))
            await held.put(rank, f"ref{rank}")
        whole = manifest(5, all_ranks=True)
        both = {0: "ref0", 1: "ref1"}
        assert [parts_of(held, whole, rank) for rank in range(3)] == [both, both, both]
        assert await held.parts.is_reachable(whole)
        assert held.memory.reached == [[both, both]]
        assert held.memory.waited_s == [3 + 4], "each worker fetches both parts"
        held.parts.close()

    asyncio.run(scenario())


def test_each_rank_gets_its_own_part_of_unsharded_checkpoint() -> None:
    async def scenario() -> None:
        held = Held()
        for rank in range(2):
            held.parts.intercept(rank, 2, saved(0, all_ranks=True))
            held.parts.intercept(rank, 2, e.PartHeld(0, 10))
            await held.put(rank, f"ref{rank}")
        whole = manifest(5, all_ranks=True)
        assert [parts_of(held, whole, rank) for rank in range(2)] == [{0: "ref0"}, {1: "ref1"}]
        assert await held.parts.is_reachable(whole)
        assert held.memory.reached == [[{0: "ref0"}, {1: "ref1"}]]
        assert await held.parts.is_reachable(whole, is_unstored=True)
        stored_too, alone = held.memory.waited_s
        assert stored_too < 4 and alone > 10, (
            "the wait for an unstored checkpoint lasts until Ray has asked another node"
        )
        held.parts.close()

    asyncio.run(scenario())


def test_next_attempt_keeps_only_the_checkpoint_it_resumes_from() -> None:
    async def scenario() -> None:
        held = Held()
        held.parts.intercept(0, 2, saved(0))
        held.parts.intercept(0, 2, e.PartHeld(0, 10))
        await held.put(0, "ref0")
        held.parts.begin_attempt(3, 6, {5})
        assert parts_of(held, manifest(5), rank=0) == {0: "ref0"}
        assert not held.parts.intercept(0, 2, e.PartHeld(1, 10)), "the machine ignores events of a previous attempt"
        held.parts.begin_attempt(4, 7, ())
        assert not await held.parts.is_reachable(manifest(5))

    asyncio.run(scenario())


def test_order_of_a_rank_has_its_own_state_and_the_shared_positions_alone() -> None:
    async def scenario() -> None:
        held = Held()
        for rank in range(3):
            assert not held.parts.intercept(rank, 2, saved(0, all_ranks=True))
            await held.put(rank, f"ref{rank}")
            assert held.parts.intercept(rank, 2, e.PartHeld(0, 10))
        states = {rank: {"generators": rank, "data": {"train": 7}} for rank in range(3)}
        whole = manifest(5, world_size=3, all_ranks=True, rank_states=states)
        orders = [held.parts.for_rank(whole, rank) for rank in range(4)]
        assert [None if order is None else order.manifest.rank_states for order in orders] == [
            {0: states[0]},
            {0: {"data": {"train": 7}}, 1: states[1]},
            {0: {"data": {"train": 7}}, 2: states[2]},
            {0: {"data": {"train": 7}}},
        ]

    asyncio.run(scenario())


def test_end_of_event_stream_waits_for_announced_parts() -> None:
    async def scenario() -> None:
        held = Held()
        await held.parts.settle(0)
        held.parts.intercept(0, 2, saved(0))
        held.parts.intercept(0, 2, e.PartHeld(0, 10))
        settling = asyncio.ensure_future(held.parts.settle(0))
        await turn_loop()
        assert not settling.done()
        await held.put(0, "ref0")
        await settling
        assert len(held.fed) == 1
        held.parts.close()

    asyncio.run(scenario())


# -- copies of live states ------------------------------------------------------------------------------------------------


def copy_step(
    run: SimulatedRun,
    step: int,
    made: int,
    *,
    attempt: int = 1,
    ranks: Sequence[int] = (0, 1),
    digest: str | None = None,
) -> None:
    """Copy a live state after a step, on some ranks, when each of them has made some reports."""
    call = e.StepId(attempt, step).copy_call
    for rank in ranks:
        given = e.Saved(call, made, float(made), True, False, False, None)
        run.deliver(rank, given, e.PartHeld(call, 10, {"n": rank}, digest))


def marked(step: int) -> e.Marked:
    return e.Marked((e.Mark(step, b"{}"),))


def test_run_continues_from_the_newest_complete_copy_of_a_live_state() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    copy_step(run, 10, 1)
    copy_step(run, 20, 2)
    copy_step(run, 30, 3, ranks=[0])  # rank 1 dies before its part is there
    run.deliver(1, marked(33))
    kill(run)
    run.ready()
    entered = run.entries[-1]
    assert entered.start.held is not None and e.StepId.of_copy(entered.start.held.number) == (1, 20)
    assert (entered.start.iteration, entered.first_number) == (2, 1), "a copy takes no number of a checkpoint"
    begun = run.events("attempt_start")[-1]
    assert (begun["checkpoint"], begun["memory"], begun["live"]) == (None, None, [1, 20])
    for rank in range(2):
        run.deliver(rank, e.Entered(0.0))
    (continued,) = run.events("continued")
    assert continued["num_repeated"] == 13
    assert "from memory copies, 13 steps repeated, nothing read from storage" in continued["why"]
    assert not [each for each in run.events("warning") if "live state" in each["message"]]


def test_later_checkpoint_is_preferred_to_a_copy() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    copy_step(run, 10, 1)
    run.deliver(0, e.Saved(0, 2, 2.0, False, False, False, None), e.PartHeld(0, 10))
    run.deliver(1, e.Saved(0, 2, 2.0, False, False, False, None), part(0))
    kill(run)
    run.ready()
    assert run.entries[-1].start.held is not None and run.entries[-1].start.held.number == 1


def test_copy_is_used_again_until_a_newer_one_is_complete() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    copy_step(run, 10, 1)
    kill(run)
    run.ready()
    copy_step(run, 1, 2, attempt=2, ranks=[0])
    kill(run)
    run.ready()
    assert run.events("attempt_start")[-1]["live"] == [1, 10]
    copy_step(run, 1, 2, attempt=3)
    kill(run)
    run.ready()
    assert run.events("attempt_start")[-1]["live"] == [3, 1]


def test_copy_that_is_lost_or_unusable_is_replaced_by_a_checkpoint() -> None:
    run = running(checkpoint_config=MEMORY_ALONE)
    hold(run)
    for step in (10, 20):
        copy_step(run, step, step)
        kill(run)
        if step == 10:
            run.feed(c.MemoryCopyLost(e.StepId(1, 10).copy_call))
        run.ready()
        if step == 20:
            run.deliver(1, e.StartUnusable("damaged"))
            for rank in range(2):
                run.leave(rank, e.Ended())
            run.ready()
        assert run.events("attempt_start")[-1]["memory"] == 1
    assert [each["message"] for each in run.events("warning")][-2:] == [
        "the memory copy of step 10 is no longer in the cluster's memory",
        "the memory copy of step 20 skipped: damaged",
    ]


def test_copies_and_checkpoints_do_not_replace_each_other_in_memory() -> None:
    async def scenario() -> None:
        held = Held()
        calls = [0, e.StepId(2, 7).copy_call, 1, e.StepId(2, 8).copy_call]
        for call in calls:
            held.parts.intercept(0, 2, saved(call))
            held.parts.intercept(0, 2, e.PartHeld(call, 10))
            await held.put(0, f"ref{call}")
            held.parts.keep(5 + call if call < 2 else call)
        assert sorted(parts[0] for parts in held.memory.copied[-1]) == sorted(["ref1", f"ref{calls[3]}"])
        assert parts_of(held, manifest(6), 0) and parts_of(held, manifest(calls[3]), 0)
        held.parts.close()

    asyncio.run(scenario())

"""Checkpoints in the cluster's memory: which is gone on from, when it is written to storage, and how its parts arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from raysgd.checkpoint.manifest import FileEntry, Manifest
from raysgd.config import CheckpointConfig
from raysgd.controller import commands as c
from raysgd.controller.held import HeldParts
from raysgd.session import events as e
from raysgd.testing.simulation import SimulatedRun, failed, finish, kill, part, reports, running, saved, uri_of

MEMORY_ALONE = CheckpointConfig(memory_only_between=100)


def hold(run: SimulatedRun, call: int = 0, made: int = 1, **flags: Any) -> None:
    """All ranks save; rank 0's state, or everybody's, is taken into memory."""
    for rank in range(run.num_ranks):
        gives = rank == 0 or flags.get("all_ranks", False)
        run.say(rank, saved(call, made, **flags), e.PartHeld(call, 10, {"n": rank}) if gives else part(call))


def store(run: SimulatedRun) -> None:
    """What was to be written from memory is written."""
    for command in run.all_of(c.StoreHeld):
        run.feed(c.HeldStored(command.manifest))
    run.commit()


def test_a_run_goes_on_from_what_is_in_memory() -> None:
    run = running(checkpoint=MEMORY_ALONE)
    hold(run, 0, 1)
    hold(run, 1, 2)
    assert run.all_of(c.Hold) == [c.Hold(1), c.Hold(2)]
    assert run.all_of(c.Commit) == []
    kill(run)
    run.ready()
    entered = run.entries[-1]
    assert entered.held is not None and (entered.held.number, entered.checkpoint) == (2, None)
    assert (entered.iterations_before, entered.first_number) == (2, 3)
    assert entered.held.rank_states == {0: {"n": 0}, 1: {}}
    assert run.notes("attempt_start")[-1]["memory"] == 2


def test_what_only_some_ranks_saved_is_not_gone_on_from() -> None:
    run = running(checkpoint=MEMORY_ALONE)
    run.say(0, saved(0), e.PartHeld(0, 10))
    kill(run)
    run.ready()
    assert run.entries[-1].held is None


def test_the_newer_one_is_gone_on_from() -> None:
    run = running()
    run.save()  # on storage, and the memory did not take it
    run.commit()
    hold(run, 1, 2)
    kill(run)
    run.ready()
    assert run.entries[-1].held is not None and run.entries[-1].iterations_before == 2

    run.say(0, e.HoldFailed(0, "full"))
    run.save(0, 1)
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[-1].held is None and run.entries[-1].checkpoint == uri_of(3)


def test_one_that_is_in_both_is_read_from_memory_first() -> None:
    run = running()
    hold(run)
    run.say(0, part(0, "file"))
    run.commit()
    kill(run)
    run.ready()
    assert run.entries[-1].held is not None and run.entries[-1].checkpoint == uri_of(1)


def test_one_that_no_node_has_any_more_is_not() -> None:
    run = running()
    run.save()
    run.commit()
    hold(run, 1, 2)
    kill(run)
    run.feed(c.HeldLost(2))
    run.ready()
    assert (run.entries[-1].held, run.entries[-1].checkpoint) == (None, uri_of(1))
    assert "no longer in the cluster's memory" in run.notes("warning")[-1]["message"]


def test_one_that_is_lost_while_it_is_read_is_passed_over() -> None:
    run = running()
    run.save()
    run.commit()
    hold(run, 1, 2)
    kill(run)
    run.ready()
    run.say(1, e.StartUnusable("checkpoint 2 is in memory no more"))
    for rank in range(2):
        run.leave(rank, e.Ended())
    run.ready()
    assert (run.entries[-1].held, run.entries[-1].checkpoint) == (None, uri_of(1))


def test_one_that_its_worker_could_not_write_is_written_from_memory() -> None:
    run = running()
    hold(run)
    kill(run)  # before its bytes were safe
    run.ready()
    (command,) = run.all_of(c.StoreHeld)
    assert command.manifest.number == 1
    run.feed(c.HeldStored(command.manifest))
    run.commit()
    told = run.said("checkpoint")[-1].data
    assert (told["number"], told["from_memory"]) == (1, True)
    kill(run)
    run.ready()
    assert len(run.all_of(c.StoreHeld)) == 1, "it is there"


def test_what_its_worker_still_writes_is_not_written_from_memory_too() -> None:
    run = running()
    hold(run)
    run.say(1, failed())
    run.gone(1)
    run.advance(1)
    assert run.outcome is not None and run.all_of(c.StoreHeld) == []
    run.say(0, part(0, "file"), e.Ended())
    run.gone(0)
    run.commit()
    assert run.is_closed and run.all_of(c.StoreHeld) == []
    assert [say.data["number"] for say in run.said("checkpoint")] == [1]


def test_the_number_of_one_that_may_still_be_written_is_not_given_again() -> None:
    run = running()
    hold(run)
    kill(run)
    run.ready()  # goes on from it, while it is being written
    kill(run)
    run.feed(c.HeldLost(1))
    run.ready()
    assert run.entries[-1].held is None and run.entries[-1].first_number == 2


def test_what_was_for_memory_alone_is_written_at_the_end() -> None:
    run = running(checkpoint=MEMORY_ALONE)
    hold(run)
    finish(run)
    assert not run.is_closed and run.outcome is None, "it is told to be done when all is durable"
    store(run)
    assert run.is_closed and run.outcome is not None and run.outcome.kind == "done"


def test_an_end_without_a_place_to_write_to_is_an_end() -> None:
    run = running(checkpoint=MEMORY_ALONE)
    hold(run)
    finish(run)
    run.feed(c.HeldNotStored(1, "OSError: disk full"))
    assert run.is_closed and run.outcome is not None and run.outcome.kind == "done"
    assert "in memory alone and could not be written to storage: OSError" in run.notes("warning")[-1]["message"]


def test_a_checkpoint_in_memory_belongs_to_the_round_after_it_once() -> None:
    run = running(checkpoint=MEMORY_ALONE)
    hold(run, 0, 0)  # a loop that saves first
    for rank in range(2):
        run.say(rank, reports(0), e.Scored(0, b'{"loss": 1}'))
    finish(run)
    store(run)
    assert run.said("checkpoint")[-1].data["iteration"] == 1


def test_parts_of_all_ranks_bind_the_group_to_its_size() -> None:
    run = running(checkpoint=MEMORY_ALONE)
    hold(run, all_ranks=True)
    kill(run)
    assert run.all_of(c.PrepareGroup)[-1].keep_size


def test_memory_can_be_left_out() -> None:
    run = running(checkpoint=CheckpointConfig(keep_in_memory=False))
    hold(run)
    assert run.all_of(c.Hold) == []


# ------------------------------------------------------------------------------------------------------ the references


class Memory:
    """Workers whose payloads are put by hand."""

    def __init__(self) -> None:
        self.queues: dict[int, asyncio.Queue[Any]] = {}
        self.copied: list[dict[int, Any]] = []
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

    def copy(self, parts: Mapping[int, Any]) -> None:
        self.copied.append(dict(parts))


def manifest(number: int, **flags: Any) -> Manifest:
    fields: dict[str, Any] = {
        "attempt": 1,
        "iteration": 1,
        "time_total_s": 0.0,
        "world_size": 2,
        "metrics": {},
        "all_ranks": False,
        "is_files": False,
        "trusted": False,
        "created_s": 0.0,
        "parts": {},
        "rank_states": {},
        **flags,
    }
    return Manifest(number=number, **fields)


class Held:
    """`HeldParts` of an attempt whose first checkpoint is number 5, and what it fed to the machine."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.fed: list[tuple[int, int, e.WorkerEvent]] = []
        self.parts = HeldParts(self.memory, uri_of, lambda *said: self.fed.append(said))
        self.parts.begin(2, 5, None)

    async def put(self, rank: int, payload: Any) -> None:
        self.memory.queues.setdefault(rank, asyncio.Queue()).put_nowait(payload)
        await asyncio.sleep(0.01)


def parts_of(held: Held, checkpoint: Manifest, rank: int) -> dict[int, Any]:
    found = held.parts.of(checkpoint, rank)
    assert found is not None
    return dict(found.parts)


def test_a_part_is_told_when_its_reference_is_here_whichever_comes_first() -> None:
    async def scenario() -> None:
        held = Held()
        assert not held.parts.said(0, 2, saved(0))
        assert held.parts.said(0, 2, e.PartHeld(0, 10))
        assert held.fed == []
        await held.put(0, "ref0")
        await held.put(0, "ref1")
        assert held.parts.said(0, 2, e.PartHeld(1, 10))
        assert [(rank, attempt, event.call) for rank, attempt, event in held.fed] == [(0, 2, 0), (0, 2, 1)]  # type: ignore[union-attr]
        assert parts_of(held, manifest(6), rank=1) == {0: "ref1"}
        assert await held.parts.store(manifest(5)) == {0: [FileEntry("a0001-r00000", 1, 1)]}
        assert held.memory.stored == [(0, "ref0", uri_of(5), "a0001-r00000")]
        held.parts.forget_before(6)
        with pytest.raises(LookupError):
            await held.parts.store(manifest(5))
        held.parts.close()
        assert held.memory.copied == [{}], "second copies are let go as well"

    asyncio.run(scenario())


def test_every_rank_gets_all_parts_that_have_pieces_of_arrays() -> None:
    async def scenario() -> None:
        held = Held()
        for rank in range(2):
            held.parts.said(rank, 2, saved(0, all_ranks=True))
            held.parts.said(rank, 2, e.PartHeld(0, 100_000_000, beside=str(rank)))
            await held.put(rank, f"ref{rank}")
        whole = manifest(5, all_ranks=True)
        every = {0: "ref0", 1: "ref1"}
        assert [parts_of(held, whole, rank) for rank in range(3)] == [every, every, every]
        assert await held.parts.is_reachable(whole)
        assert held.memory.reached == [[every, every]]
        assert held.memory.waited_s == [3 + 4], "each worker fetches both"
        held.parts.close()

    asyncio.run(scenario())


def test_each_rank_gets_its_own_part_of_one_that_all_saved() -> None:
    async def scenario() -> None:
        held = Held()
        for rank in range(2):
            held.parts.said(rank, 2, saved(0, all_ranks=True))
            held.parts.said(rank, 2, e.PartHeld(0, 10))
            await held.put(rank, f"ref{rank}")
        whole = manifest(5, all_ranks=True)
        assert [parts_of(held, whole, rank) for rank in range(2)] == [{0: "ref0"}, {1: "ref1"}]
        assert await held.parts.is_reachable(whole)
        assert held.memory.reached == [[{0: "ref0"}, {1: "ref1"}]]
        assert await held.parts.is_reachable(whole, is_alone=True)
        stored_too, alone = held.memory.waited_s
        assert stored_too < 4 and alone > 10, "what is on no storage is waited for until Ray has asked another node"
        held.parts.close()

    asyncio.run(scenario())


def test_the_next_attempt_keeps_what_it_goes_on_from_and_hears_no_more_of_the_last() -> None:
    async def scenario() -> None:
        held = Held()
        held.parts.said(0, 2, saved(0))
        held.parts.said(0, 2, e.PartHeld(0, 10))
        await held.put(0, "ref0")
        held.parts.begin(3, 6, manifest(5))
        assert parts_of(held, manifest(5), rank=0) == {0: "ref0"}
        assert not held.parts.said(0, 2, e.PartHeld(1, 10)), "of an older attempt: the machine refuses it"
        held.parts.begin(4, 7, None)
        assert not await held.parts.is_reachable(manifest(5))

    asyncio.run(scenario())


def test_the_end_of_a_stream_waits_for_the_parts_that_were_told_of() -> None:
    async def scenario() -> None:
        held = Held()
        await held.parts.settle(0)
        held.parts.said(0, 2, saved(0))
        held.parts.said(0, 2, e.PartHeld(0, 10))
        settling = asyncio.ensure_future(held.parts.settle(0))
        await asyncio.sleep(0.01)
        assert not settling.done()
        await held.put(0, "ref0")
        await settling
        assert len(held.fed) == 1
        held.parts.close()

    asyncio.run(scenario())

"""With a thousand ranks, what the controller does for a rank or a report does not depend on their number.

The bounds are CPU seconds, several times what is needed. Comparing all ranks at each event would take ten times as long.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raysgd.backends.flight_recorder import Collective
from raysgd.config import CheckpointConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.policies.mismatch import MismatchPolicy
from raysgd.controller.policies.straggler import StragglerPolicy
from raysgd.controller.rounds import RoundCount, RoundMerger
from raysgd.workers.group.ranks import assign_visible_gpus
from raysgd.workers.orders import Position, WorkerInfo
from support.simulation import SimulatedRun, part, running, saved

#: Promised numbers, written out.
WARN_AFTER_S = 30.0
WINDOW_STEPS = 20

RANKS = 1000


@contextmanager
def within_cpu_s(limit_s: float) -> Iterator[None]:
    gc.disable()  # a collection looks at the objects of all modules
    try:
        begun = time.thread_time()
        yield
        assert time.thread_time() - begun < limit_s
    finally:
        gc.enable()


def test_save_of_all_ranks_is_committed() -> None:
    run = running(RANKS, checkpoint_config=CheckpointConfig(num_to_keep=2))
    with within_cpu_s(1.0):
        for rank in range(RANKS):
            run.deliver(rank, saved(0, all_ranks=True))
        for rank in range(RANKS):
            run.deliver(rank, part(0, f"r{rank}", consumed=50))
    assert [len(commit.manifest.parts) for commit in run.all_of(c.CommitCheckpoint)] == [RANKS]


def test_all_ranks_return_while_a_save_is_being_written() -> None:
    run = running(RANKS)
    with within_cpu_s(1.0):
        for rank in range(RANKS):
            run.deliver(rank, saved(0))
        for rank in range(RANKS):
            run.deliver(rank, part(0))
            run.leave(rank)
    run.commit()
    assert run.is_closed


def test_rounds_are_merged() -> None:
    merger = RoundMerger()
    attempt = {"world_size": RANKS, "iterations_before": 0, "time_before_s": 0.0}
    list(merger.feed(Frame(0, frames.ATTEMPT, 1, data=attempt)))
    made = []
    with within_cpu_s(1.0):
        for number in range(5):
            rows = json.dumps([[float(number), float(number), {"n": number}]]).encode()
            for rank in range(RANKS):
                data = {"first": number, "count": 1}
                made += merger.feed(Frame(0, frames.REPORTS, 1, rank, data, rows))
    assert [(result["n"], len(result.workers)) for result in made] == [(number, RANKS) for number in range(5)]


def test_ranks_that_are_done_are_counted() -> None:
    count = RoundCount()
    count.feed(Frame(0, frames.ATTEMPT, 1, data={"world_size": RANKS, "iterations_before": 0}))
    with within_cpu_s(0.1):
        for rank in range(RANKS):
            count.feed(Frame(0, frames.REPORTS, 1, rank, {"first": 0, "count": 1 + rank % 2}))
        assert count.iteration == 1
        for rank in range(0, RANKS, 2):
            count.feed(Frame(0, frames.RANK_DONE, 1, rank))
        assert count.iteration == 2


def test_paces_are_compared() -> None:
    policy = StragglerPolicy(0.0, {})
    for steps in (1, 1 + WINDOW_STEPS):
        for rank in range(RANKS):
            uses = {"training": steps * (0.5 + rank / 1e6), "waiting": steps * 0.5}
            policy.on_sample({"rank": rank, "steps": steps, "uses": uses}, 5.0)
    with within_cpu_s(0.3):
        assert policy.find_stragglers(10.0) == []


def test_ranks_that_wait_for_one_are_found() -> None:
    policy = MismatchPolicy(None, range(RANKS))
    waiting = Collective("default_pg", 7, "gloo:all_reduce", (), False)
    for rank in range(RANKS):
        is_late = rank == 5
        done = Collective("default_pg", 6, "gloo:all_reduce", (), True)
        waits_s = 0.0 if is_late else 2 * WARN_AFTER_S
        policy.on_position(rank, Position((done if is_late else waiting,), waits_s, waits_s), 100.0)
    with within_cpu_s(0.2):
        mismatch = policy.find_mismatch(100.0)
    assert mismatch is not None and "rank 5 is missing" in mismatch.why


def test_gpus_of_each_node_are_shown() -> None:
    workers = [WorkerInfo(f"node{rank // 8}", "10.0.0.1", "node", rank, (rank % 8,)) for rank in range(RANKS)]
    with within_cpu_s(0.1):
        assigned = assign_visible_gpus(workers, shows_all=True)
    assert assigned[11] == (tuple(range(8)), 3)


@pytest.mark.parametrize("all_ranks", [False, True])
def test_manifests_of_older_checkpoints_are_forgotten(all_ranks: bool) -> None:
    run: SimulatedRun = running(4)
    for call in range(5):
        for rank in range(4):
            run.deliver(rank, saved(call, call + 1, all_ranks=all_ranks), part(call, f"r{rank}", consumed=call))
        run.commit()
    assert [bool(manifest.rank_states) for manifest in run.machine.checkpoints.stored] == [False] * 4 + [True]

"""A planned fault is due at its place, happens once, and is recorded. No fault happens in these tests."""

from __future__ import annotations

import inspect
import os
import pickle
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import ConfigError
from raysgd.testing import (
    BitFlip,
    DiskFull,
    Exit,
    Fault,
    FaultPlan,
    Hang,
    Kill,
    KillDriver,
    NetworkCut,
    Raise,
    RemoveNode,
    Slow,
    Stop,
    StorageFault,
    TornWrite,
    faulty_files,
)
from raysgd.testing.faults import CHECKPOINT_PHASES, PHASES, Moment
from raysgd.testing.faulty_files import FaultyStore
from raysgd.testing.injection import claim

KINDS = [Kill, Stop, Exit, Hang, Raise, Slow, NetworkCut, StorageFault, DiskFull, TornWrite, BitFlip, KillDriver]


# ------------------------------------------------------------------------------------------------------ places


@given(
    phase=st.sampled_from(PHASES),
    at=st.sampled_from(PHASES),
    step=st.integers(0, 4),
    now=st.integers(0, 4),
    checkpoint=st.integers(0, 2),
    number=st.integers(0, 2),
)
def test_fault_is_due_in_its_phase_at_or_after_its_place(
    phase: str, at: str, step: int, now: int, checkpoint: int, number: int
) -> None:
    checkpoint = checkpoint if phase in CHECKPOINT_PHASES else 0
    fault = Kill(step=step, phase=phase, checkpoint=checkpoint)
    is_due = fault.is_due(Moment(at, now, number))
    assert is_due == (phase == at and now >= step and number >= checkpoint)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kill(rank=-1), "Kill(rank)=-1 is too small"),
        (lambda: Kill(step=1.5), "Kill(step)=1.5 is a float"),
        (lambda: Kill(phase="saving"), "Kill(phase)='saving' is not known; give one of 'start', 'report'"),
        (
            lambda: Kill(checkpoint=1),
            "Kill(checkpoint=1) happens in the phase 'report', which belongs to no checkpoint",
        ),
        (lambda: Raise(phase="write"), "Raise(phase)='write' is not known"),
        (lambda: Exit(phase="written", hard=False), "cannot happen in the thread that writes checkpoints"),
        (lambda: Slow(steps=0), "Slow(steps)=0 is too small"),
        (lambda: DiskFull(for_s=0), "DiskFull(for_s)=0 is out of range"),
        (lambda: TornWrite(phase="write"), "give one of 'written', 'committed'"),
        (lambda: FaultPlan([Kill]), "give faults such as Kill(rank=1, step=3)"),
        (
            lambda: FaultPlan.random(1, ranks=2, steps=2, count=5),
            "FaultPlan.random(count=5) exceeds 2 ranks times 2 steps",
        ),
        (
            lambda: FaultPlan.random(1, ranks=2, steps=2, kinds=[RemoveNode]),
            "of fault classes that happen in workers",
        ),
    ],
)
def test_impossible_fault_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_repr_shows_the_given_arguments() -> None:
    assert repr(Kill(rank=1, step=3)) == "Kill(rank=1, step=3)"
    assert repr(DiskFull(checkpoint=1, times=2)) == "DiskFull(checkpoint=1, times=2)"
    assert repr(Raise(error=ValueError("mine"))) == "Raise(error=ValueError('mine'))"
    for kind in KINDS:
        assert repr(kind()) == f"{kind.__name__}()"
        assert repr(pickle.loads(pickle.dumps(kind(step=2)))) == f"{kind.__name__}(step=2)"


# ------------------------------------------------------------------------------------------------------ once


def test_only_one_of_many_processes_can_claim_a_fault(tmp_path: Path) -> None:
    claimed: list[bool] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        claimed.append(claim(str(tmp_path), 1, 2))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [False] * 7 + [True]
    (fired,) = FaultPlan([Kill(), Stop()], folder=tmp_path).fired
    assert (fired.fault, fired.attempt, fired.pid) == (Stop(), 2, os.getpid())
    assert len(os.listdir(tmp_path)) == 1, "a temporary file is left"


def test_plan_lists_fired_and_unfired_faults(tmp_path: Path) -> None:
    plan = FaultPlan([Kill(rank=1), Stop()], seed=5, folder=tmp_path)
    assert plan.fired == [] and plan.unfired == [Kill(rank=1), Stop()]
    claim(str(tmp_path), 1, 4)
    (fired,) = plan.fired
    assert (fired.fault, fired.attempt) == (Stop(), 4)
    with pytest.raises(AssertionError, match=r"1 of 2 faults did not happen: \[Kill\(rank=1\)\].*seed=5"):
        plan.assert_all_fired()
    claim(str(tmp_path), 0, 5)
    plan.assert_all_fired()
    assert [fired.fault for fired in plan.fired] == [Stop(), Kill(rank=1)]


def test_pickled_plan_shares_its_records(tmp_path: Path) -> None:
    plan = FaultPlan([Kill(), Stop()], folder=tmp_path)
    copy = pickle.loads(pickle.dumps(plan))
    claim(str(tmp_path), 1, 1)
    assert copy.unfired == plan.unfired == [Kill()]
    assert repr(copy) == repr(plan)


def test_temporary_folder_is_removed_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = FaultPlan([Kill()])
    assert len(os.listdir(tmp_path)) == 1
    del plan
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ random plans


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), steps=st.integers(1, 10), data=st.data())
def test_random_plan_is_reproducible(seed: int, ranks: int, steps: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, ranks * steps))
    kinds: list[type[Fault]] = [Kill, Stop, DiskFull]
    plan = FaultPlan.random(seed, ranks=ranks, steps=steps, kinds=kinds, count=count)
    again = FaultPlan.random(seed, ranks=ranks, steps=steps, kinds=kinds, count=count)
    assert plan.faults == again.faults and repr(plan) == repr(again)
    assert f"seed={seed}" in repr(plan)
    assert len(plan.faults) == count
    assert [fault.step for fault in plan.faults] == sorted(fault.step for fault in plan.faults)
    for fault in plan.faults:
        assert type(fault) in kinds and 0 <= fault.rank < ranks and 1 <= fault.step <= steps
        assert fault.rank == 0 or not fault.needs_state


def test_random_plans_differ() -> None:
    plans = {FaultPlan.random(seed, ranks=4, steps=50).faults for seed in range(20)}
    assert len(plans) > 15


# ------------------------------------------------------------------------------------------------------ wrapped functions


def test_wrapped_function_behaves_like_the_original_outside_of_workers() -> None:
    def train_func(config: dict[str, Any]) -> Any:
        """Trains."""
        return config["value"]

    plan = FaultPlan([Kill(phase="start"), RemoveNode(remove=threading.Lock().acquire)])
    wrapped = plan.wrap(train_func)
    assert inspect.signature(wrapped) == inspect.signature(train_func)
    assert (wrapped.__name__, wrapped.__doc__) == ("train_func", "Trains.")
    assert wrapped({"value": 5}) == 5
    assert plan.fired == []


def test_driver_faults_are_not_sent_to_workers() -> None:
    plan = FaultPlan([RemoveNode(remove=threading.Lock().acquire), Kill(rank=1)])  # a lock does not pickle
    copy = pickle.loads(pickle.dumps(plan.wrap(os.getpid)))
    assert copy() == os.getpid()


def test_driver_faults_happen_when_their_result_arrives() -> None:
    calls: list[int] = []
    plan = FaultPlan([RemoveNode(step=3, remove=lambda: calls.append(3)), RemoveNode(remove=lambda: calls.append(0))])
    callback = plan.driver_callback()
    seen = []
    for iteration in (1, 2, 4, 5):
        callback.on_result({"training_iteration": iteration, "attempt": 2})  # type: ignore[arg-type]
        seen.append(list(calls))
    assert seen == [[0], [0], [0, 3], [0, 3]]
    plan.assert_all_fired()
    assert [fired.attempt for fired in plan.fired] == [2, 2]


# ------------------------------------------------------------------------------------------------------ storage


def test_writes_fail_and_are_delayed_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.checkpoint.store import CheckpointStore
    from raysgd.errors import StorageError

    reached: list[tuple[str, int]] = []
    store = FaultyStore(CheckpointStore(Storage.from_uri(tmp_path)), lambda *where: reached.append(where))
    folder = store.directory(4)
    data = bytes(range(100))
    assert folder.write_bytes("a", data)[0] == 100
    assert folder.read_bytes("a") == data
    assert reached == [("write", 4), ("half_written", 4)]

    full = DiskFull()
    store.fail(full.error, 2, None)
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left on device"):
            folder.write_bytes("b", data)
    folder.write_bytes("b", data)
    assert not [name for name in os.listdir(tmp_path / "checkpoint_000004") if name not in ("a", "b")]

    store.fail(StorageFault().error, 2, None)  # a transient error, which is retried
    folder.write_bytes("c", data)
    assert [phase for phase, _ in reached].count("write") == 7

    store.fail(full.error, 1, 3600.0)
    for _ in range(3):
        with pytest.raises(StorageError):
            folder.write_bytes("d", data)

    store = FaultyStore(CheckpointStore(Storage.from_uri(tmp_path)), lambda *where: None)
    store.slow_down(0.5, 2)
    slept: list[float] = []
    monkeypatch.setattr(faulty_files, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    for _ in range(3):
        store.directory(4).write_bytes("e", data)
    assert [each for each in slept if each] == [0.5, 0.5]

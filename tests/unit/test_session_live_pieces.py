"""Which ranks hold the same piece of a state, and how often pieces that no other rank holds are copied to memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from raysgd.checkpoint.codecs.torch import LocalShards
from raysgd.checkpoint.streaming import read_state, stream_state
from raysgd.errors import AttemptEnded, CheckpointError, SessionError, UsageError
from raysgd.session.events import Saved, StepId, is_copy
from raysgd.session.live.agreement import Agreement, decide
from raysgd.session.live.copies import MAX_FRACTION, MIN_INTERVAL_S, CopyInterval
from raysgd.session.live.kept import KeptState
from raysgd.session.live.pieces import are_replicated, describe_piece, number_pieces
from raysgd.session.live.state import LiveState
from raysgd.torch.restoring import restore
from support.sessions import Worker

pytestmark = pytest.mark.usefixtures("closed_live_states")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_pieces_are_named_by_the_first_rank_that_holds_them(held: list[int]) -> None:
    pieces = number_pieces([bytes([each]) for each in held])
    assert pieces == (() if len(set(held)) == 1 else tuple(held.index(each) for each in held))
    assert are_replicated(pieces) == (len(set(held)) == 1 or all(held.count(each) > 1 for each in held))


def test_ranks_with_equal_tensors_hold_the_same_piece() -> None:
    tensors = {"weight": torch.arange(100.0), "scale": torch.tensor(2.0, dtype=torch.bfloat16), "none": torch.empty(0)}
    same = describe_piece(copy.deepcopy(tensors).items())
    assert describe_piece(tensors.items()) == same
    others: list[dict[str, Any]] = [
        {**tensors, "weight": torch.arange(100.0) + 1},
        {**tensors, "weight": torch.arange(100.0).reshape(10, 10)},
        {**tensors, "scale": torch.tensor(2.0)},
        {"other": tensors["weight"], "scale": tensors["scale"], "none": tensors["none"]},
        {key: tensors[key] for key in ("weight", "scale")},
    ]
    assert same not in [describe_piece(other.items()) for other in others]


@given(st.floats(0.0001, 2.0), st.floats(0.0005, 1.0), st.lists(st.floats(0.5, 1.0), min_size=2, max_size=4))
def test_copies_cost_at_most_their_part_of_the_time(copy_s: float, step_s: float, ranks: list[float]) -> None:
    """Each rank measures its own times, and all copy after the same steps."""
    intervals = [CopyInterval() for _ in ranks]
    now = [0.0] * len(ranks)
    copied, step = [], 0
    while len(copied) < 4:
        step += 1
        now = [each + step_s for each in now]
        due = {interval.is_due(step) for interval in intervals}
        assert len(due) == 1
        if due == {True}:
            took = [copy_s * each for each in ranks]
            times = [
                interval.measure(step, began, began + seconds)
                for interval, began, seconds in zip(intervals, now, took, strict=True)
            ]
            now = [each + seconds for each, seconds in zip(now, took, strict=True)]
            for interval in intervals:
                interval.on_copied(step, times)
            copied.append(step)
    assert copied[0] == 1
    num_steps = copied[3] - copied[2]
    assert copy_s * max(ranks) <= MAX_FRACTION * num_steps * step_s * (1 + 1e-6)
    needed_s = max(copy_s * max(ranks) / MAX_FRACTION, MIN_INTERVAL_S)
    assert num_steps == 1 or (num_steps - 1) * step_s <= needed_s * (1 + 1e-6), "too seldom"


class Rank:
    """Rank 0, which holds the same piece as each second rank, and as all others or not; the state is plain tensors."""

    def __init__(self, *, is_same: bool, is_held: bool = True, world_size: int = 2, **given: Any) -> None:
        def gather(payload: bytes) -> list[bytes]:
            value = pickle.loads(payload)
            other = payload if is_same or not isinstance(value, bytes) else pickle.dumps(b"other")
            return [payload, other] * (world_size // 2)

        worker = Worker(world_size=world_size, attempt=2, gather=gather, **given)
        self.session, self.writer, self.event_queue = worker.session, worker.writer, worker.event_queue
        self.writer.is_held = is_held  # type: ignore[attr-defined]
        self.model = torch.nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.live: LiveState = self.session.live_state({"model": self.model, "optimizer": self.optimizer})

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.model(torch.randn(4, 3)).square().sum().backward()
            self.optimizer.step()
            self.live.step(step=self.live.num_steps + 1)


def test_state_that_all_ranks_hold_is_not_copied() -> None:
    rank = Rank(is_same=True)
    rank.step(20)
    assert rank.writer.calls == []
    kept = rank.live.take()
    assert kept is not None and (kept.held.piece, kept.held.pieces) == (0, ())


def test_piece_that_no_other_rank_holds_is_copied_to_memory() -> None:
    rank = Rank(is_same=False)
    rank.step(3)
    ((_, call, (state, allow_pickle)),) = rank.writer.calls
    assert is_copy(call) and StepId.of_copy(call) == (2, 1) and not allow_pickle
    assert state.keys() == {"model", "optimizer", "step"}
    (saved,) = [event for event in rank.event_queue.drain(0) if isinstance(event, Saved)]
    assert (saved.call, saved.all_ranks) == (call, True)
    kept = rank.live.take()
    assert kept is not None and (kept.held.piece, kept.held.pieces) == (0, (0, 1))


def test_piece_that_no_other_rank_holds_is_refused_if_nothing_is_kept_in_memory() -> None:
    with pytest.raises(UsageError, match="keep_in_memory=True"):
        Rank(is_same=False, is_held=False).step()


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_survive_their_mesh_and_a_transfer(mesh: Any) -> None:
    class Sharded(torch.nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(DTensor.from_local(value, mesh, [Shard(0)]))

    old, new = Sharded(torch.arange(12.0).reshape(4, 3)), Sharded(torch.zeros(4, 3))
    kept = KeptState(None, {"model": old.state_dict(keep_vars=True)})  # type: ignore[arg-type]
    sent = read_state(io.BytesIO(b"".join(map(bytes, stream_state(kept.state)))), "x")
    assert isinstance(sent["model"]["weight"], LocalShards)
    restore(sent, into={"model": new})
    assert torch.equal(new.weight.full_tensor(), old.weight.full_tensor())
    assert kept.is_unchanged
    with torch.no_grad():
        old.weight.add_(1)
    assert not kept.is_unchanged


def test_shards_are_loaded_only_where_they_lie(mesh: Any) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    half = LocalShards(whole[:2], (4, 3), LocalShards.of(DTensor.from_local(whole[:2], mesh, [Replicate()])).places)
    target = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)])
    for into in (target, torch.zeros(4, 3)):
        with pytest.raises(
            CheckpointError, match=r"state\['weight'\] is this rank's shard \[0:2, 0:3\] of a live state"
        ):
            restore({"weight": half}, into={"weight": into})


def test_piece_is_not_changed_unless_all_ranks_have_their_gradients(mesh: Any) -> None:
    """Here the exchange has one rank of four, as one that was aborted on a GPU, which raises no error."""
    rank = Rank(is_same=False, world_size=4)
    rank.step()
    assert rank.writer.calls == [], "other ranks hold the same pieces"
    with pytest.raises(SessionError, match="could not agree"):
        rank.step()
    rank.session.end("rank 1 died")
    with pytest.raises(AttemptEnded):
        rank.optimizer.step()
    kept = rank.live.take()
    assert kept is not None and (kept.held.id.step, kept.held.pieces) == (1, (0, 1, 0, 1))


def test_first_step_after_a_death_is_not_made_either(mesh: Any) -> None:
    rank = Rank(is_same=False, world_size=4, known_pieces=(0, 1, 0, 1))
    with pytest.raises(SessionError, match="could not agree"):
        rank.step()
    assert not rank.live.is_changing and rank.live.num_steps == 0


def test_ranks_decide_alike_whether_a_step_is_made() -> None:
    """A rank has died within the exchange, and the others ask the store one after the other."""
    store = torch.distributed.HashStore()
    for rank in range(3):
        store.set(f"live/{rank} noted", "7")
    assert not decide(store, "7", 4, lambda: True)
    store.set("live/3 noted", "7")  # too late: it had died
    assert not decide(store, "7", 4, lambda: True)
    for rank in range(4):
        store.set(f"live/{rank} noted", "8")
    assert decide(store, "8", 4, lambda: True) and decide(store, "8", 4, lambda: True)


def test_ranks_that_are_late_are_waited_for_until_the_attempt_is_over() -> None:
    store = torch.distributed.HashStore()
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        if asked == 5:
            store.set("live/0 noted", "7")
        return False

    assert decide(store, "7", 1, is_over)


def test_store_of_rank_1_is_asked_if_rank_0_has_died(mesh: Any) -> None:
    agreement = Agreement(2, 4, "cpu")
    dead = mock.Mock(
        set=mock.Mock(side_effect=RuntimeError("connection closed")),
        check=mock.Mock(side_effect=RuntimeError("connection closed")),
    )
    second = torch.distributed.HashStore()
    agreement._stores = [dead, second]
    for rank in (0, 1, 3):
        second.set(f"live/{rank} noted", "7")
    agreement.reach(7, lambda: True)  # here the exchange has one rank
    assert not decide(second, "6", 4, lambda: True)
    agreement._stores = [dead]
    with pytest.raises(SessionError, match="could not agree"):
        agreement.reach(8, lambda: True)

"""The torch helpers in real groups: three gloo processes that run this file as their program.

Each world is started once; its ranks go through all cases and leave what they found in a file, which the tests read.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from raysgd.backends import torch_transfers
from raysgd.backends.torch import TorchBackend, TorchConfig
from raysgd.data.order.handed_out import Passes
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.progress import Progress
from raysgd.session.rank_state import make_deterministic, seed_generators
from raysgd.torch import prepare_data_loader, prepare_model, prepare_optimizer, unwrap
from raysgd.torch.reduction import RankOrder, reduce_in_rank_order

WORLD_SIZE = 3
STEPS, INTERRUPTED_AFTER = 6, 3


class Images(NamedTuple):
    pixels: torch.Tensor
    label: torch.Tensor


class Pictures(Dataset[Any]):
    """Random images, each a function of its index; batches are dicts that hold tuples."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randn(3, 12, 12, generator=generator)
        return {"images": Images(pixels, torch.tensor(index % 10)), "meta": (index, str(index))}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32)
        )
        self.dropout = nn.Dropout(0.1)
        self.hidden = nn.Linear(512, 100)
        self.head = nn.Linear(100, 10)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.hidden(self.features(pixels).flatten(1)))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.encode(pixels)))


class Words(nn.Module):
    """Two embedding tables; a step uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(20, 4)
        self.unused = nn.Embedding(20, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.used(words).sum()


def digest(model: nn.Module) -> str:
    """Return a digest of the trainable weights; running statistics differ by rank until the next forward."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


# -- the program of each rank ------------------------------------------------------------------------------------------


def train(start: int, end: int, state: dict[str, Any] | None, **ddp_kwargs: Any) -> tuple[str, dict[str, Any]]:
    """Run some steps of a training with two steps per epoch, resumed from a state, as a train_func does."""
    session = context.current()
    seed_generators(session.seed, session.world_rank)
    if session.deterministic:
        make_deterministic()
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"][session.world_rank])
    prepared = prepare_model(model, ddp_kwargs=ddp_kwargs)
    optimizer = cast(Any, prepare_optimizer(optimizer))
    loader = prepare_data_loader(DataLoader(Pictures(), batch_size=8, shuffle=True))
    done = start
    loader.set_epoch(start // 2)
    while done < end:
        for step, batch in enumerate(loader):
            if step < done % 2 or done == end:  # the middle of an epoch
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(prepared(batch["images"].pixels), batch["images"].label).backward()
            optimizer.step()
            done += 1
    rng: list[Any] = [None] * session.world_size
    dist.all_gather_object(rng, torch.get_rng_state())
    return digest(prepared), {"model": prepared.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng}


def whole_trainings(folder: Path) -> dict[str, Any]:
    """Train without interruption, and up to an interruption whose state rank 0 saves."""
    found = {"straight": train(0, STEPS, None)[0], "small buckets": train(0, STEPS, None, bucket_cap_mb=0.02)[0]}
    _, state = train(0, INTERRUPTED_AFTER, None)
    with_session(deterministic=False)
    found["plain straight"] = train(0, STEPS, None)[0]
    _, plain_state = train(0, INTERRUPTED_AFTER, None)
    with_session(deterministic=True)
    if dist.get_rank() == 0:
        torch.save({"hook": state, "plain": plain_state}, folder / "state.pt")
    return found


def resumed_trainings(folder: Path) -> dict[str, Any]:
    states = torch.load(folder / "state.pt")
    found = {"resumed": train(INTERRUPTED_AFTER, STEPS, states["hook"])[0]}
    with_session(deterministic=False)
    found["plain resumed"] = train(INTERRUPTED_AFTER, STEPS, states["plain"])[0]
    return found


def names_and_attributes() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # different weights per rank, which the wrapper makes equal
    model = prepare_model(ConvNet())
    found: dict[str, Any] = {"digest": digest(model), "names": list(model.state_dict())}
    found["encoded"] = tuple(model.encode(torch.ones(2, 3, 12, 12)).shape)
    other = ConvNet()
    model.load_state_dict({f"module.{name}": value for name, value in other.state_dict().items()})
    found["prefixed loads"] = digest(model) == digest(other)
    return found


def batch_norm_buffers() -> dict[str, Any]:
    """Return running statistics of data that differs by rank, before and after a forward pass."""
    model = prepare_model(ConvNet())
    for value in (1.0, 2.0):
        total = model(torch.full((4, 3, 12, 12), value + dist.get_rank()) + torch.randn(4, 3, 12, 12)).sum()
        before = model.features[1].running_mean.clone()
        total.backward()
    model.eval()
    model.train()(torch.zeros(4, 3, 12, 12)).sum().backward()
    return {"of this rank": before.tolist(), "after a forward": model.features[1].running_mean.tolist()}


def frozen_model() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    model = ConvNet().requires_grad_(False)
    return {"same object": prepare_model(model) is model, "digest": digest(model)}


def unused_parameters() -> dict[str, Any]:
    model = prepare_model(Words(), ddp_kwargs={"find_unused_parameters": True})
    for _ in range(2):
        model(torch.tensor([dist.get_rank()])).backward()
    used = unwrap(model).used.weight.grad
    return {"gradient": used[:WORLD_SIZE, 0].tolist(), "unused": unwrap(model).unused.weight.grad}


def sparse_gradients() -> dict[str, Any]:
    model = prepare_model(nn.Embedding(6, 2, sparse=True))
    model(torch.tensor([dist.get_rank(), 5])).sum().backward()
    return {"gradient": unwrap(model).weight.grad.to_dense()[:, 0].tolist()}


def skipped_sync() -> dict[str, Any]:
    """Return the gradient of two passes that are averaged once."""
    model = prepare_model(nn.Linear(1, 1))
    with model.no_sync():
        model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    model(torch.full((1, 1), 10.0)).sum().backward()
    return {"gradient": unwrap(model).weight.grad.item()}


def uneven_inputs() -> dict[str, Any]:
    """Use DDP's `join` for ranks that run out of data early."""
    model = prepare_model(nn.Linear(1, 1))
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(1, 1)).sum().backward()
    return {"done": True}


def rank_order() -> dict[str, Any]:
    """Compare the hook with sums in rank order, for all types, awkward sizes and several concurrent buckets."""
    state = RankOrder(cast(Any, dist.group.WORLD))
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        sizes = (1, 2, 3, 4, 7, 1000, 1001)
        each = [[values(rank, size, dtype) for size in sizes] for rank in range(WORLD_SIZE)]
        futures = []
        for index, mine in enumerate(each[dist.get_rank()]):
            bucket = fake_bucket(mine.clone(), index, index == len(sizes) - 1)
            futures.append(reduce_in_rank_order(state, bucket))
        for index, future in enumerate(futures):
            if not torch.equal(future.wait(), mean_by_hand([rank[index] for rank in each])):
                wrong.append((str(dtype), sizes[index]))
    return {"wrong": wrong}


def mean_by_hand(tensors: list[torch.Tensor]) -> torch.Tensor:
    wide = [tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in tensors]
    total = (wide[0] + wide[1]) + wide[2]
    divided = torch.view_as_complex(torch.view_as_real(total) / 3) if total.is_complex() else total / 3
    return divided.to(tensors[0].dtype)


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * size + rank)
    drawn = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return torch.randn(size, dtype=drawn, generator=generator).to(dtype)


def fake_bucket(buffer: torch.Tensor, index: int, is_last: bool) -> Any:
    return SimpleNamespace(buffer=lambda: buffer, index=lambda: index, is_last=lambda: is_last)


def shards_of_a_loader() -> dict[str, Any]:
    loader = prepare_data_loader(DataLoader(Pictures(), batch_size=4, shuffle=True, num_workers=1))
    epochs = [[int(index) for batch in loader for index in batch["meta"][0]] for _ in range(2)]
    batch = next(iter(loader))
    return {
        "epochs": epochs,
        "types": (type(batch).__name__, type(batch["images"]).__name__, type(batch["meta"]).__name__),
    }


def recorded_collectives() -> dict[str, Any]:
    """Make each operation that gloo has; return what raysgd reads of it on this rank."""
    rank, backend = dist.get_rank(), TorchBackend(TorchConfig())
    torch_transfers.install()
    found: dict[str, Any] = {}
    for name, operation in operations(rank).items():
        before = {(one.id, one.transfer) for one in cast(Any, backend.dump_flight_record()).entries}
        operation()
        entries = cast(Any, backend.dump_flight_record()).entries
        found[name] = [one for one in entries if (one.id, one.transfer) not in before]
    return found


def operations(rank: int) -> dict[str, Callable[[], Any]]:
    one, of_each = torch.ones(4), lambda: [torch.ones(4) for _ in range(WORLD_SIZE)]
    ahead, behind = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE

    def exchange() -> None:
        pairs = [dist.P2POp(dist.isend, one, ahead), dist.P2POp(dist.irecv, torch.ones(4), behind)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()

    def train_with_fsdp() -> None:
        fully_shard(nn.Linear(6, 6))(torch.ones(1, 6)).sum().backward()

    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "broadcast": lambda: dist.broadcast(one, 1),
        "reduce": lambda: dist.reduce(one, 1),
        "all_gather": lambda: dist.all_gather(of_each(), one),
        "all_gather_single": lambda: dist.all_gather_into_tensor(torch.ones(4 * WORLD_SIZE), one),
        "gather": lambda: dist.gather(one, of_each() if rank == 1 else None, dst=1),
        "scatter": lambda: dist.scatter(one, of_each() if rank == 1 else None, src=1),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(4), of_each()),
        "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * WORLD_SIZE)),
        "all_to_all": lambda: dist.all_to_all(of_each(), of_each()),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6)),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "all_gather_object": lambda: dist.all_gather_object([None] * WORLD_SIZE, "x" * (rank + 1)),
        "fsdp": train_with_fsdp,
        "send and receive": exchange,
    }


def with_session(deterministic: bool) -> None:
    rank = dist.get_rank()
    session = SimpleNamespace(
        progress=Progress(),
        passes=Passes(),
        world_rank=rank,
        world_size=WORLD_SIZE,
        identity=Identity(world_rank=rank, world_size=WORLD_SIZE),
        in_worker=True,
        seed=11,
        deterministic=deterministic,
        logical=None,
    )
    context.install(cast(Any, session))


def main(world: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/{world}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    with_session(deterministic=True)
    if world == "first":
        cases = (
            *(names_and_attributes, batch_norm_buffers, frozen_model, unused_parameters, sparse_gradients),
            *(skipped_sync, uneven_inputs, rank_order, shards_of_a_loader, recorded_collectives),
        )
        found = {case.__name__: case() for case in cases} | {"trainings": whole_trainings(folder)}
    else:
        found = {"trainings": resumed_trainings(folder)}
    torch.save(found, folder / f"{world}.{rank}.pt")
    dist.destroy_process_group()
    # torch aborts an interpreter that ends while a thread of gloo releases the tensors of the last collective.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))


# -- the tests ---------------------------------------------------------------------------------------------------------


def run_world(world: str, folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, __file__, world, str(folder), str(rank)] for rank in range(WORLD_SIZE)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    return [torch.load(folder / f"{world}.{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("worlds")
    return folder, run_world("first", folder)


@pytest.fixture(scope="module")
def ranks(first: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return first[1]


@pytest.fixture(scope="module")
def resumed(first: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The same trainings, resumed in new processes."""
    return run_world("second", first[0])


def of(ranks: list[dict[str, Any]], case: str, what: str) -> list[Any]:
    return [rank[case][what] for rank in ranks]


def test_resumed_training_has_the_same_bits(ranks: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    straight = of(ranks, "trainings", "straight")
    assert len(set(straight)) == 1
    assert of(resumed, "trainings", "resumed") == straight


def test_bucket_layout_does_not_change_the_bits(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "trainings", "small buckets") == of(ranks, "trainings", "straight")


def test_resumed_training_differs_without_the_hook(ranks: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """If this fails, DDP itself is deterministic, and the hook can be removed."""
    assert of(ranks, "trainings", "plain straight")[0] != of(resumed, "trainings", "plain resumed")[0]


def test_ranks_start_with_the_weights_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    assert len(set(of(ranks, "names_and_attributes", "digest"))) == 1


def test_wrapped_model_keeps_names_and_attributes_and_loads_prefixed_state(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "names_and_attributes", "names") == [list(ConvNet().state_dict())] * WORLD_SIZE
    assert of(ranks, "names_and_attributes", "encoded") == [(2, 100)] * WORLD_SIZE
    assert of(ranks, "names_and_attributes", "prefixed loads") == [True] * WORLD_SIZE


def test_forward_uses_running_statistics_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    own = of(ranks, "batch_norm_buffers", "of this rank")
    assert own[0] != own[1] != own[2]
    # All ranks processed the same zeros last, and used the statistics of rank 0.
    after = of(ranks, "batch_norm_buffers", "after a forward")
    assert after[0] == after[1] == after[2]


def test_frozen_model_is_broadcast_and_not_wrapped(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "frozen_model", "same object") == [True] * WORLD_SIZE
    assert len(set(of(ranks, "frozen_model", "digest"))) == 1


def test_unused_parameters_get_no_gradient(ranks: list[dict[str, Any]]) -> None:
    for gradient in of(ranks, "unused_parameters", "gradient"):
        assert gradient == pytest.approx([2 / 3] * 3)
    assert of(ranks, "unused_parameters", "unused") == [None] * WORLD_SIZE


def test_sparse_gradients_are_averaged(ranks: list[dict[str, Any]]) -> None:
    for gradient in of(ranks, "sparse_gradients", "gradient"):
        assert gradient == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 1])


def test_gradients_accumulated_under_no_sync_are_averaged_once(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "skipped_sync", "gradient") == pytest.approx([12.0] * WORLD_SIZE)


def test_join_handles_ranks_that_run_out_of_data(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "uneven_inputs", "done") == [True] * WORLD_SIZE


def test_hook_adds_in_rank_order(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "rank_order", "wrong") == [[]] * WORLD_SIZE


def test_shards_of_an_epoch_cover_the_data_and_epochs_differ(ranks: list[dict[str, Any]]) -> None:
    each = of(ranks, "shards_of_a_loader", "epochs")
    for epoch in (0, 1):
        assert sorted(index for rank in each for index in rank[epoch]) == list(range(48))
    assert each[0][0] != each[0][1]


def test_nested_batches_keep_their_types(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "shards_of_a_loader", "types") == [("dict", "Images", "list")] * WORLD_SIZE


def test_every_collective_of_gloo_is_recorded_alike_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    names = ranks[0]["recorded_collectives"].keys() - {"send and receive"}
    assert len(names) == 15
    for name in names:
        first, *others = of(ranks, "recorded_collectives", name)
        assert first, f"{name} is not recorded"
        for other in others:
            assert [one.id for one in other] == [one.id for one in first]
            assert all(one.matches(another) for one, another in zip(first, other, strict=True)), name


def test_sends_and_receives_are_recorded_with_their_direction(ranks: list[dict[str, Any]]) -> None:
    for rank, made in enumerate(of(ranks, "recorded_collectives", "send and receive")):
        ahead, behind = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
        assert {(one.place, one.ranks, one.is_done) for one in made} == {
            (f"send 1 of default_pg from rank {rank} to rank {ahead}", (rank, ahead), True),
            (f"receive 1 of default_pg from rank {behind} to rank {rank}", (behind, rank), True),
        }

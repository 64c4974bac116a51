"""DTensors in checkpoints: what the ranks of one mesh save is restored on any other, without processes of its own."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import raysgd
from raysgd.backends import torch_groups
from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.codecs.shards import ShardIndex, ShardWriter, find_tiling_error
from raysgd.checkpoint.codecs.torch import local_shards
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.resharding import SavedArray
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointCorruptError, CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)
NAMES = ("dp", "pp", "tp")
Layout = tuple[tuple[int, ...], tuple[Placement, ...]]


torch_groups.install()


@contextlib.contextmanager
def rank_of(shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        names = ("dp",) if len(shape) == 1 else ("dp", "tp") if len(shape) == 2 else NAMES
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    finally:
        torch_groups.leave_all()
        dist.destroy_process_group()


def spread(values: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Distribute a tensor that every rank has, without communication."""
    return distribute_tensor(values, mesh, placements, src_data_rank=None)


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dims = st.integers(0, ndim - 1)
    placements: list[Placement] = [
        draw(st.one_of(st.just(Replicate()), dims.map(Shard))) if ndim else Replicate() for _ in shape
    ]
    if len(shape) == 2 and isinstance(placements[1], Shard) and draw(st.booleans()):
        placements[0] = _StridedShard(placements[1].dim, split_factor=shape[1])  # FSDP over tensor parallelism
    elif isinstance(placements[-1], Shard) and draw(st.booleans()):
        placements[-1] = _StridedShard(placements[-1].dim, split_factor=3)  # a fused weight, whose parts are sharded
    return shape, tuple(placements)


def save(root: Path, values: dict[str, torch.Tensor], layout: Layout, **more: Any) -> tuple[Storage, Manifest]:
    shape, placements = layout
    store = CheckpointStore(Storage.from_uri(root))
    parts, digests, size = {}, set(), math.prod(shape)
    for rank in range(size):
        with rank_of(shape, rank) as mesh:
            state = {name: spread(value, mesh, placements) for name, value in values.items()}
            snapshot = take_snapshot({**state, **more}, StagingPool(1), shards=ShardWriter(size))
        parts[rank] = snapshot.write(store.directory(1), part_prefix(1, rank))
        digests.add(snapshot.unsharded_digest())
    manifest = Manifest(
        number=1,
        attempt=1,
        iteration=1,
        time_total_s=1.0,
        created_s=1.0,
        world_size=size,
        all_ranks=True,
        parts=parts,
        is_reshardable=len(digests) == 1 and None not in digests,
    )
    store.commit(manifest)
    return store.directory(1), manifest


def load(saved: tuple[Storage, Manifest], rank: int = 0, world_size: int | None = None) -> Any:
    return load_state(*saved, rank, allow_pickle=False, world_size=world_size, on_unusable=lambda error: None)


def values_of(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.arange(count).reshape(tuple(shape)) % 3 == 0
    return torch.arange(count, dtype=torch.float32).reshape(tuple(shape)).to(dtype)


@given(data=st.data(), shape=st.lists(st.integers(0, 7), max_size=3))
@settings(max_examples=60, deadline=None)
def test_shards_say_where_the_elements_of_each_rank_lie(data: st.DataObject, shape: list[int]) -> None:
    mesh_shape, placements = data.draw(layouts(len(shape)))
    whole = values_of(torch.int64, shape)
    held: list[ShardIndex] = []
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            tensor = spread(whole, mesh, placements)
            shards = local_shards(tensor)
            for index, where in shards.items():
                assert torch.equal(whole[index.slices()] if shape else whole, tensor.to_local()[where])
            assert sum(index.size for index in shards) == tensor.to_local().numel()
            held += shards
    assert find_tiling_error(shape, list(set(held))) is None


@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(1, 6), max_size=2))
@settings(max_examples=25, deadline=None)
def test_what_one_mesh_saves_is_restored_on_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: torch.dtype, shape: list[int]
) -> None:
    whole = values_of(dtype, shape)
    saved = save(tmp_path_factory.mktemp("saved"), {"w": whole}, data.draw(layouts(len(shape))), step=3)
    alone = load(saved)
    assert alone["step"] == 3 and alone["w"].dtype == dtype and torch.equal(alone["w"], whole)
    mesh_shape, placements = data.draw(layouts(len(shape)))
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            target = spread(torch.zeros_like(whole), mesh, placements)
            raysgd.torch.restore(load(saved, rank, math.prod(mesh_shape)), into={"w": target})
            assert torch.equal(target.to_local(), spread(whole, mesh, placements).to_local())


def test_each_element_is_written_once_whatever_the_ranks_share(tmp_path: Path) -> None:
    _, manifest = save(tmp_path, {"w": torch.zeros(64, 64), "b": torch.ones(64)}, ((2, 2), (Replicate(), Shard(0))))
    sizes = [
        sum(entry.size for entry in files if entry.name.endswith(".safetensors"))
        for _, files in sorted(manifest.parts.items())
    ]
    num_bytes = 4 * (64 * 64 + 64)
    assert num_bytes <= sum(sizes) < 1.1 * num_bytes, "the second copy of each shard is not written"


def test_a_tensor_on_one_axis_is_saved_by_one_of_the_ranks_that_hold_it() -> None:
    writers = []
    for rank in range(4):
        with rank_of((2, 2), rank) as mesh:
            writer = ShardWriter(4)
            take_snapshot({"w": spread(torch.zeros(4), mesh["tp"], [Shard(0)])}, StagingPool(1), shards=writer)
            writers.append(len(writer.names))
    assert writers == [1, 1, 0, 0]


def test_models_and_optimizers_are_restored_into_plain_and_distributed_ones(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {number: value["exp_avg"].clone() for number, value in optimizer.state_dict()["state"].items()}
    state = {"model": model, "optimizer": optimizer}
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint(state)
        saved = raysgd.load_checkpoint()
    for rank in range(3):
        with rank_of((3,), rank) as mesh:
            other = torch.nn.Linear(6, 4)
            for name, parameter in list(other.named_parameters()):
                setattr(other, name, torch.nn.Parameter(spread(parameter.detach(), mesh, [Shard(0)])))
            rebuilt = torch.optim.AdamW(other.parameters(), lr=0.1)
            raysgd.torch.restore(saved, into={"model": other, "optimizer": rebuilt})
            assert rebuilt.param_groups[0]["lr"] == 0.5
            for name, value in other.state_dict().items():
                assert torch.equal(value.to_local(), spread(expected[name], mesh, [Shard(0)]).to_local())
            for number, parameter in enumerate(other.parameters()):
                moment = rebuilt.state[parameter]["exp_avg"]
                assert torch.equal(moment.to_local(), spread(moments[number], mesh, [Shard(0)]).to_local())
                assert float(rebuilt.state[parameter]["step"]) == 1
    plain = torch.nn.Linear(6, 4)
    raysgd.torch.restore(saved["model"], into=plain)
    assert torch.equal(plain.weight, expected["weight"])


class Exchanging(torch.nn.Module):
    """Two tensors that were once saved under each other's names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(6, 4))
        self.b = torch.nn.Parameter(torch.zeros(6, 4))
        self.register_load_state_dict_pre_hook(exchange)


def exchange(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}a"], state[f"{prefix}b"] = state[f"{prefix}b"], state[f"{prefix}a"]


def make_distributed(model: torch.nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.nn.Module:
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(spread(parameter.detach(), mesh, placements)))
    return model


def test_module_is_restored_in_its_own_memory(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
    model(torch.rand(3, 6, dtype=torch.bfloat16))
    saved = save(tmp_path, model.state_dict(), ((3,), (Replicate(),)))
    for rank in range(2):
        with rank_of((2,), rank) as mesh:
            other = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
            other = make_distributed(other, mesh, [Shard(0)])
            memory = [parameter.to_local().data_ptr() for parameter in other.parameters()]
            raysgd.torch.restore(load(saved, rank, 2), into=other)
            assert [parameter.to_local().data_ptr() for parameter in other.parameters()] == memory
            for name, value in model.state_dict().items():
                found = other.state_dict()[name]
                expected = spread(value, mesh, [Shard(0)]).to_local() if isinstance(found, DTensor) else value
                assert torch.equal(found.to_local() if isinstance(found, DTensor) else found, expected), name


def test_own_code_of_a_module_gets_what_was_saved(tmp_path: Path) -> None:
    values = {"a": torch.rand(6, 4), "b": torch.rand(6, 4)}
    saved = save(tmp_path, values, ((2,), (Shard(0),)))
    with rank_of((3,), 1) as mesh:
        model = make_distributed(Exchanging(), mesh, [Shard(0)])
        raysgd.torch.restore(load(saved, 1, 3), into=model)
        assert torch.equal(model.a.to_local(), spread(values["b"], mesh, [Shard(0)]).to_local())
        assert torch.equal(model.b.to_local(), spread(values["a"], mesh, [Shard(0)]).to_local())


def test_module_is_as_it_was_if_a_part_of_it_is_damaged(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    saved = save(tmp_path, model.state_dict(), ((2,), (Shard(0),)))
    path = saved[0].path_of(f"{part_prefix(1, 1)}.safetensors")
    assert os.path.getsize(path) <= 8 << 20 < sum(tensor.nbytes for tensor in model.state_dict().values())
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    other = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointCorruptError, match="does not match its checksum"):
        raysgd.torch.restore(load(saved, 0, 3), into=other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_several_ranks_get_arrays_to_read_and_a_driver_whole_tensors(tmp_path: Path) -> None:
    whole = values_of(torch.bfloat16, (5, 3))
    saved = save(tmp_path, {"w": whole}, ((2,), (Shard(0),)))
    lazy = load(saved, 1, 3)["w"]
    assert isinstance(lazy, SavedArray) and lazy.dtype == torch.bfloat16 and lazy.nbytes == 30
    assert torch.equal(lazy[1:3, :2], whole[1:3, :2]) and torch.equal(lazy.read(), whole)
    assert torch.equal(load(saved)["w"], whole)


def test_what_cannot_be_saved_says_what_to_do() -> None:
    with rank_of((2,), 0) as mesh:
        tensor = spread(torch.zeros(4), mesh, [Shard(0)])
        with pytest.raises(CheckpointError, match=r"state\['w'\] is distributed .* all_ranks=True"):
            take_snapshot({"w": tensor}, StagingPool(1))
        terms = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
        with pytest.raises(CheckpointError, match="terms of a sum"):
            take_snapshot({"w": terms}, StagingPool(1), shards=ShardWriter(2))


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"x": torch.zeros(2)}, r"state\['x'\] is in restore\(..., into=...\) but was not saved"),
        ({"w": torch.zeros(3)}, r"state\['w'\] was saved with shape \(2,\); .* \(3,\)"),
        ({"step": torch.zeros(2)}, r"state\['step'\] was saved as int; a tensor"),
        ({"w": object()}, r"state\['w'\]: .* has object there, which has no load_state_dict"),
        ({"model": torch.nn.Linear(1, 1)}, r"state\['model'\]\['bias'\] is in the Linear but was not saved"),
        ({"model": torch.nn.Linear(1, 1, bias=False)}, None),
        ({"model": torch.nn.Identity()}, r"state\['model'\]\['weight'\] was saved but the Identity has no such name"),
        ({"list": [torch.zeros(1)]}, r"state\['list'\] was not saved as 1 values"),
    ],
)
def test_state_that_does_not_match_into_is_refused(into: Any, message: str | None) -> None:
    saved = {"w": torch.ones(2), "step": 3, "model": {"weight": torch.ones(1, 1)}, "list": []}
    if message is None:
        raysgd.torch.restore(saved, into=into)
        assert into["model"].weight.item() == 1
        return
    with pytest.raises(CheckpointError, match=message):
        raysgd.torch.restore(saved, into=into)


def test_meshes_of_an_attempt_differ_from_earlier_ones_and_hold_no_groups_afterwards() -> None:
    with rank_of((2,), 0) as mesh:
        twin = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        assert mesh == twin and mesh._pg_registry and twin._pg_registry
    assert not mesh._pg_registry and not twin._pg_registry
    with rank_of((2,), 1) as later:
        assert later != mesh

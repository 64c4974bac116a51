"""torch tensors, parameters and other values in a state."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.checkpoint.codecs.tree import decode_small, encode_small
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.errors import CheckpointCorruptError, CheckpointError, UnsafeStateError
from support.payloads import load_payload


def round_trip(state: Any, *, allow_pickle: bool = False) -> Any:
    pool = StagingPool()
    snapshot = take_snapshot(state, pool, allow_pickle=allow_pickle)
    payload = snapshot.payload().copy()
    snapshot.release()
    return load_payload(payload, allow_pickle=allow_pickle)


HELD = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [name for name in HELD if hasattr(torch, name)])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5), (1,)])
def test_every_dtype_is_restored(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * dtype.itemsize
    pattern = torch.arange(count, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(count, dtype=torch.uint8)
    tensor = pattern.view(dtype).view(shape)
    loaded = round_trip({"odd": torch.zeros(3, dtype=torch.uint8), "x": tensor})["x"]
    assert loaded.dtype == dtype and loaded.shape == shape and loaded.device.type == "cpu"
    assert not count or loaded.reshape(-1).view(torch.uint8).tolist() == pattern.tolist()
    assert decode_small(encode_small(tensor)).dtype == dtype


@pytest.mark.parametrize("name", ["uint4", "int1", "bits8", "bits16"])
def test_dtypes_without_values_are_refused(name: str) -> None:
    if hasattr(torch, name):
        tensor = torch.zeros(2, dtype=torch.uint8 if name != "bits16" else torch.int16).view(getattr(torch, name))
        with pytest.raises(CheckpointError, match=rf"state\['w'\] has dtype {name}"):
            round_trip({"w": tensor})


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.T,
        lambda t: t[::2, 1:],
        lambda t: t[1:3],
        lambda t: t[0, 0],
        lambda t: t[:1].expand(5, -1),
        lambda t: t.view(2, 2, 2, 3).to(memory_format=torch.channels_last),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t[:0],
    ],
)
def test_memory_layouts_are_restored_contiguous(make: Any) -> None:
    tensor = make(torch.arange(24.0).reshape(4, 6))
    loaded = round_trip([tensor])[0]
    assert torch.equal(loaded, tensor) and loaded.is_contiguous() and not loaded.is_conj()


def test_snapshot_is_independent_of_its_state() -> None:
    tensor, pool = torch.zeros(5), StagingPool()
    snapshot = take_snapshot({"w": tensor}, pool)
    tensor.fill_(1)
    assert load_payload(snapshot.payload().copy())["w"].sum() == 0


def test_loaded_tensors_can_be_changed() -> None:
    loaded = round_trip({"a": torch.zeros(2), "b": torch.zeros(2)})
    loaded["a"] += 1
    assert loaded["a"].tolist() == [1, 1] and loaded["b"].tolist() == [0, 0]


def test_read_only_payload_is_copied() -> None:
    snapshot = take_snapshot({"a": torch.zeros(2)}, StagingPool())
    payload = snapshot.payload().copy()
    payload.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_payload(payload)["a"] += 1
    assert load_payload(payload)["a"].tolist() == [0, 0]


def test_tied_tensors_share_memory_again() -> None:
    weight = torch.arange(6.0)
    loaded = round_trip(
        {"a": weight, "b": weight, "alias": weight.detach(), "part": weight[:3], "copy": weight.clone()}
    )
    assert loaded["a"] is loaded["b"] and loaded["alias"] is not loaded["a"]
    loaded["a"][0] = 100
    assert [loaded[name][0].item() for name in ("a", "b", "alias", "part", "copy")] == [100, 100, 100, 0, 0]


def test_conjugate_view_is_distinguished_from_its_base() -> None:
    base = torch.tensor([1 + 2j])
    loaded = round_trip([base, base.conj()])
    assert loaded[0].item() == 1 + 2j and loaded[1].item() == 1 - 2j


def test_tied_parameters_of_a_module_share_memory_and_are_stored_once() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(100, 50), "head": torch.nn.Linear(50, 100, bias=False)})
    model["head"].weight = model["embed"].weight
    snapshot = take_snapshot(model, StagingPool())
    assert snapshot.num_bytes < 1.5 * 100 * 50 * 4
    loaded = load_payload(snapshot.payload())
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_parameters_and_requires_grad_are_restored() -> None:
    loaded = round_trip(
        {
            "p": torch.nn.Parameter(torch.ones(2)),
            "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
            "ids": torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
            "leaf": torch.ones(2, requires_grad=True),
            "result": torch.ones(2, requires_grad=True) * 2,
            "buffer": torch.nn.Buffer(torch.ones(2)),
        }
    )
    assert {name: (type(t), t.requires_grad) for name, t in loaded.items()} == {
        "p": (torch.nn.Parameter, True),
        "frozen": (torch.nn.Parameter, False),
        "ids": (torch.nn.Parameter, False),
        "leaf": (torch.Tensor, True),
        "result": (torch.Tensor, False),
        "buffer": (torch.Tensor, False),
    }


def test_inference_tensors_are_restored_as_normal_ones() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        pool = StagingPool()
        snapshot = take_snapshot(tensor, pool)
    assert not load_payload(snapshot.payload()).is_inference()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.to_sparse(),
        lambda t: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
        lambda t: t.to_sparse_csr(),
        lambda t: t.to_sparse_csc(),
        lambda t: t.to_sparse_bsr((2, 2)),
        lambda t: t.to_sparse_bsc((2, 2)),
    ],
)
def test_sparse_tensors_are_restored(make: Any) -> None:
    tensor = make(torch.eye(4))
    loaded = round_trip({"a": [tensor, tensor]})["a"]
    assert loaded[0] is loaded[1] and loaded[0].layout == tensor.layout
    assert torch.equal(loaded[0].to_dense(), tensor.to_dense())
    if tensor.layout == torch.sparse_coo:
        assert loaded[0].is_coalesced() == tensor.is_coalesced()


def test_sparse_indices_out_of_range_are_corrupt() -> None:
    node = encode_small(torch.eye(4).to_sparse())
    node[2] = [2, 2]
    with pytest.raises(CheckpointCorruptError):
        decode_small(node)


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: torch.empty(3, device="meta"), "dense copy"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "dense copy"),
        (lambda: torch.ones(2).to_mkldnn(), "dense copy"),
        (lambda: torch.ones(2).as_subclass(Subclass), r"a subclass of Tensor"),
        (lambda: torch.nn.LazyLinear(3).weight, "run the model once"),
        (lambda: torch.nn.Linear, "only pickle"),
        (lambda: torch.nn.functional.relu, "only pickle"),
    ],
)
def test_tensors_without_plain_values_are_refused(make: Any, hint: str) -> None:
    with pytest.raises(UnsafeStateError, match=rf"state\['m'\]\['w'\].*{hint}"):
        round_trip({"m": {"w": make()}})


def test_sizes_dtypes_and_devices_are_restored() -> None:
    state = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "cpu": torch.device("cpu"),
    }
    loaded = round_trip(state)
    assert loaded == state and type(loaded["size"]) is torch.Size
    assert decode_small(encode_small(state)) == state


def test_generator_continues_its_sequence() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    loaded = round_trip({"a": generator, "b": generator})
    assert loaded["a"] is loaded["b"]
    assert torch.equal(torch.rand(3, generator=loaded["a"]), torch.rand(3, generator=generator))


def test_generator_of_a_missing_device_is_loaded_as_its_state() -> None:
    node = encode_small(torch.Generator())
    node[1] = "cuda:7"
    if torch.cuda.device_count() <= 7:
        with pytest.warns(UserWarning, match="cuda:7"):
            assert torch.equal(decode_small(node), torch.Generator().get_state())


def test_damaged_generator_state_is_corrupt() -> None:
    node = encode_small(torch.Generator())
    node[2] = encode_small(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(CheckpointCorruptError):
        decode_small(node)


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.__setitem__(2, "float64"),
        lambda node: node.__setitem__(2, "nosuch"),
        lambda node: node.__setitem__(3, [3]),
        lambda node: node.__setitem__(3, [-1]),
        lambda node: node.__setitem__(3, [2.0]),
        lambda node: node.__setitem__(4, "yes"),
        lambda node: node.pop(),
        lambda node: node[1].__setitem__(2, [1 << 40]),
    ],
)
def test_damaged_tensor_nodes_are_corrupt(change: Any) -> None:
    node = encode_small(torch.ones(2))
    change(node)
    with pytest.raises(CheckpointCorruptError):
        decode_small(node)


def test_keys_cannot_be_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(CheckpointError, match="has a Parameter as a key"):
        round_trip({parameter: 1})


def test_thousands_of_tensors_keep_their_names_and_order() -> None:
    state = {f"layer.{i}": torch.full((2,), float(i)) for i in range(2000)}
    loaded = round_trip(state)
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_loaded_state_can_be_deep_copied() -> None:
    loaded = round_trip({"w": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2))})
    assert torch.equal(copy.deepcopy(loaded)["w"], torch.ones(2))


def test_arrays_and_tensors_in_one_state() -> None:
    tensor = torch.arange(4)
    loaded = round_trip({"t": tensor, "n": tensor.numpy(), "f": 0.5, "b": b"x" * 4000})
    assert isinstance(loaded["n"], np.ndarray) and loaded["n"].tolist() == loaded["t"].tolist() == [0, 1, 2, 3]
    assert loaded["b"] == b"x" * 4000

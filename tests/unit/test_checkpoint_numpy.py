"""NumPy arrays, scalars and generators in a state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest

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


def assert_same(loaded: Any, array: Any) -> None:
    assert type(loaded) is np.ndarray
    assert loaded.dtype == array.dtype and loaded.shape == array.shape
    assert loaded.tobytes() == array.tobytes()
    assert loaded.flags.writeable and loaded.flags.aligned and loaded.flags.c_contiguous


PLAIN_DTYPES = hnp.scalar_dtypes() | hnp.byte_string_dtypes(min_len=1) | hnp.unicode_string_dtypes(min_len=1)
DTYPES = PLAIN_DTYPES | hnp.array_dtypes(PLAIN_DTYPES)


@hypothesis.settings(max_examples=80, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_any_array_is_restored(array: Any) -> None:
    loaded = round_trip({"pad": np.zeros(3, np.uint8), "x": array})["x"]
    if isinstance(array, np.ndarray):
        assert_same(loaded, array)
    else:  # hypothesis makes scalars for shape ()
        assert type(loaded) is type(array)


@pytest.mark.parametrize(
    "dtype", ["<f4", ">f4", "f2", "g", "c8", "c16", "?", "u8", "M8[ns]", "m8[s]", "U3", "S3", "V5"]
)
def test_every_dtype_is_restored(dtype: str) -> None:
    array = np.arange(6).astype("U1" if dtype == "U3" else "u1").astype(dtype).reshape(2, 3)
    assert_same(round_trip(array), array)


@pytest.mark.parametrize(
    "dtype",
    [
        [("a", "<i4"), ("b", ">f8"), ("c", "<i2", (2,))],
        [("a", [("x", "i4"), ("y", "U3")]), ("b", "?")],
        [(("title", "a"), "i4")],
    ],
    ids=str,
)
def test_structured_arrays_are_restored(dtype: Any) -> None:
    array = np.zeros((2, 2), dtype)
    array["a"][0, 0] = 1
    assert_same(round_trip(array), array)


def test_aligned_structures_keep_their_padding() -> None:
    array = np.ones(3, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    loaded = round_trip(array)
    assert loaded.dtype == array.dtype and (loaded == array).all()


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a[::2, ::-1], lambda a: a.T, lambda a: a[:0]])
def test_memory_layouts_are_restored_as_c_order(make: Any) -> None:
    array = make(np.arange(24.0).reshape(4, 6))
    loaded = round_trip(array)
    assert (loaded == array).all() and loaded.shape == array.shape and loaded.flags.c_contiguous


def test_read_only_arrays_are_restored_writable() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    round_trip(array)[0] = 7


def test_memory_maps_are_restored_as_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(4,))
    mapped[:] = 3
    assert_same(round_trip(mapped), np.full(4, 3, np.float32))


def test_snapshot_is_independent_of_its_state() -> None:
    array, pool = np.arange(5), StagingPool()
    snapshot = take_snapshot([array, {"b": array}], pool)
    array[:] = -1
    loaded = load_payload(snapshot.payload())
    assert loaded[0].tolist() == [0, 1, 2, 3, 4] and loaded[1]["b"] is loaded[0]


def test_arrays_over_the_same_memory_share_memory_again() -> None:
    array = np.arange(6)
    loaded = round_trip({"a": array, "b": array[:], "c": array[:3], "d": array.copy()})
    assert loaded["a"] is not loaded["b"]
    loaded["a"][0] = 100
    assert [int(loaded[name][0]) for name in "abcd"] == [100, 100, 0, 0]


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.float64("nan"),
        np.float16(2),
        np.int64(-5),
        np.uint8(255),
        np.bool_(True),
        np.complex64(1j),
        np.longdouble(1) / 3,
        np.str_("a\x00b\x00"),
        np.bytes_(b"a\x00b\x00"),
        np.datetime64("2020-01-01T00", "h"),
        np.timedelta64(3, "s"),
        np.void(b"abc"),
        np.zeros(1, [("a", "i4"), ("b", "U2")])[0],
    ],
    ids=lambda value: str(value.dtype),
)
def test_scalars_are_restored_as_scalars(value: Any) -> None:
    loaded = round_trip({"x": value})["x"]
    assert type(loaded) is type(value) and loaded.dtype == value.dtype
    assert loaded == value or value != value
    assert type(decode_small(encode_small([value]))[0]) is type(value)


def test_dtypes_are_restored() -> None:
    for dtype in (np.dtype("f4"), np.dtype(">i8"), np.dtype([("a", "i4")])):
        assert round_trip([dtype]) == [dtype]


@pytest.mark.parametrize(
    "value",
    [
        np.array([None, 1]),
        np.zeros(2, [("a", "O")]),
        np.ma.array([1, 2], mask=[0, 1]),
        np.zeros(2, [("a", "i4")]).view(np.recarray),
        np.array(["a"], np.dtypes.StringDType()),
        np.float32,
        np.dtype("O"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_need_pickle_are_refused(value: Any) -> None:
    with pytest.raises(UnsafeStateError, match=r"state\['x'\]"):
        round_trip({"x": value})
    with pytest.raises(UnsafeStateError, match=r"state\['x'\]"):
        encode_small({"x": value})


def test_object_arrays_are_saved_with_allow_pickle() -> None:
    assert round_trip(np.array([None, {"a": 1}]), allow_pickle=True).tolist() == [None, {"a": 1}]


@pytest.mark.parametrize(
    "kind", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_generators_continue_their_sequence(kind: Any) -> None:
    generator = np.random.Generator(kind(5))
    generator.random(3)
    generator.integers(9, dtype=np.uint32)
    generator.spawn(2)
    loaded = round_trip({"rng": generator})["rng"]
    assert loaded.random(4).tolist() == generator.random(4).tolist()
    assert (
        loaded.integers(1000, size=4, dtype=np.uint32).tolist()
        == generator.integers(1000, size=4, dtype=np.uint32).tolist()
    )
    assert loaded.spawn(1)[0].random() == generator.spawn(1)[0].random()


def test_generators_that_share_a_bit_generator_share_it_again() -> None:
    bits = np.random.PCG64(1)
    first, second, loaded_bits = round_trip([np.random.Generator(bits), np.random.Generator(bits), bits])
    assert first.bit_generator is second.bit_generator is loaded_bits


def test_legacy_generators_continue_their_sequence() -> None:
    legacy = np.random.RandomState(3)
    legacy.normal()
    assert round_trip(legacy).normal() == legacy.normal()
    state = np.random.get_state()
    loaded = round_trip(state)
    assert loaded[0] == state[0] and (loaded[1] == state[1]).all() and loaded[2:] == state[2:]
    loaded = decode_small(encode_small(state))
    assert (loaded[1] == state[1]).all()


@pytest.mark.parametrize("position", [-1, 625, 10**6])
def test_generator_position_outside_its_state_is_corrupt(position: int) -> None:
    node = encode_small(np.random.MT19937(1))
    assert node[0] == "np.bits"
    node[2]["state"]["pos"] = position
    with pytest.raises(CheckpointCorruptError, match="position"):
        decode_small(node)


def test_huge_seed_pool_is_corrupt() -> None:
    node = encode_small(np.random.PCG64(1))
    node[3]["pool_size"] = 10**12
    with pytest.raises(CheckpointCorruptError, match="pool"):
        decode_small(node)


def test_arrays_of_other_libraries_are_restored_as_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Array:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(3, dtype=np.float32)

    class Key:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise TypeError("JAX array with PRNGKey dtype cannot be converted to a NumPy array.")

    for kind in (Array, Key):
        monkeypatch.setattr(kind, "__module__", "jaxlib._jax")
    assert_same(round_trip({"w": Array()})["w"], np.arange(3, dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"state\['k'\].*PRNGKey"):
        round_trip({"k": Key()})


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_of_jax_are_restored(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(4, dtype=getattr(ml_dtypes, name)).reshape(2, 2)
    loaded = round_trip({"a": array, "s": array[1, 1]})
    assert_same(loaded["a"], array)
    assert type(loaded["s"]) is type(array[1, 1]) and loaded["s"] == array[1, 1]


def test_round_trip_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        round_trip([np.arange(3), np.float32(1), np.random.default_rng(1), np.zeros(0), np.array(1)])

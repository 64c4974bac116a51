"""Trees of built-in values are restored exactly; other values are refused with their place."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import random
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st

from raysgd.checkpoint.codecs.tree import Decoder, decode_small, encode_small
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.errors import CheckpointCorruptError, CheckpointError, UnsafeStateError
from support.payloads import load_payload


def round_trip(state: Any, *, allow_pickle: bool = False) -> Any:
    pool = StagingPool()
    snapshot = take_snapshot(state, pool, allow_pickle=allow_pickle)
    payload = snapshot.payload().copy()
    snapshot.release()
    return load_payload(payload, allow_pickle=allow_pickle)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, with NaN equal to itself and -0.0 unequal to 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


ANY_TEXT = st.text(st.characters(), max_size=6)  # lone surrogates included
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(allow_nan=True, allow_infinity=True),
    st.complex_numbers(),
    ANY_TEXT,
    st.binary(max_size=8),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc)),
    st.timedeltas(),
)
HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), ANY_TEXT, st.binary(max_size=4)),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.dictionaries(ANY_TEXT, inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(HASHABLE, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.dictionaries(HASHABLE, st.integers(), max_size=3).map(collections.Counter),
        st.lists(inner, max_size=3).map(lambda v: collections.deque(v, maxlen=5)),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        st.binary(max_size=4).map(bytearray),
    )


TREES = st.recursive(SCALARS, containers, max_leaves=20)


@hypothesis.settings(max_examples=100)
@hypothesis.given(TREES)
def test_any_tree_is_restored(tree: Any) -> None:
    assert same(round_trip({"tree": tree})["tree"], tree)


@hypothesis.settings(max_examples=50)
@hypothesis.given(TREES)
def test_any_tree_is_restored_from_json_alone(tree: Any) -> None:
    assert same(decode_small(json.loads(json.dumps(encode_small(tree), allow_nan=False))), tree)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(2**63),
        2**63,
        "\ud83d\ude00",
        "\ud83d" + "\ude00",
        "😀\x00\u2028",
        b"x" * 5000,
        bytearray(b"y" * 5000),
        {"__metadata__": b"z" * 2000, 1: b"a" * 2000, "1": b"b" * 2000},
        pathlib.Path("a/b"),
        {True: 1, 0: 2, None: 3, 1.5: 4, ("a", (1, None)): 5, "1": 6},
        {"z": 1, "a": 2, "m": {"z": 1, "a": 2}},
        collections.deque([1, 2], maxlen=2),
        collections.defaultdict(None, {1: 2}),
        collections.Counter({"a": -1, "b": 2.5}),
        random.Random(0).getstate(),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else f"{value.bit_length()} bits",
)
def test_special_values_are_restored(value: Any) -> None:
    assert same(round_trip(value), value)


def test_attributes_of_containers_are_restored() -> None:
    loaded = round_trip({"d": collections.defaultdict(list, a=[1]), "q": collections.deque([1], maxlen=3)})
    assert loaded["d"].default_factory is list
    assert loaded["q"].maxlen == 3


def test_datetime_keeps_fold_and_offset() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=-5))
    moment = datetime.datetime(2026, 11, 1, 1, 30, tzinfo=zone, fold=1)
    loaded = round_trip(moment)
    assert loaded == moment and loaded.fold == 1 and loaded.utcoffset() == moment.utcoffset()


def test_random_generator_continues_its_sequence() -> None:
    generator = random.Random(3)
    generator.gauss(0, 1)
    loaded = round_trip(generator)
    assert [loaded.gauss(0, 1), loaded.random()] == [generator.gauss(0, 1), generator.random()]


def test_object_at_two_places_is_restored_as_one() -> None:
    shared: list[Any] = [1]
    loaded = round_trip({"a": shared, "b": (shared, {"c": shared}), "d": [1]})
    assert loaded["a"] is loaded["b"][0] is loaded["b"][1]["c"]
    assert loaded["a"] is not loaded["d"]


def test_shared_objects_do_not_multiply() -> None:
    state: list[Any] = []
    for _ in range(100):
        state = [state, state]
    loaded = round_trip(state)
    assert loaded[0] is loaded[1]


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.checkpoint.codecs.tree.MAX_VALUES", 1000)
    state: Any = ()
    for _ in range(40):
        state = (state, state)
    with pytest.raises(CheckpointError, match="more than 1,000 values"):
        round_trip(state)


def test_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = [state]
    with pytest.raises(CheckpointError, match=r"state\['a'\]\['b'\]\[0\] contains itself"):
        round_trip(state)


class Endless:
    def state_dict(self) -> dict[str, Any]:
        return {"me": self}


class Circling:
    def state_dict(self) -> Any:
        return Circling()


@pytest.mark.parametrize("state", [Endless(), Circling()])
def test_endless_state_dict_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="nests deeper than 200 levels"):
        round_trip(state)


def nested(depth: int) -> Any:
    state: Any = 0
    for _ in range(depth):
        state = [state]
    return state


def test_nesting_depth_is_bounded() -> None:
    assert same(round_trip(nested(200)), nested(200))
    for depth in (201, 100_000):
        with pytest.raises(CheckpointError, match=r"state\[0\].*nests deeper than 200 levels"):
            round_trip(nested(depth))


class Color(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Odd(Point):
    """Has more than its fields."""

    def __init__(self, x: int) -> None:
        self.more = x


@dataclasses.dataclass
class Plain:
    x: int = 1


class MyDict(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value", [len, Color.RED, Odd(1), Plain(), MyDict(a=1), Plain, json, object(), collections.defaultdict(lambda: 1)]
)
def test_values_that_need_pickle_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(UnsafeStateError, match=r"state\['scheduler'\]\[1\]\['fn'\]") as caught:
        round_trip({"scheduler": [0, {"fn": value}]})
    assert caught.value.path == "state['scheduler'][1]['fn']"
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [len, Color.RED, Point(1), Plain(2), MyDict(a=1), Plain])
def test_allow_pickle_saves_values_that_need_pickle(value: Any) -> None:
    loaded = round_trip({"fn": value, "again": value, "n": 1}, allow_pickle=True)
    assert loaded["fn"] == value and type(loaded["fn"]) is type(value)
    assert loaded["again"] is loaded["fn"]


def test_allow_pickle_saves_lambdas() -> None:
    assert round_trip([lambda x: x + 1], allow_pickle=True)[0](1) == 2


def test_pickled_values_need_allow_pickle_to_be_loaded() -> None:
    pool = StagingPool()
    snapshot = take_snapshot({"a": {"fn": Plain()}}, pool, allow_pickle=True)
    with pytest.raises(UnsafeStateError, match=r"state\['a'\]\['fn'\].*allow_pickle=True") as caught:
        load_payload(snapshot.payload())
    assert caught.value.path == "state['a']['fn']"


def test_plain_values_are_not_pickled_with_allow_pickle() -> None:
    pool = StagingPool()
    snapshot = take_snapshot({"a": [1, "x"]}, pool, allow_pickle=True)
    assert load_payload(snapshot.payload()) == {"a": [1, "x"]}


def test_values_that_do_not_pickle_are_refused_with_their_place() -> None:
    with pytest.raises(UnsafeStateError, match=r"state\['a'\].*does not pickle"):
        round_trip({"a": (i for i in ())}, allow_pickle=True)


def test_mutable_keys_are_refused() -> None:
    class Key(bytearray):
        __hash__ = object.__hash__

    with pytest.raises(CheckpointError, match="as a key"):
        round_trip({"a": {Key(): 1}}, allow_pickle=True)


@pytest.mark.parametrize(
    "node",
    [
        [],
        [1],
        [[]],
        ["nosuch"],
        ["np.nosuch"],
        ["torch.nosuch"],
        ["os.system", "true"],
        ["same", 0],
        ["same", -1],
        ["list", ["same", 0]],
        ["set", ["list"]],
        ["dict", [1]],
        ["dict", [["list"], 1]],
        ["dict"],
        ["int", "zz"],
        ["float", "1.5"],
        ["bytes", "***"],
        ["str", "/w=="],
        ["range", 1, 2, 0],
        ["slice", 1, 2, 3, 4],
        ["deque", -3],
        ["defaultdict", "system", {}],
        ["defaultdict", ["int"], {}],
        ["bytes.leaf", "nosuch"],
        ["bytes.leaf", None],
        ["datetime", "yesterday", 0],
        ["random", ["tuple", 3, ["tuple", 1], None]],
        ["pickle", "nosuch"],
        ["torch.tensor", "nosuch", "float32", [1], False],
        ["torch.tensor"],
        ["torch.dtype", "__class__"],
        ["torch.dtype", "nn"],
        ["torch.device", "cpu; import os"],
        ["torch.size", "a"],
        ["np.dtype", "O"],
        ["np.dtype", [["a", "O"]]],
        ["np.scalar", "O", "AAAAAAAAAAA="],
        ["np.scalar", "float32", "AA=="],
        ["np.array", ["inline", "U8", [8], "AAAAAAAAAAA="], "O", [1]],
        ["np.array", ["inline", "F32", [9], "AAAAAA=="], "float32", [9]],
        ["np.bits", "system", {}, None],
        ["bytearray", ["list"]],
        ["bytearray"],
        ["bytearray", 10**15],
    ],
    ids=str,
)
def test_damaged_nodes_are_corrupt(node: Any) -> None:
    expected = CheckpointCorruptError if node[:1] != ["pickle"] else UnsafeStateError
    with pytest.raises(expected):
        decode_small({"a": node})


def test_nodes_that_nest_too_deeply_are_corrupt() -> None:
    lists: Any = ["list"]
    nested_bytes: Any = ["bytes", ""]
    for _ in range(5000):
        lists, nested_bytes = ["list", lists], ["bytearray", nested_bytes]
    for node in (lists, nested_bytes):
        with pytest.raises(CheckpointCorruptError):
            decode_small(node)


def test_named_tuple_is_restored_by_its_fields() -> None:
    first, same = round_trip({"a": [Point(1), Point({"w": 2})], "b": Point(Point(3))}), round_trip(Point(1))
    assert first == {"a": [(1,), ({"w": 2},)], "b": ((3,),)}
    assert [type(value).__name__ for value in first["a"]] == ["Point", "Point"]
    assert first["b"].x.x == 3 and type(first["b"]) is type(same)


@pytest.mark.parametrize(
    "node",
    [
        ["named", "Point", ["x", "x"], 1, 2],
        ["named", "Point", ["class"], 1],
        ["named", "Point", ["__import__('os')"], 1],
        ["named", "Po int", ["x"], 1],
        ["named", "Point", ["_x"], 1],
        ["named", "Point", [["x"]], 1],
        ["named", "Point", ["x"]],
        ["named"],
    ],
)
def test_damaged_named_tuple_is_corrupt(node: list[Any]) -> None:
    with pytest.raises(CheckpointCorruptError):
        Decoder({}.__getitem__, "a file").decode_state(node)

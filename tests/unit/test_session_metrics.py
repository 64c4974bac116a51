"""Metrics are checked and copied at the call; errors name the metric."""

from __future__ import annotations

import datetime
import enum
import json
import math
from collections import OrderedDict, UserDict
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import MetricError
from raysgd.result import AUTOMATIC_KEYS
from raysgd.session.metrics import CopySlots, Deferred, copy_metrics, read_deferred

#: Promised numbers, written out.
MAX_METRICS_BYTES = 1_048_576
NUM_SLOTS = 2048


class Level(enum.IntEnum):
    HIGH = 3


class Phase(str, enum.Enum):
    TRAIN = "train"


class Celsius(float):
    pass


def same(a: Any, b: Any) -> bool:
    """Equal and of the same type, all the way down; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


def scalar_of(module: str, **members: Any) -> Any:
    """A scalar of a framework that is not installed here."""
    return type("Scalar", (), {"__module__": module, "shape": (), **members})()


def jax_scalar(value: float) -> Any:
    return scalar_of("jaxlib._jax", item=lambda self: value)


# -- what may be reported ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "copied"),
    [
        (1, 1),
        (2**100, 2**100),
        (0.5, 0.5),
        (math.inf, math.inf),
        (math.nan, math.nan),
        (True, True),
        (None, None),
        ("text", "text"),
        ("", ""),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.array(0.5), 0.5),
        (np.array(3), 3),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(0.5, requires_grad=True) * 2, 1.0),
        (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
        (Level.HIGH, 3),
        (Phase.TRAIN, "train"),
        (Celsius(0.5), 0.5),
        ([1, (2, 3)], [1, [2, 3]]),
        ((), []),
        ({"a": {"b": np.float64(1.0)}}, {"a": {"b": 1.0}}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (UserDict({"a": 1}), {"a": 1}),
        ([torch.tensor(1), np.int8(2), None, "x"], [1, 2, None, "x"]),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_metrics_are_copied_to_plain_types(given: Any, copied: Any) -> None:
    result = copy_metrics({"x": given})
    assert same(result, {"x": copied})
    json.dumps(result)


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key not in AUTOMATIC_KEYS),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=10,
        ),
        max_size=4,
    )
)
def test_plain_metrics_are_copied_unchanged(metrics: dict[str, Any]) -> None:
    assert same(copy_metrics(metrics), metrics)
    assert same(read_deferred(copy_metrics(metrics)), metrics)


# -- the moment of the call --------------------------------------------------------------------------------------------


def test_changes_after_the_call_do_not_change_the_copy() -> None:
    array, tensor = np.array(1.0), torch.tensor(1.0)
    inner: dict[str, Any] = {"values": [1]}
    metrics = {"array": array, "tensor": tensor, "inner": inner, "plain": 1}
    copied = copy_metrics(metrics)
    array[()] = 2.0
    tensor.fill_(2.0)
    inner["values"].append(2)
    inner["more"] = 1
    metrics["plain"] = 2
    assert copied == {"array": 1.0, "tensor": 1.0, "inner": {"values": [1]}, "plain": 1}


def test_device_scalar_is_not_read_at_the_call() -> None:
    reads: list[str] = []

    def read() -> float:
        reads.append("read")
        return 0.5

    held = {"loss": Deferred(read), "nested": [{"x": Deferred(read)}], "plain": 1}
    assert reads == []
    assert read_deferred(held) == {"loss": 0.5, "nested": [{"x": 0.5}], "plain": 1}
    assert reads == ["read", "read"]


class Variable:
    """As TensorFlow's: read at some time, and assigned to."""

    shape = ()

    def __init__(self, value: float) -> None:
        self.now = value

    def read_value(self) -> Any:
        return tf_scalar(self.now)

    def numpy(self) -> Any:
        return np.float32(self.now)


def tf_scalar(value: float) -> Any:
    return scalar_of("tensorflow.python.framework.ops", numpy=lambda self: np.float32(value))


Variable.__module__ = "tensorflow.python.ops.resource_variable_ops"


class Ref:
    """As JAX's array that can be written to."""

    shape = ()

    def __init__(self, value: float) -> None:
        self.now = value

    def __getitem__(self, index: Any) -> Any:
        return jax_scalar(self.now)

    def item(self) -> float:
        return self.now


Ref.__module__ = "jax._src.core"


@pytest.mark.parametrize("scalar", [tf_scalar(0.5), jax_scalar(0.5)], ids=["tensorflow", "jax"])
def test_scalar_of_another_framework_is_deferred(scalar: Any) -> None:
    copied = copy_metrics({"x": scalar})
    assert type(copied["x"]) is Deferred
    assert read_deferred(copied) == {"x": 0.5}


@pytest.mark.parametrize("kind", [Variable, Ref], ids=["tensorflow", "jax"])
def test_variable_is_read_at_the_call(kind: Any) -> None:
    variable = kind(0.5)
    wrapped = scalar_of("keras.src.backend.Variable", value=variable)
    copied = copy_metrics({"lr": variable, "wrapped": wrapped})
    variable.now = 0.25
    assert read_deferred(copied) == {"lr": 0.5, "wrapped": 0.5}


# -- what may not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.zeros(3), "numpy.ndarray of shape (3,)"),
        (np.zeros(1), "numpy.ndarray of shape (1,)"),
        (torch.zeros(2, 3), "torch.Tensor of shape (2, 3)"),
        (torch.zeros(1), "torch.Tensor of shape (1,)"),
        (torch.tensor(1 + 2j), "torch.Tensor"),
        (1 + 2j, "builtins.complex"),
        (np.complex128(1j), "numpy.complex128"),
        (np.datetime64("2024-01-01"), "numpy.datetime64"),
        (datetime.datetime(2024, 1, 1), "datetime.datetime"),
        (Decimal("0.5"), "decimal.Decimal"),
        (Path("x"), "Path"),
        (b"bytes", "builtins.bytes"),
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (print, "builtins.builtin_function_or_method"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
    ids=lambda value: type(value).__name__ if type(value) is object else str(value),
)
def test_invalid_metric_is_refused_with_its_name_and_type(value: Any, named: str) -> None:
    with pytest.raises(MetricError) as caught:
        copy_metrics({"fine": 1, "odd": value})
    assert caught.value.key == "odd"
    assert "report(odd=...)" in str(caught.value) and named in str(caught.value)


def test_error_for_an_array_says_what_to_report_instead() -> None:
    with pytest.raises(MetricError, match=r"\.mean\(\)"):
        copy_metrics({"x": np.zeros(3)})
    with pytest.raises(MetricError, match="save_checkpoint"):
        copy_metrics({"x": object()})


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": [1, {"b": object()}]}, "x['a'][1]['b']"),
        ([0, object()], "x[1]"),
    ],
)
def test_error_inside_a_nested_metric_names_its_place(value: Any, key: str) -> None:
    with pytest.raises(MetricError) as caught:
        copy_metrics({"x": value})
    assert caught.value.key == key


@pytest.mark.parametrize("key", sorted(AUTOMATIC_KEYS))
def test_automatic_keys_are_refused(key: str) -> None:
    with pytest.raises(MetricError, match="itself") as caught:
        copy_metrics({"loss": 1.0, key: 1})
    assert caught.value.key == key
    assert copy_metrics({"inner": {key: 1}}) == {"inner": {key: 1}}  # only at the top they would collide


@pytest.mark.parametrize("name", [1, None, ("a", "b"), b"a"])
def test_names_that_are_not_strings_are_refused(name: Any) -> None:
    with pytest.raises(MetricError, match="give a string"):
        copy_metrics({"loss": 1.0, name: 1})
    with pytest.raises(MetricError, match="give a string"):
        copy_metrics({"inner": {name: 1}})


def test_metric_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(MetricError, match="contains itself"):
        copy_metrics({"x": loop})


def test_metric_may_be_nested_20_levels_deep() -> None:
    metric: Any = 0.5
    for _ in range(20):
        metric = [metric]
    assert copy_metrics({"x": metric}) == {"x": metric}
    with pytest.raises(MetricError, match="nested more than 20 levels deep"):
        copy_metrics({"x": [metric]})


@pytest.mark.parametrize(
    "large",
    [
        "x" * (MAX_METRICS_BYTES + 1),
        [0.5] * (MAX_METRICS_BYTES // 8 + 1),
        {"x" * MAX_METRICS_BYTES: 1},
        ["x" * 1024] * 1025,
        "\u00e9" * (MAX_METRICS_BYTES // 2 + 1),
        "\U0001f600" * (MAX_METRICS_BYTES // 4 + 1),
        "\x00" * (MAX_METRICS_BYTES // 6 + 1),
        "\ud800" * (MAX_METRICS_BYTES // 6 + 1),
        [2**62] * (MAX_METRICS_BYTES // 19),
        [2**10_000] * 400,
        {"\u00e9" * 100 + str(number): None for number in range(6000)},
    ],
    ids=[
        *["text", "list", "name", "list of texts", "two bytes each", "four bytes each", "escaped", "surrogates"],
        *["ints", "large ints", "long names"],
    ],
)
def test_metrics_above_one_mebibyte_are_refused_and_the_largest_is_named(large: Any) -> None:
    with pytest.raises(MetricError, match="1 MiB") as caught:
        copy_metrics({"small": 1.0, "large": large, "text": "x" * 1000})
    assert caught.value.key == "large"


def test_one_mebibyte_of_small_metrics_is_refused() -> None:
    with pytest.raises(MetricError, match="1 MiB"):
        copy_metrics({f"metric {number}": 0.5 for number in range(100_000)})


@pytest.mark.parametrize("name", ["x" * (MAX_METRICS_BYTES + 1), "\u00e9" * (MAX_METRICS_BYTES // 2 + 1)])
def test_names_count_towards_the_size(name: str) -> None:
    with pytest.raises(MetricError, match="1 MiB") as caught:
        copy_metrics({"loss": 1.0, name: 1.0})
    assert caught.value.key == name and len(str(caught.value)) < 300


def test_large_report_with_deferred_scalars_is_refused() -> None:
    waiting = jax_scalar(0.5)
    assert read_deferred(copy_metrics({"x": waiting, "text": "x" * 500_000}))["x"] == 0.5
    with pytest.raises(MetricError, match="1 MiB"):
        copy_metrics({"x": [waiting], "text": "\u00e9" * 800_000})


@pytest.mark.parametrize(
    "text", ["x" * (MAX_METRICS_BYTES // 2), "\u00e9" * (MAX_METRICS_BYTES // 2 - 100), "x" * (MAX_METRICS_BYTES - 100)]
)
def test_metrics_below_one_mebibyte_are_accepted(text: str) -> None:
    assert copy_metrics({"text": text}) == {"text": text}


@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: [n], lambda n: {"n": n}, lambda n: np.array(n, dtype=object)])
def test_int_that_json_cannot_read_back_is_refused(wrap: Any) -> None:
    largest = 10**4299
    assert f"{largest}" in json.dumps(copy_metrics({"n": wrap(largest)}))
    for number in (10**4300, -(10**4300), 2**1_000_000):
        with pytest.raises(MetricError, match=r"report\(n.*=\.\.\.\) got an int of [0-9,]* bits") as caught:
            copy_metrics({"loss": 1.0, "n": wrap(number)})
        assert caught.value.key.startswith("n")


class LateEvent:
    """An event of a device that reaches it only when it has been asked a number of times."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.recorded: list[Any] = []

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "bool", "uint8"])
def test_scalar_of_a_device_is_read_once_its_copy_is_done(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    events: list[LateEvent] = []

    def make_event() -> LateEvent:
        events.append(LateEvent())
        return events[-1]

    slots = CopySlots(torch, make_event, is_pinned=False)
    scalar = torch.ones((), dtype=getattr(torch, dtype))
    deferred = slots.copy(scalar, "stream")
    scalar.zero_()
    assert (events[0].recorded, events[0].num_asked) == (["stream"], 0), "the thread that reports asks nothing"
    assert deferred.read() == 1 and events[0].num_asked == 4
    assert deferred.read() == 1 and events[0].num_asked == 4, "the slot may be in use again"
    assert len(events) == NUM_SLOTS


def test_slots_are_used_again_and_only_after_they_are_read() -> None:
    torch = pytest.importorskip("torch")
    events: list[LateEvent] = []

    def make_event() -> LateEvent:
        events.append(LateEvent())
        return events[-1]

    slots = CopySlots(torch, make_event, is_pinned=False)
    for _ in range(3):
        unread = [slots.copy(torch.tensor(float(number)), None) for number in range(NUM_SLOTS)]
        assert [each.read() for each in unread] == list(range(NUM_SLOTS))
    assert len(events) == NUM_SLOTS
    more = [slots.copy(torch.tensor(float(number)), None) for number in range(NUM_SLOTS + 1)]
    assert [each.read() for each in more] == list(range(NUM_SLOTS + 1))
    assert len(events) == 2 * NUM_SLOTS

"""Metrics as loggers write them: flat, plain, and JSON that every reader takes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.callbacks.values import duration, flatten, numbers, one_line, plain, short, size, strict_json, time_span

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def _refuse(literal: str) -> None:
    raise AssertionError(f"{literal} is not JSON")


def _as_written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_written(item) for key, item in value.items()}
    return value


@given(TREES)
def test_strict_json_is_one_line_and_loses_only_nan_and_infinities(tree: Any) -> None:
    text = strict_json(tree)
    assert "\n" not in text
    assert json.loads(text, parse_constant=_refuse) == _as_written(tree)


def test_strict_readers_read_strict_json() -> None:
    assert orjson.loads(strict_json({"nan": math.nan, "large": [math.inf, -math.inf]})) == {
        "nan": None,
        "large": [None, None],
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        (np.array([1.0, math.nan]), "[1.0,null]"),
        (torch.tensor(2.0, requires_grad=True), "2.0"),
        (torch.tensor([1, 2]), "[1,2]"),
        ({("a", 1): math.inf, 2: -math.inf}, '{"(\'a\', 1)":null,"2":null}'),
        (complex(1, 2), '"(1+2j)"'),
        ((1, 2), "[1,2]"),
        ({None: 1, True: 2, 0.5: 3}, '{"null":1,"true":2,"0.5":3}'),
        ({None: 1, True: 2, 0.5: math.nan}, '{"null":1,"true":2,"0.5":null}'),
    ],
)
def test_values_that_json_cannot_hold_are_converted(value: Any, text: str) -> None:
    assert strict_json(value) == text


def test_nested_metrics_become_flat_names() -> None:
    metrics = {"loss": 1.0, "val": {"acc": {"top5": 0.9}, "n": 3}, "empty": {}, "list": [1, 2]}
    assert flatten(metrics) == {"loss": 1.0, "val/acc/top5": 0.9, "val/n": 3, "list": [1, 2]}


@pytest.mark.parametrize("metrics", [{"val/acc": 1, "val": {"acc": 2}}, {"val": {"acc": 2}, "val/acc": 1}])
def test_flat_metric_counts_where_a_nested_one_has_its_name(metrics: dict[str, Any]) -> None:
    assert flatten(metrics) == {"val/acc": 1}


def test_numbers_are_values_that_can_be_plotted() -> None:
    metrics = {
        "f": 0.5,
        "i": 3,
        "huge": -(10**400),
        "nan": math.nan,
        "b": True,
        "s": "x",
        "none": None,
        "l": [1],
        "np": np.float32(0.5),
    }
    found = numbers(metrics)
    assert math.isnan(found.pop("nan"))
    assert found == {"f": 0.5, "i": 3, "huge": -math.inf, "np": 0.5}


def test_plain_returns_unknown_values_as_they_are() -> None:
    thing = object()
    assert plain(thing) is thing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (short(0.123456), "0.1235"),
        (short(1.0), "1.0"),
        (short(1e-9), "1e-09"),
        (short(math.nan), "nan"),
        (short(None), "-"),
        (short(True), "True"),
        (short("a\n  b" + "c" * 100), "a b" + "c" * 26 + "..."),
        (duration(5), "0:05"),
        (duration(754.9), "12:34"),
        (duration(3723), "1:02:03"),
        (time_span(0), "0 s"),
        (time_span(0.0123), "12.3 ms"),
        (time_span(0.00085), "850 us"),
        (time_span(4.567), "4.57 s"),
        (time_span(754), "12:34"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1.3e9), "1.30 GB"),
        (size(123e6), "123 MB"),
        (one_line(ValueError("two\nlines")), "ValueError: two lines"),
        (one_line(KeyboardInterrupt()), "KeyboardInterrupt"),
    ],
)
def test_short_texts(text: str, expected: str) -> None:
    assert text == expected

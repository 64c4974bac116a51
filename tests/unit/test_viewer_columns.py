"""The columns that the page draws: the same rows however they come, and summaries that hide no extreme value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.viewer.columns import Columns

VALUES = st.one_of(
    st.floats(-9.0, 9.0), st.sampled_from([math.nan, math.inf, -math.inf, None, True, 7, 1 << 80, "text", [1, 2]])
)
ROWS = st.lists(st.dictionaries(st.sampled_from(["loss", "acc", "lr"]), VALUES), min_size=1, max_size=12)


def contents(columns: Columns) -> Any:
    numbers = {name: [str(value) for value in column] for name, column in columns.numbers.items()}
    return list(columns.iterations), numbers, columns.nonfinite, columns.texts


@given(st.lists(st.tuples(st.integers(1, 9), ROWS), min_size=1, max_size=4))
def test_rows_are_the_same_one_by_one_and_at_once(batches: list[tuple[int, list[dict[str, Any]]]]) -> None:
    at_once, one_by_one = Columns(left_out=frozenset({"lr"})), Columns(left_out=frozenset({"lr"}))
    for first, rows in batches:  # also rows that are repeated
        at_once.put_all(range(first, first + len(rows)), rows)
        for iteration, row in enumerate(rows, first):
            one_by_one.put(iteration, row)
    assert contents(at_once) == contents(one_by_one)
    assert {len(column) for column in at_once.numbers.values()} <= {len(at_once)}


@given(
    st.lists(st.one_of(st.just(math.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=600),
    st.integers(1, 40),
    st.sampled_from([8, 16, 32]),
)
def test_summary_keeps_the_lowest_and_highest_values_in_bounded_rows(
    values: list[float], at_once: int, max_rows: int
) -> None:
    columns = Columns(max_rows=max_rows)
    for begin in range(0, len(values), at_once):
        part = values[begin : begin + at_once]
        columns.put_all(range(begin + 1, begin + 1 + len(part)), [{"loss": value, "n": 1.0} for value in part])
        assert len(columns) <= max(max_rows, max_rows // 2 + columns.step + at_once)
        assert len(columns.numbers["loss"]) == len(columns.numbers["n"]) == len(columns)
    assert list(columns.iterations) == sorted(set(columns.iterations)) and columns.iterations[0] == 1
    assert 1 <= columns.iterations[-1] <= len(values)
    shown = np.asarray(columns.numbers["loss"])
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = shown[np.isfinite(shown)]
        assert (shown.min(), shown.max()) == (min(finite), max(finite))
    assert set(columns.numbers["n"]) == {1.0}


@pytest.mark.parametrize("back_to", [1, 2, 50, 190, 199])
def test_iterations_that_are_repeated_replace_those_of_a_summary(back_to: int) -> None:
    columns = Columns(max_rows=32)
    columns.put_all(range(1, 201), [{"loss": 1.0}] * 200)
    assert columns.step > 1
    columns.put_all(range(back_to, 301), [{"loss": 2.0}] * (301 - back_to))
    found = dict(zip(columns.iterations, columns.numbers["loss"], strict=True))
    assert all(value == 2.0 for iteration, value in found.items() if iteration >= back_to)
    assert all(value == 1.0 for iteration, value in found.items() if iteration < back_to - columns.step)
    assert list(found) == sorted(found) and len(columns) <= 16 + columns.step

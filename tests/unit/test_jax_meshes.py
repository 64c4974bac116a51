"""Sizes of the axes of a mesh."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import ConfigError
from raysgd.jax.meshes import sizes_of


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_one_size_may_be_minus_one(sizes: list[int], data: st.DataObject) -> None:
    num_devices = math.prod(sizes)
    is_open = data.draw(st.none() | st.integers(0, len(sizes) - 1))
    axes = tuple((f"a{index}", -1 if index == is_open else size) for index, size in enumerate(sizes))
    assert sizes_of(axes, num_devices) == tuple(sizes)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((("data", -1), ("model", 3)), "needs a multiple of 3 devices; the workers have 8 together"),
        ((("data", 2), ("model", 2)), "needs 4 devices; the workers have 8 together"),
        ((("data", -1), ("model", -1)), "-1 for at most one"),
        ((("data", 0),), "sizes of 1 and more"),
        ((("data", -2),), "sizes of 1 and more"),
        ((("data", 2), ("data", 4)), "names an axis twice"),
    ],
)
def test_sizes_that_do_not_match_the_devices_are_refused(axes: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes_of(axes, 8)

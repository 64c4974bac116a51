"""`ShardIndex`: slicing, intersections, and whether shards tile an array."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.codecs.shards import ShardIndex, find_tiling_error, full_index, index_from_slices, intersect

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def indices_in(draw: st.DrawFn, shape: tuple[int, ...]) -> ShardIndex:
    spans = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return ShardIndex(tuple(begin for begin, _ in spans), tuple(end for _, end in spans))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[ShardIndex]:
    """Cut an array repeatedly into shards, which form a grid only by chance."""
    shards = [full_index(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        index = shards.pop(draw(st.integers(0, len(shards) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(index.begin[dim], index.end[dim]))
        first, second = list(index.end), list(index.begin)
        first[dim] = second[dim] = cut
        shards += [ShardIndex(index.begin, tuple(first)), ShardIndex(tuple(second), index.end)]
    return draw(st.permutations(shards))


@given(st.data(), shapes)
def test_intersections_of_shards_fill_any_index(data: st.DataObject, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    wanted = data.draw(indices_in(shape))
    filled = np.full(wanted.shape, -1)
    for shard in data.draw(partitions(shape)):
        held = array[shard.slices()]
        if (common := intersect(shard, wanted)) is not None:
            filled[common.slices(wanted.begin)] = held[common.slices(shard.begin)]
    assert np.array_equal(filled, array[wanted.slices()])


@given(st.data(), shapes)
def test_partition_tiles_and_missing_or_duplicate_shards_are_found(data: st.DataObject, shape: tuple[int, ...]) -> None:
    shards = data.draw(partitions(shape))
    assert find_tiling_error(shape, shards) is None
    filled = [number for number, shard in enumerate(shards) if shard.size]
    if filled:
        number = data.draw(st.sampled_from(filled))
        assert "elements are there" in str(find_tiling_error(shape, shards[:number] + shards[number + 1 :]))
        assert "overlap" in str(find_tiling_error(shape, [*shards, shards[number]]))


@given(st.data(), shapes)
def test_indices_tile_if_each_element_is_in_exactly_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    indices = data.draw(st.lists(indices_in(shape), max_size=4))
    times = np.zeros(shape, int)
    for index in indices:
        times[index.slices()] += 1
    assert (find_tiling_error(shape, indices) is None) == bool((times == 1).all())


@given(st.data(), shapes)
def test_index_from_slices_selects_what_numpy_selects(data: st.DataObject, shape: tuple[int, ...]) -> None:
    bound = st.none() | st.integers(-9, 9)
    slices = tuple(slice(data.draw(bound), data.draw(bound)) for _ in range(data.draw(st.integers(0, len(shape)))))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    index = index_from_slices(slices, shape)
    assert np.array_equal(array[index.slices()], array[slices])
    assert index.shape == array[slices].shape


def test_invalid_slices_and_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="steps"):
        index_from_slices((slice(0, 4, 2),), (4,))
    with pytest.raises(ValueError, match="dims"):
        index_from_slices((slice(0, 4), slice(0, 1)), (4,))
    assert "outside" in str(find_tiling_error((2,), [ShardIndex((0,), (3,))]))
    assert "outside" in str(find_tiling_error((2,), [ShardIndex((0, 0), (2, 1))]))


def test_shards_of_many_devices_are_checked_quickly() -> None:
    cells = [ShardIndex((a, b), (a + 1, b + 1)) for a, b in itertools.product(range(64), range(64))]
    assert find_tiling_error((64, 64), cells) is None

"""Boxes of arrays, by arithmetic: any partition, any box that is asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.boxes import Box, box_of, overlap, whole, why_no_tiling

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return Box(tuple(begin for begin, _ in spans), tuple(end for _, end in spans))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Pieces made by cutting again and again: a grid only by chance."""
    pieces = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(box.begin[dim], box.end[dim]))
        first, second = list(box.end), list(box.begin)
        first[dim] = second[dim] = cut
        pieces += [Box(box.begin, tuple(first)), Box(tuple(second), box.end)]
    return draw(st.permutations(pieces))


@given(st.data(), shapes)
def test_pieces_put_together_are_what_numpy_slices(data: st.DataObject, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    wanted = data.draw(boxes_in(shape))
    filled = np.full(wanted.shape, -1)
    for piece in data.draw(partitions(shape)):
        held = array[piece.slices()]
        if (common := overlap(piece, wanted)) is not None:
            filled[common.slices(wanted.begin)] = held[common.slices(piece.begin)]
    assert np.array_equal(filled, array[wanted.slices()])


@given(st.data(), shapes)
def test_a_partition_tiles_and_one_piece_less_or_twice_does_not(data: st.DataObject, shape: tuple[int, ...]) -> None:
    pieces = data.draw(partitions(shape))
    assert why_no_tiling(shape, pieces) is None
    filled = [index for index, piece in enumerate(pieces) if piece.size]
    if filled:
        index = data.draw(st.sampled_from(filled))
        assert "elements are there" in str(why_no_tiling(shape, pieces[:index] + pieces[index + 1 :]))
        assert "overlap" in str(why_no_tiling(shape, [*pieces, pieces[index]]))


@given(st.data(), shapes)
def test_boxes_tile_where_each_element_is_in_one_of_them(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    times = np.zeros(shape, int)
    for box in boxes:
        times[box.slices()] += 1
    assert (why_no_tiling(shape, boxes) is None) == bool((times == 1).all())


@given(st.data(), shapes)
def test_an_index_is_the_box_that_numpy_takes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    bound = st.none() | st.integers(-9, 9)
    index = tuple(slice(data.draw(bound), data.draw(bound)) for _ in range(data.draw(st.integers(0, len(shape)))))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    box = box_of(index, shape)
    assert np.array_equal(array[box.slices()], array[index])
    assert box.shape == array[index].shape


def test_what_is_no_box_is_refused() -> None:
    with pytest.raises(ValueError, match="steps"):
        box_of((slice(0, 4, 2),), (4,))
    with pytest.raises(ValueError, match="dims"):
        box_of((slice(0, 4), slice(0, 1)), (4,))
    assert "outside" in str(why_no_tiling((2,), [Box((0,), (3,))]))
    assert "outside" in str(why_no_tiling((2,), [Box((0, 0), (2, 1))]))


def test_the_shards_of_many_devices_are_looked_at_in_no_time() -> None:
    cells = [Box((a, b), (a + 1, b + 1)) for a, b in itertools.product(range(64), range(64))]
    assert why_no_tiling((64, 64), cells) is None

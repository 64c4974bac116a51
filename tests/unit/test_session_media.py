"""Images and histograms in reports: what is accepted, what readers get, and what happens where no file can be written."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import raysgd
from raysgd._util.media import image_names, parse_histogram
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import MetricError
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import Reports
from raysgd.session.media import ImageFolder
from raysgd.session.metrics import copy_metrics


def pixels_of(png: bytes) -> np.ndarray[Any, Any]:
    """Decode a PNG of 8 bits without filters, by the document that defines it."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, data, shape = 8, b"", (0, 0, 0)
    while place < len(png):
        length, kind = int.from_bytes(png[place : place + 4], "big"), png[place + 4 : place + 8]
        body = png[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(png[place + 8 + length : place + 12 + length], "big")
        if kind == b"IHDR":
            shape = (int.from_bytes(body[4:8], "big"), int.from_bytes(body[:4], "big"), {0: 1, 2: 3, 6: 4}[body[9]])
        data += body if kind == b"IDAT" else b""
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape[0], 1 + shape[1] * shape[2])
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(shape)


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3, 4]))))
def test_image_is_a_png_of_the_same_pixels(pixels: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(pixels_of(raysgd.Image(pixels).to_png()), pixels)


@pytest.mark.parametrize(
    ("given_pixels", "shown"),
    [
        (np.array([[0.0, 0.5, 1.0, 2.0, -1.0, np.nan, np.inf]]), [0, 128, 255, 255, 0, 0, 255]),
        (np.array([[True, False]]), [255, 0]),
        (np.array([[300, -3, 7]], dtype=np.int64), [255, 0, 7]),
        ([[0, 255]], [0, 255]),
    ],
)
def test_values_beyond_the_range_of_a_pixel_are_cut(given_pixels: Any, shown: list[int]) -> None:
    assert pixels_of(raysgd.Image(given_pixels).to_png()).ravel().tolist() == shown


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: raysgd.Image(np.zeros((3, 8, 8))), "move the channels to the end"),
        (lambda: raysgd.Image(np.zeros(5)), "give pixels of shape"),
        (lambda: raysgd.Image(np.zeros((0, 4))), "give pixels of shape"),
        (lambda: raysgd.Image(np.zeros((2, 8, 8, 3))), "give pixels of shape"),
        (lambda: raysgd.Image(np.zeros((4096, 4096), np.uint8)), "the limit is 4 million"),
        (lambda: raysgd.Image("cat.png"), "give real numbers"),
        (lambda: raysgd.Image(np.zeros((2, 2), complex)), "give real numbers"),
        (lambda: raysgd.Histogram(["a"]), "give real numbers"),
        (lambda: raysgd.Histogram([1.0], bins=0), "give 1 to 1000"),
    ],
)
def test_what_is_not_an_image_or_a_histogram_is_refused_with_advice(make: Any, text: str) -> None:
    with pytest.raises(MetricError, match=text):
        make()


@given(st.lists(st.floats(width=32), max_size=30), st.integers(1, 9))
def test_histogram_counts_each_finite_value_once(values: list[float], bins: int) -> None:
    parsed = parse_histogram(raysgd.Histogram(np.array(values, np.float32), bins).text)
    assert parsed is not None
    low, high, counts = parsed
    finite = [value for value in values if np.isfinite(value)]
    assert len(counts) == bins and sum(counts) == len(finite) and low < high
    assert all(low <= value <= high for value in finite)


@given(st.text())
def test_texts_of_users_are_neither_images_nor_histograms_by_accident(text: str) -> None:
    assert not image_names(text) and parse_histogram(text) is None
    assert not image_names(f"image:media/../{text}")


def test_report_has_the_name_of_an_image_whose_file_is_written_before(tmp_path: Path) -> None:
    images = ImageFolder(Storage.from_uri(tmp_path / "media"), pytest.fail)
    queue = EventQueue(0.0, keep_image=images.keep)
    pixels = np.eye(4)
    metrics = copy_metrics({"loss": 1.0, "val": {"samples": [raysgd.Image(pixels), raysgd.Image(pixels * 0.5)]}})
    pixels[:] = 9  # the report has the values at the call
    queue.put_report((1.0, 1.0, metrics))
    (reports,) = queue.drain(1)
    assert isinstance(reports, Reports)
    ((_, _, sent),) = json.loads(reports.rows)
    names = image_names(json.dumps(sent["val"]["samples"]))
    assert sent["loss"] == 1.0 and len(set(names)) == 2
    assert sorted(path.name for path in (tmp_path / "media").iterdir()) == sorted(names)
    assert np.array_equal(pixels_of((tmp_path / "media" / names[0]).read_bytes())[:, :, 0], np.eye(4) * 255)


def test_report_continues_where_an_image_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file, not a folder")
    warnings: list[str] = []
    images = ImageFolder(Storage.from_uri(tmp_path / "media"), warnings.append)
    queue = EventQueue(0.0, keep_image=images.keep)
    for _ in range(2):
        queue.put_report((1.0, 1.0, copy_metrics({"sample": raysgd.Image(np.zeros((2, 2)))})))
    (reports,) = queue.drain(1)
    assert isinstance(reports, Reports) and reports.count == 2 and queue.unreadable is None
    assert len(warnings) == 1 and "could not be written" in warnings[0]

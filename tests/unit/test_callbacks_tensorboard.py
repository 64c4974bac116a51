"""TensorBoard files, read back by TensorBoard itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorboardX  # noqa: F401 - sets an environment variable, which must not seem to be a test's doing

import raysgd
from raysgd.callbacks import TensorBoardCallback
from raysgd.checkpoint.storage.storage import Storage
from raysgd.result import Result
from raysgd.session.media import ImageFolder
from raysgd.testing.callback_suite import make_info, make_result, running

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def write(run_dir: Path, *results: Result, callback: TensorBoardCallback | None = None) -> Path:
    with running(callback or TensorBoardCallback(), run_dir) as runner:
        for result in results:
            runner.call("on_result", result)
    return run_dir / "tensorboard"


def read(folder: Path) -> Any:
    events = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0})
    return events.Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in read(folder).Scalars(tag)]


def test_numbers_are_scalars_at_their_iteration(tmp_path: Path) -> None:
    folder = write(tmp_path, make_result(1, val={"acc": 0.25}), make_result(2, val={"acc": 0.5}))
    assert scalars(folder, "loss") == [(1, 1.0), (2, 0.5)]
    assert scalars(folder, "val/acc") == [(1, 0.25), (2, 0.5)]
    assert scalars(folder, "raysgd/world_size") == [(1, 2), (2, 2)]


def test_time_is_that_of_the_report(tmp_path: Path) -> None:
    folder = write(tmp_path, make_result(7))
    assert read(folder).Scalars("loss")[0].wall_time == make_result(7)["timestamp"]


def test_nan_is_written_and_other_values_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, make_result(1, bad=math.nan, text="x", flag=True, none=None, list=[1]))
    assert math.isnan(read(folder).Scalars("bad")[0].value)
    assert set(read(folder).Tags()["scalars"]) & {"text", "flag", "none", "list"} == set()


def test_the_config_is_shown(tmp_path: Path) -> None:
    events = read(write(tmp_path, make_result(1)))
    (text,) = events.Tensors("config/text_summary")
    assert "| optimizer | `" in text.tensor_proto.string_val[0].decode()


def test_texts_cannot_end_a_cell_and_need_not_be_unicode(tmp_path: Path) -> None:
    callback = TensorBoardCallback()
    config = {"a|b": "x|y`z", "\ud800": "\udfff", "new\nline": 1}
    callback.on_run_start(replace(make_info(tmp_path), config=config))
    callback.on_result(make_result(1, **{"\ud800": 2.0}))
    callback.on_run_end(None)
    events = read(tmp_path / "tensorboard")
    (text,) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode().split("\n")[2:] == [
        r'| a\u007cb | `"x\u007cy\u0060z"` |',
        r'| \ud800 | `"\udfff"` |',
        r"| new\u000aline | `1` |",
    ]
    assert scalars(tmp_path / "tensorboard", r"\ud800") == [(1, 2.0)]


def test_repeated_results_replace_earlier_values(tmp_path: Path) -> None:
    rounds = [make_result(i, loss=1.0) for i in range(1, 6)]
    rounds += [make_result(i, attempt=2, loss=2.0) for i in range(3, 5)]
    assert scalars(write(tmp_path, *rounds), "loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_second_writer_continues_in_the_same_folder(tmp_path: Path) -> None:
    write(tmp_path, *(make_result(i, loss=1.0) for i in range(1, 6)))
    folder = write(tmp_path, *(make_result(i, loss=2.0) for i in range(4, 8)))
    assert len(list(folder.iterdir())) == 2
    values = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    assert scalars(folder, "loss") == values


def test_results_can_be_read_during_the_run(tmp_path: Path) -> None:
    with running(TensorBoardCallback(), tmp_path) as runner:
        runner.call("on_result", make_result(1))
        assert scalars(tmp_path / "tensorboard", "loss") == [(1, 1.0)]


def test_images_and_histograms_are_shown_as_such(tmp_path: Path) -> None:
    images = ImageFolder(Storage.from_uri(tmp_path / "media"), pytest.fail)
    pictures = [raysgd.Image([[0, 255, 9]]), raysgd.Image([[7]])]
    for picture in pictures:
        images.keep(picture)
    histogram = raysgd.Histogram([0.0, 1.0, 1.0, 2.0], bins=2).text
    missing = raysgd.Image([[1]]).text
    folder = write(
        tmp_path,
        make_result(3, samples=[picture.text for picture in pictures], gone=missing, weights=histogram, note="text"),
    )
    tags = read(folder).Tags()
    assert sorted(tags["images"]) == ["samples/0", "samples/1"] and tags["histograms"] == ["weights"]
    (image,) = read(folder).Images("samples/0")
    assert (image.step, image.width, image.height) == (3, 3, 1) and image.encoded_image_string.startswith(b"\x89PNG")
    (shown,) = read(folder).Histograms("weights")
    assert shown.histogram_value.bucket == [1, 3] and shown.histogram_value.num == 4

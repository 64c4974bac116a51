"""Write metrics for TensorBoard, by tensorboardX. Runs in the controller's helper process, without torch.

It uses tensorboardX's record writer and not its ``SummaryWriter``: one record per result, instead of one per metric
through a pipe and two threads, and a reader sees each record at once.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from raysgd._util.media import FOLDER, image_names, parse_histogram
from raysgd.callbacks.folder import FileCallback, open_folder
from raysgd.callbacks.values import flatten, numbers, split_automatic, strict_json, unicode_text
from raysgd.config.checks import check_component
from raysgd.errors import RaySGDError
from raysgd.result import Result, RunInfo


class TensorBoardCallback(FileCallback):
    """Writes event files to ``{run_dir}/tensorboard``, for ``tensorboard --logdir`` of that folder or one above.

    Every number is a scalar at step ``training_iteration``: nested metrics under tags such as ``val/loss``, what raysgd
    adds under ``raysgd/``. A `raysgd.Image` is an image and a `raysgd.Histogram` a histogram; other text, lists and bools are
    left out. The config is shown as text. When iterations are repeated after a failure, a restart mark makes TensorBoard drop
    the earlier values.

    Args:
        subdir: Folder in the run's folder, such as ``logs/tb``.
    """

    packages: ClassVar[Mapping[str, str]] = {"tensorboardX": "tensorboardX"}

    _writer: _EventFile | None = None

    def __init__(self, subdir: str = "tensorboard") -> None:
        self._parts = [check_component("TensorBoardCallback(subdir)", part) for part in str(subdir).split("/")]
        self._last_step: int | None = None

    def on_run_start(self, info: RunInfo) -> None:
        self._last_step = None
        self._run_dir = info.run_dir
        self._folder = open_folder(info.run_dir, *self._parts)
        self._writer = _EventFile(str(self._folder.path))
        if info.config:
            rows = "".join(
                f"\n| {_cell(str(key))} | `{_cell(strict_json(value))}` |" for key, value in info.config.items()
            )
            self._writer.add_text("config", f"| key | value |\n|---|---|{rows}")

    def on_result(self, result: Result) -> None:
        if self._writer is None or self._folder is None:
            return
        own, automatic = split_automatic(result)
        step, when = automatic.pop("training_iteration"), automatic.pop("timestamp", None)
        if self._last_step is None or step <= self._last_step:
            self._writer.mark_restart(step)
        self._last_step = step
        scalars = numbers(own) | {f"raysgd/{key}": value for key, value in numbers(automatic).items()}
        pictures = {tag: text for tag, value in flatten(own).items() for tag, text in _texts(tag, value)}
        self._writer.add(scalars, self._read_images(pictures), pictures, step, time.time() if when is None else when)
        self._folder.sync()

    def _read_images(self, texts: Mapping[str, str]) -> dict[str, bytes]:
        """Return the images that texts refer to, by tag."""
        names = {tag: image_names(text) for tag, text in texts.items()}
        if not any(names.values()):
            return {}
        from raysgd.checkpoint.storage.storage import Storage

        folder, found = Storage.from_uri(self._run_dir).child(FOLDER), {}
        for tag, (name, *_) in ((tag, each) for tag, each in names.items() if each):
            with contextlib.suppress(RaySGDError):  # the worker has warned that it could not be written
                found[tag] = folder.read_bytes(name)
        return found


def _texts(tag: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts of a metric, each with a tag: those of a list are numbered."""
    if isinstance(value, str):
        yield tag, value
    elif isinstance(value, list):
        yield from ((f"{tag}/{place}", text) for place, text in enumerate(value) if isinstance(text, str))


@contextlib.contextmanager
def torch_not_imported() -> Iterator[None]:
    """Make ``import torch`` fail meanwhile, unless torch is loaded already.

    tensorboardX imports torch if it can, for type annotations only; that takes 1.7 s and 120 MB. A module that is None in
    `sys.modules` cannot be imported.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _cell(text: str) -> str:
    """Return text for a cell of a table; what ends a cell or code is written as JSON writes it by its number."""
    return "".join(f"\\u{ord(each):04x}" if each in "|`\r\n" else each for each in unicode_text(text))


class _EventFile:
    """A new event file in a folder. Readers take all files of the folder as one history, in the order of their names."""

    def __init__(self, folder: str) -> None:
        with torch_not_imported():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2.Event
        self._session_log: Any = event_pb2.SessionLog
        self._summary: Any = summary_pb2.Summary
        self._histogram: Any = summary_pb2.HistogramProto
        # Nanoseconds in the name: two files of the same second would have the same name otherwise.
        self._writer: Any = EventsWriter(f"{folder}/events", f".{time.time_ns()}")
        self._writer.flush()

    def add(
        self, scalars: dict[str, float], images: dict[str, bytes], texts: dict[str, str], step: int, when: float
    ) -> None:
        """Write numbers, PNG images, and the texts of histograms; other texts are left out."""
        make = self._summary.Value
        values = [make(tag=unicode_text(tag), simple_value=value) for tag, value in scalars.items()]
        for tag, png in images.items():
            width, height = struct.unpack(">II", png[16:24])
            image = self._summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
            values.append(make(tag=unicode_text(tag), image=image))
        for tag, text in texts.items():
            if (parsed := parse_histogram(text)) is not None:
                values.append(make(tag=unicode_text(tag), histo=self._make_histogram(*parsed)))
        self._write(wall_time=when, step=step, summary=self._summary(value=values))

    def _make_histogram(self, low: float, high: float, counts: list[int]) -> Any:
        """Return a histogram whose sums are those of the middles of its bins, which is all that is known."""
        width = (high - low) / len(counts)
        middles = [low + (place + 0.5) * width for place in range(len(counts))]
        return self._histogram(
            min=low,
            max=high,
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limit=[low + (place + 1) * width for place in range(len(counts))],
            bucket=counts,
        )

    def add_text(self, tag: str, markdown: str) -> None:
        from tensorboardX.summary import text

        self._write(wall_time=time.time(), summary=text(tag, markdown))

    def mark_restart(self, step: int) -> None:
        """Make readers drop the values of ``step`` and later ones in the folder's files."""
        self._write(wall_time=time.time(), step=step, session_log=self._session_log(status=self._session_log.START))

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(**fields))
        self._writer.flush()

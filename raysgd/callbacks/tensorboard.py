"""Write numeric metrics as TensorBoard scalars, by tensorboardX. Runs in the controller's helper process, without torch.

It uses tensorboardX's record writer and not its ``SummaryWriter``: one record per result, instead of one per metric
through a pipe and two threads, and a reader sees each record at once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from raysgd.callbacks.folder import FileCallback, open_folder
from raysgd.callbacks.values import numbers, split_automatic, strict_json, unicode_text
from raysgd.config.checks import check_component
from raysgd.result import Result, RunInfo


class TensorBoardCallback(FileCallback):
    """Writes event files to ``{run_dir}/tensorboard``, for ``tensorboard --logdir`` of that folder or one above.

    Every number is a scalar at step ``training_iteration``: nested metrics under tags such as ``val/loss``, what raysgd
    adds under ``raysgd/``; text, lists and bools are left out. The config is shown as text. When iterations are
    repeated after a failure, a restart mark makes TensorBoard drop the earlier values.

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
        self._writer.add_scalars(scalars, step, time.time() if when is None else when)
        self._folder.sync()


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
        # Nanoseconds in the name: two files of the same second would have the same name otherwise.
        self._writer: Any = EventsWriter(f"{folder}/events", f".{time.time_ns()}")
        self._writer.flush()

    def add_scalars(self, scalars: dict[str, float], step: int, when: float) -> None:
        values = [self._summary.Value(tag=unicode_text(tag), simple_value=value) for tag, value in scalars.items()]
        self._write(wall_time=when, step=step, summary=self._summary(value=values))

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

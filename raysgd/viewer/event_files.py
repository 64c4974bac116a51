"""Runs of TensorBoard's event files, next to those of raysgd: their scalars and hyperparameters. Runs anywhere, without Ray."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from raysgd.callbacks.tensorboard import torch_not_imported
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointCorruptError
from raysgd.result import AUTOMATIC_KEYS
from raysgd.runs.annotations import read_annotations
from raysgd.runs.state import RunState, state_by_files
from raysgd.viewer.run_data import RunData

_MARK = ".tfevents."
#: How much of a file is read at once, in bytes.
_READ_BYTES = 4 << 20
#: The length of a record and its checksum, before its data; another checksum follows.
_HEADER, _CHECKSUM_BYTES = struct.Struct("<QI"), 4
#: The plugin of TensorBoard whose summaries are numbers, and that of hyperparameters.
_SCALARS, _HPARAMS = "scalars", "hparams"


def find_event_files(root: Storage) -> dict[str, str]:
    """Return the folders below a local folder that have event files, with their names in it."""
    found = {}
    for place, folders, files in os.walk(root.path_of("")):
        folders.sort()
        if any(_MARK in name for name in files):
            found[place] = os.path.relpath(place, root.path_of("")) if place != root.path_of("") else root.name
    return found


class EventFilesRun(RunData):
    """The event files in a folder as a run: its rows are the steps, and nothing says how it ended.

    Args:
        folder: The folder, on a local disk.
        name: The name for people.
    """

    def __init__(self, folder: Storage, name: str) -> None:
        super().__init__(folder)
        self._name = name
        self._description: dict[str, Any] = {"config": {}}
        self._offsets: dict[str, int] = {}
        self._plugins: dict[str, str] = {}
        self._last: dict[str, float] = {}
        self._seq = 0

    @property
    def name(self) -> str:
        return self._name

    def read_state(self) -> RunState:
        """Read what is new, and return what lists show. Errors as for `read`."""
        self.read(self._seq)
        with self._lock:
            steps = self._results.iterations
            return RunState(
                name=self._name,
                run_dir=self.folder.path_of(""),
                state=self._state(),
                iteration=steps[-1] if steps else 0,
                metrics=dict(self._last),
                started_s=self._first_time,
                ended_s=self._last_time,
                annotations=read_annotations(self.folder),
                description=self._description,
            )

    def _state(self) -> str:
        found = state_by_files(None, is_paused=False, last_s=self._last_time)
        return "unknown" if found == "silent" else found

    def _read_more(self, *, is_final: bool) -> None:
        self._is_behind = False
        rows: dict[int, dict[str, float]] = {}
        for name in filter(lambda name: _MARK in name, self.folder.list_names()):
            for event in self._new_events(name):
                if event.session_log.status == event.session_log.START and event.step > 0:
                    self._add_rows(rows)
                    self._results.drop_after(event.step - 1)  # the program began again from there
                    self._changes.append((self._seq, event.step))
                self._add_summaries(event, rows)
            if self._is_behind:
                break
        self._add_rows(rows)

    def _add_rows(self, rows: dict[int, dict[str, float]]) -> None:
        """Add the rows to the columns, and clear them."""
        if not rows:
            return
        self._seq = self._facts_seq = self._seq + 1
        self._changes.append((self._seq, min(rows)))
        known = self._results.iterations[-1] if len(self._results) else -1
        for step in sorted(step for step in rows if step <= known):
            self._results.merge(step, rows[step])
        new = sorted(step for step in rows if step > known)
        if new and self._results.put_all(new, [rows[step] for step in new]):  # all rows have changed
            self._changes = [(self._seq, 0)]
        rows.clear()

    def _new_events(self, name: str) -> Iterator[Any]:
        """Yield the records of a file that are complete and were not read before."""
        with torch_not_imported():
            from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
            from tensorboardX.proto import event_pb2

        begin = self._offsets.get(name, 0)

        def read(file: BinaryIO) -> bytes:
            file.seek(begin)
            data = bytes(file.read(_READ_BYTES))
            if len(data) == _READ_BYTES:
                needed = _HEADER.unpack_from(data)[0] + _HEADER.size + _CHECKSUM_BYTES
                data += file.read(max(0, needed - len(data)))
            return data

        data = self.folder.read_with(name, read)
        end = 0
        while end + _HEADER.size <= len(data):
            length, _ = _HEADER.unpack_from(data, end)
            after = end + _HEADER.size + length + _CHECKSUM_BYTES
            if after > len(data):
                break
            try:
                yield event_pb2.Event.FromString(data[end + _HEADER.size : after - _CHECKSUM_BYTES])
            except DecodeError as error:
                raise CheckpointCorruptError(f"{self.folder.path_of(name)} is damaged: {error}") from error
            end = after
        self._offsets[name] = begin + end
        self._is_behind = self._is_behind or (len(data) >= _READ_BYTES and end > 0)

    def _add_summaries(self, event: Any, rows: dict[int, dict[str, float]]) -> None:
        for value in event.summary.value:
            plugin = value.metadata.plugin_data.plugin_name  # the first value of a tag has it
            plugin = self._plugins.setdefault(value.tag, plugin or _SCALARS)
            if plugin == _HPARAMS:
                self._add_hparams(value.metadata.plugin_data.content)
            number = _number_in(value) if plugin == _SCALARS else None
            if number is None:
                continue
            name = value.tag if value.tag not in AUTOMATIC_KEYS else f"{value.tag} (reported)"
            self._first_time = min(self._first_time or event.wall_time, event.wall_time)
            self._last_time = max(self._last_time, event.wall_time)
            times = {"timestamp": event.wall_time, "time_total_s": event.wall_time - self._first_time}
            rows.setdefault(event.step, {}).update({name: number, **times})
            self._last[name] = number

    def _add_hparams(self, content: bytes) -> None:
        from tensorboardX.proto import plugin_hparams_pb2

        start = plugin_hparams_pb2.HParamsPluginData.FromString(content).session_start_info
        given = {name: getattr(value, str(value.WhichOneof("kind")), None) for name, value in start.hparams.items()}
        self._description["config"] |= given


def _number_in(value: Any) -> float | None:
    """Return the number of a summary; None if it has something else."""
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if value.WhichOneof("value") != "tensor":
        return None
    tensor = value.tensor
    kinds = {
        1: ("<f4", tensor.float_val),
        2: ("<f8", tensor.double_val),
        3: ("<i4", tensor.int_val),
        9: ("<i8", tensor.int64_val),
    }
    dtype, values = kinds.get(tensor.dtype, ("", ()))
    found = np.frombuffer(tensor.tensor_content, dtype) if dtype and tensor.tensor_content else values
    return float(found[0]) if len(found) == 1 else None

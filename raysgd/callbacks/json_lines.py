"""Results as JSON lines: one line per result, appended, never rewritten.

Runs in the controller's helper process, so that it goes on when the driver is gone. Leaves events and the authoritative
record of a run to the controller's journal.
"""

from __future__ import annotations

from raysgd.callbacks.append_file import AppendFile
from raysgd.callbacks.base import Callback
from raysgd.callbacks.folder import Folder, open_folder
from raysgd.callbacks.values import strict_json
from raysgd.config.checks import check_component
from raysgd.result import Event, Result, RunInfo


class JsonLinesCallback(Callback):
    """Writes ``{run_dir}/results.jsonl``, for ``pandas.read_json(path, lines=True)``, jq and the like.

    A line has the keys of the result as they are, nested dicts too, in strict JSON: nan is ``null``, infinities are
    ``1e999`` and ``-1e999``. Results that a failure made again come again, with a higher ``attempt``;
    ``drop_duplicates("training_iteration", keep="last")`` keeps what counts. A run that is restored in the same folder
    goes on in the same file.

    Args:
        filename: Name of the file in the run's folder.
        workers: Also write each rank's own metrics, as the lists ``workers`` and ``ranks``.
    """

    runs_in = "controller"

    def __init__(self, filename: str = "results.jsonl", *, workers: bool = False) -> None:
        self._filename = check_component("JsonLinesCallback(filename)", filename)
        self._workers = workers
        self._folder: Folder | None = None
        self._file: AppendFile | None = None

    def on_run_start(self, info: RunInfo) -> None:
        self._folder = open_folder(info.run_dir)
        self._folder.fetch(self._filename)
        self._file = AppendFile(self._folder.path / self._filename)

    def on_result(self, result: Result) -> None:
        if self._file is None or self._folder is None:
            return
        record = {**result, "ranks": result.ranks, "workers": result.workers} if self._workers else result
        self._file.write_line(strict_json(record))
        self._folder.sync()

    def on_event(self, event: Event) -> None:
        if self._folder is not None:
            self._folder.sync()

    def on_run_end(self, error: BaseException | None) -> None:
        file, self._file = self._file, None
        folder, self._folder = self._folder, None
        if file is not None:
            file.close()
        if folder is not None:
            folder.close()

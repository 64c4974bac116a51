"""Where loggers' files go: files that grow by lines, and folders on object stores."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401 - sets an environment variable, which must not seem to be a test's doing

from raysgd.callbacks import CsvCallback, JsonLinesCallback, TensorBoardCallback
from raysgd.callbacks.base import Callback
from raysgd.callbacks.files import AppendFile
from raysgd.callbacks.folder import UPLOAD_EVERY_S, StoreFolder, below, open_folder, parent_of
from raysgd.result import RunInfo
from raysgd.testing.callback_suite import make_result

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def store() -> Iterator[str]:
    """The URI of a run's folder on an object store that lives in memory."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield "fsspec+memory://bucket/trainer/run_001"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def read(path: str) -> str:
    return str(fsspec.filesystem("memory").cat(path).decode())


def test_lines_can_be_read_as_soon_as_they_are_written(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    for number, line in enumerate(["one", "zwei ü", "3"], start=1):
        file.write_line(line)
        assert len((tmp_path / "lines").read_text().splitlines()) == number
    file.close()


@pytest.mark.parametrize(
    ("before", "kept"),
    [("a\nb\n", "a\nb\n"), ("a\nb", "a\n"), ("torn", ""), ("a\n" + "x" * 200_000, "a\n"), ("", "")],
    ids=["whole", "torn", "only torn", "long", "empty"],
)
def test_unfinished_last_line_is_dropped(before: str, kept: str, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text(before)
    file = AppendFile(path)
    file.write_line("next")
    file.close()
    assert path.read_text() == kept + "next\n"


def test_full_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    file.write_line("first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # as full as a disk can be had in a test
        with pytest.raises(OSError, match="too large"):
            file.write_line("x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    file.write_line("second")
    file.close()
    assert path.read_text() == "first\nsecond\n"


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_local_folder_is_written_in_place(prefix: str, tmp_path: Path) -> None:
    folder = open_folder(f"{prefix}{tmp_path}/run a", "logs")
    assert not isinstance(folder, StoreFolder)
    assert folder.path == tmp_path / "run a" / "logs"
    assert folder.path.is_dir()


def test_percent_signs_of_a_file_uri_are_decoded(tmp_path: Path) -> None:
    assert open_folder(f"file://{tmp_path}/run%20a").path == tmp_path / "run a"


def test_files_are_uploaded_periodically_and_at_the_end(store: str) -> None:
    now = 0.0
    folder = StoreFolder(store, clock=lambda: now)
    (folder.path / "a").write_text("1")
    folder.sync()
    assert not fsspec.filesystem("memory").exists("/bucket/trainer/run_001/a")
    now += UPLOAD_EVERY_S
    folder.sync()
    assert read("/bucket/trainer/run_001/a") == "1"
    (folder.path / "a").write_text("12")
    (folder.path / "sub").mkdir()
    (folder.path / "sub" / "b").write_text("new")
    folder.close()
    assert read("/bucket/trainer/run_001/a") == "12"
    assert read("/bucket/trainer/run_001/sub/b") == "new"
    assert not folder.path.exists()


def test_files_are_kept_if_the_last_upload_fails(tmp_path: Path) -> None:
    folder = StoreFolder(f"file://{tmp_path}")
    (folder.path / "a").write_text("1")
    (tmp_path / "a").mkdir()  # so that the store refuses a file of this name
    with pytest.raises(OSError, match=str(folder.path)):
        folder.close()
    assert (folder.path / "a").read_text() == "1"


def test_parents_of_paths_and_uris() -> None:
    assert parent_of("/runs/digits/run_001") == "/runs/digits"
    assert parent_of("s3://bucket/digits/run_001/?region=a/b") == "s3://bucket/digits"


def test_folders_below_paths_and_uris() -> None:
    assert below("/runs/run 1?/", "a", "b") == "/runs/run 1?/a/b"
    assert below("s3://bucket/run?region=a/b", "a") == "s3://bucket/run/a?region=a/b"


@pytest.mark.parametrize("callback", [JsonLinesCallback(), CsvCallback(), TensorBoardCallback()])
def test_loggers_write_to_object_stores(callback: Callback, store: str) -> None:
    callback.on_run_start(RunInfo("run_001", store, {"lr": 0.1}, 2, "none"))
    callback.on_result(make_result(1))
    callback.on_run_end(None)
    files = fsspec.filesystem("memory").find("/bucket/trainer/run_001")
    assert len(files) == 1
    assert fsspec.filesystem("memory").size(files[0]) > 0


def test_second_writer_appends_to_the_file_on_the_store(store: str) -> None:
    info = RunInfo("run_001", store, {}, 2, "none")
    for iterations in (range(1, 4), range(4, 6)):
        callback = JsonLinesCallback()
        callback.on_run_start(info)
        for iteration in iterations:
            callback.on_result(make_result(iteration))
        callback.on_run_end(None)
    lines = read("/bucket/trainer/run_001/results.jsonl").splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2, 3, 4, 5]

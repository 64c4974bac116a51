"""A warm worker notices that the user's code is no longer what it loaded, and is not fooled by what stays the same."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from raysgd.workers.freshness import ModuleWatch

LONG_AGO_S = 1_000_000_000


class Project:
    """A folder of the user's modules. Their sources are as old as a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, source: str, at: float | None = None) -> Path:
        path = self.folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        stamp = LONG_AGO_S if at is None else at
        os.utime(path, (stamp, stamp))
        importlib.invalidate_caches()
        return path

    def load(self, name: str, source: str = "x = 1", at: float | None = None) -> ModuleType:
        self.write(name, source, at)
        return importlib.import_module(name)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = set(sys.modules)
    yield Project(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def watch() -> ModuleWatch:
    watch = ModuleWatch()
    watch.look()  # what other tests have loaded
    return watch


def test_a_module_that_stays_as_it_is_is_fresh(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    for _ in range(3):
        watch.look()
        assert watch.stale() == ()


def test_a_module_that_was_edited_is_stale(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    project.load("users_data")
    watch.look()
    project.write("users_model", "x = 2", at=LONG_AGO_S + 5)
    assert watch.stale() == ("users_model",)


def test_an_edit_that_keeps_the_time_but_not_the_size_shows(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    watch.look()
    project.write("users_model", "x = 1000")
    assert watch.stale() == ("users_model",)


def test_stale_stays_stale_though_the_edit_is_undone(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    watch.look()
    project.write("users_model", "x = 2", at=LONG_AGO_S + 5)
    assert watch.stale()
    project.write("users_model", "x = 1")
    assert watch.stale() == ("users_model",)


def test_a_module_whose_source_is_gone_is_stale(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    watch.look()
    (project.folder / "users_model.py").unlink()
    assert watch.stale() == ("users_model",)


def test_a_module_that_is_edited_between_its_import_and_the_look_is_stale(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    project.write("users_model", "x = 2", at=time.time() + 5)  # while train_func runs
    watch.look()
    assert watch.stale() == ("users_model",)


def test_a_module_that_was_written_and_loaded_since_the_last_look_is_fresh(
    project: Project, watch: ModuleWatch
) -> None:
    project.load("users_model", at=time.time() + 1)
    watch.look()
    assert watch.stale() == ()


def test_a_young_module_without_a_compiled_file_counts_as_stale(
    project: Project, watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    project.load("users_model", at=time.time() + 1)
    watch.look()
    assert watch.stale() == ("users_model",)  # nothing tells what was loaded


def test_packages_are_watched_file_by_file(project: Project, watch: ModuleWatch) -> None:
    project.write("users_package/__init__", "")
    project.write("users_package/part", "x = 1")
    importlib.import_module("users_package.part")
    watch.look()
    project.write("users_package/part", "x = 22")
    assert watch.stale() == ("users_package.part",)


def test_installed_packages_and_the_script_itself_are_left_out(
    project: Project, watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.__file__ = str(project.write("script", "x = 1"))
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setitem(sys.modules, "built", ModuleType("built"))  # without a file
    watch.look()
    project.write("script", "x = 22")
    assert watch.stale() == ()
    assert not {"pytest", "json", "numpy"} & set(watch.stale())


def test_a_project_reached_through_a_link_is_watched(
    project: Project, watch: ModuleWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    project.write("real/users_linked", "x = 1")
    importlib.import_module("users_linked")
    watch.look()
    project.write("real/users_linked", "x = 22")
    assert watch.stale() == ("users_linked",)

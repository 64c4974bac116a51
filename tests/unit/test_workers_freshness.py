"""A warm worker finds user modules whose source has changed since they were loaded."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raysgd.workers.process.reset import ModuleWatch

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
    watch.note_loaded()  # what other tests have loaded
    return watch


def test_unchanged_module_is_fresh(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    for _ in range(3):
        watch.note_loaded()
        assert watch.stale() == ()


def test_edited_module_is_stale(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    project.load("users_data")
    watch.note_loaded()
    project.write("users_model", "x = 2", at=LONG_AGO_S + 5)
    assert watch.stale() == ("users_model",)


def test_edit_that_keeps_the_time_is_found_by_size(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    watch.note_loaded()
    project.write("users_model", "x = 1000")
    assert watch.stale() == ("users_model",)


def test_stale_module_stays_stale_after_the_edit_is_undone(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    watch.note_loaded()
    project.write("users_model", "x = 2", at=LONG_AGO_S + 5)
    assert watch.stale()
    project.write("users_model", "x = 1")
    assert watch.stale() == ("users_model",)


def test_module_without_its_source_is_stale(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    watch.note_loaded()
    (project.folder / "users_model.py").unlink()
    assert watch.stale() == ("users_model",)


def test_module_edited_between_import_and_check_is_stale(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model")
    project.write("users_model", "x = 2", at=time.time() + 5)  # while train_func runs
    watch.note_loaded()
    assert watch.stale() == ("users_model",)


def test_module_written_and_loaded_since_the_last_check_is_fresh(project: Project, watch: ModuleWatch) -> None:
    project.load("users_model", at=time.time() + 1)
    watch.note_loaded()
    assert watch.stale() == ()


def test_new_module_without_a_compiled_file_is_stale(
    project: Project, watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    project.load("users_model", at=time.time() + 1)
    watch.note_loaded()
    assert watch.stale() == ("users_model",)  # unknown what was loaded


def test_packages_are_watched_file_by_file(project: Project, watch: ModuleWatch) -> None:
    project.write("users_package/__init__", "")
    project.write("users_package/part", "x = 1")
    importlib.import_module("users_package.part")
    watch.note_loaded()
    project.write("users_package/part", "x = 22")
    assert watch.stale() == ("users_package.part",)


def test_installed_packages_and_the_script_are_not_watched(
    project: Project, watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.__file__ = str(project.write("script", "x = 1"))
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setitem(sys.modules, "built", ModuleType("built"))  # without a file
    watch.note_loaded()
    project.write("script", "x = 22")
    assert watch.stale() == ()
    assert not {"pytest", "json", "numpy"} & set(watch.stale())


def test_module_that_code_made_is_not_watched(
    project: Project, watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile makes such modules, with a source but without an import."""
    made = ModuleType("torch._inductor.runtime.compile_tasks.ckernel")
    made.__file__ = str(project.write("ckernel", "x = 1", at=time.time() + 1))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    watch.note_loaded()
    project.write("ckernel", "x = 22")
    assert watch.stale() == ()


def test_own_modules_are_not_watched(watch: ModuleWatch) -> None:
    import raysgd

    own = importlib.import_module("raysgd.data.cross_validation")
    assert str(own.__file__).startswith(os.path.dirname(str(raysgd.__file__)))
    watch.note_loaded()
    before = os.stat(str(own.__file__))
    try:
        os.utime(str(own.__file__), (LONG_AGO_S, LONG_AGO_S))
        assert watch.stale() == ()
    finally:
        os.utime(str(own.__file__), ns=(before.st_atime_ns, before.st_mtime_ns))


class Lazy(ModuleType):
    """A module that is loaded when it is first used."""

    def __getattr__(self, name: str) -> object:
        pytest.fail(f"asked for {name}")


def test_module_that_loads_on_first_use_is_not_loaded(watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    watch.note_loaded()
    assert watch.stale() == ()


def test_installed_modules_cost_a_warm_start_nothing(
    project: Project, watch: ModuleWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.load("users_model")
    for number in range(5000):
        module = ModuleType(f"installed_{number}")
        module.__file__ = f"{sys.prefix}/lib/installed_{number}.py"
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    watch.note_loaded()
    looked_at: list[str] = []

    def count_calls(name: str) -> None:
        original = getattr(os, name)

        def counted(path: Any, *args: Any, **options: Any) -> Any:
            looked_at.append(str(path))
            return original(path, *args, **options)

        monkeypatch.setattr(os, name, counted)

    count_calls("stat")
    count_calls("lstat")
    watch.note_loaded()
    assert watch.stale() == ()
    assert looked_at.count(str(project.folder / "users_model.py")) == 1
    assert not [path for path in looked_at if path.startswith(sys.prefix)]


def test_project_behind_a_symlink_is_watched(
    project: Project, watch: ModuleWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    project.write("real/users_linked", "x = 1")
    importlib.import_module("users_linked")
    watch.note_loaded()
    project.write("real/users_linked", "x = 22")
    assert watch.stale() == ("users_linked",)

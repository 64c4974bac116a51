"""`tools/run_tests.py` runs failed tests again, names unstable ones, and ends by itself."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.areas import AREAS
from support.project import ROOT
from support.records import read_records

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support import records

def pytest_addoption(parser):
    records.add_option(parser)

def pytest_configure(config):
    records.record_if_asked(config)
"""
TESTS = """
import pathlib, time, pytest

def test_that_passes():
    pass

def test_that_fails_once():
    mark = pathlib.Path("was_here")
    if not mark.exists():
        mark.touch()
        print("what it printed")
        pytest.fail("the first failure")

def test_that_fails_always():
    pytest.fail("always")

def test_that_takes_an_hour():
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def run_tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "tools" / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_tests"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def run_some(run_tests: ModuleType, project: Path, selection: str) -> Any:
    run = run_tests.Run(jobs=0, root=project)
    run.repeat_failures(run.tests("some", ["-k", selection]))
    return run


def test_test_that_fails_once_is_unstable_and_its_failure_is_kept(run_tests: ModuleType, project: Path) -> None:
    run = run_some(run_tests, project, "passes or once")
    (phase,) = run.phases
    assert phase.unstable == ["test_some.py::test_that_fails_once"]
    assert run_tests.status_of(run, is_gate=True) == 0
    assert phase.records.num_passed == 1
    (kept,) = (project / "build" / "unstable").iterdir()
    assert "the first failure" in kept.read_text() and "what it printed" in kept.read_text()
    assert list(run_tests.summary(run))[-1].endswith("test_some.py::test_that_fails_once")


def test_test_that_fails_twice_fails_the_gate(run_tests: ModuleType, project: Path) -> None:
    run = run_some(run_tests, project, "passes or always")
    assert run.phases[0].failed_twice == ["test_some.py::test_that_fails_always"]
    assert run_tests.status_of(run, is_gate=True) == 1
    assert "failed twice: test_some.py::test_that_fails_always" in list(run_tests.summary(run))


def test_gate_ends_at_its_limit_with_the_running_tests(
    run_tests: ModuleType, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_tests.Run(jobs=0, root=project, deadline=time.time() + 10)
    with pytest.raises(run_tests.OutOfTimeError):
        run.tests("some", ["-k", "hour"])
    printed = capfd.readouterr().out
    assert "out of time; these tests were running:\n  test_some.py::test_that_takes_an_hour" in printed
    assert run_tests.status_of(run, is_gate=True) == 1


def test_tests_that_cannot_be_collected_fail_the_phase(run_tests: ModuleType, project: Path) -> None:
    (project / "test_broken.py").write_text("import there_is_no_such_module")
    run = run_some(run_tests, project, "passes")
    assert run.phases[0].error.startswith("pytest ended with status")
    assert run_tests.status_of(run, is_gate=True) == 1


@pytest.mark.parametrize(("number", "status"), [(3, 0), (4, 1)])
def test_gate_fails_with_more_than_three_unstable_tests(run_tests: ModuleType, number: int, status: int) -> None:
    run = run_tests.Run()
    run.phases = [run_tests.Phase("unit", unstable=["test"] * number)]
    assert run_tests.status_of(run, is_gate=True) == status
    assert run_tests.status_of(run, is_gate=False) == 0


def test_line_that_is_cut_off_is_left_out() -> None:
    lines = ['{"test": "a", "is_start": true}\n', '{"test": "b", "is_sta']
    assert list(read_records(lines).running) == ["a"]


def test_each_file_of_process_tests_is_in_one_area() -> None:
    files = [path for area in AREAS.values() for path in area.files() if path.parent.name != "unit"]
    folders = ("integration", "fault", "conformance", "docs")
    assert sorted(files) == sorted(path for folder in folders for path in (ROOT / "tests" / folder).glob("test_*.py"))


@pytest.mark.parametrize("area", AREAS)
def test_area_names_folders_that_exist_and_contributing_lists_it(area: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert AREAS[area].files()
    assert all((ROOT / source).exists() for source in AREAS[area].sources)
    row = f"| `{area}` | {', '.join(f'`{source}`' for source in AREAS[area].sources)} |"
    assert row in page

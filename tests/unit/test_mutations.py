"""`tools/mutations.py` changes one place at a time, and lists the changes that no test notices."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.project import ROOT

MODULE = '''
"""A module of which a test notices some changes."""

LIMIT_S = 5.0


def limit(value: float) -> float:
    if value > LIMIT_S:
        return LIMIT_S
    return value


def never_called() -> int:
    return 3
'''
TEST = """
from raysgd.session.limits import limit

def test_large_values_are_limited():
    assert limit(9.0) == 5.0 and limit(1.0) == 1.0

def test_that_fails_anyway():
    assert False
"""


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "tools" / "mutations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("engine/gradients/clipping.py", "`1.0` -> `2.0`"),
        ("engine/gradients/clipping.py", "`self._known_norm is not None and not self.are_changed()` -> "),
        ("declarative/loop.py", "`rank_state.restore_generators(now)` -> `pass`"),
        ("controller/policies/after_failure.py", "`5.0` -> `10.0`"),
    ],
)
def test_faults_that_tests_once_did_not_notice_are_among_the_mutants(
    mutations: ModuleType, file: str, what: str
) -> None:
    folder = next(each for each in mutations.FOLDERS if f"raysgd/{file}".startswith(each))
    assert any(each.path == f"raysgd/{file}" and each.what.startswith(what) for each in mutations.find_mutants(folder))


def test_every_mutant_is_a_program(mutations: ModuleType) -> None:
    for mutant in mutations.find_mutants("raysgd/data/order"):
        source = (ROOT / mutant.path).read_bytes()
        compile(source[: mutant.start] + mutant.new.encode() + source[mutant.end :], mutant.path, "exec")


def test_kept_survivors_are_mutants(mutations: ModuleType) -> None:
    page = mutations.PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `raysgd/") and ".py` |" in line]
    assert rows
    for row in rows:
        path = row.split("`")[1]
        folder = next(each for each in mutations.FOLDERS if path.startswith(each))
        assert any(row.startswith(each.row()) for each in mutations.find_mutants(folder)), row


def test_changes_that_no_test_notices_are_listed(tmp_path: Path) -> None:
    for path, text in {"raysgd/session/limits.py": MODULE, "tests/unit/test_session_limits.py": TEST}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    for path in ("raysgd/__init__.py", "raysgd/session/__init__.py", "tests/support/nothing.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "mutations.py", tmp_path / "tools")
    command = [sys.executable, "tools/mutations.py", "raysgd/session"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    listed = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("SURVIVED")]
    assert sorted(listed) == [
        "raysgd/session/limits.py:14: `3` -> `4`   0 tests",
        "raysgd/session/limits.py:14: `return 3` -> `return None`   0 tests",
        "raysgd/session/limits.py:8: `value > LIMIT_S` -> `(value >= LIMIT_S)`   1 tests",
    ], done.stdout + done.stderr
    assert "raysgd/session: 6 of 6 mutants, 3 killed, 3 survived" in done.stdout
    assert done.returncode == 1

"""Modules that another thread is importing are not there yet."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from raysgd._util.imported import imported


def test_what_is_loaded_is_given_and_nothing_else() -> None:
    assert imported("sys") is sys
    assert imported("no_such_module") is None and "no_such_module" not in sys.modules


def test_one_that_is_being_imported_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_way_there.py").write_text(
        "import support_gate\nsupport_gate.begun.set()\nsupport_gate.go_on.wait(30)\nvalue = 1\n"
    )
    gate = type(sys)("support_gate")
    gate.begun, gate.go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "support_gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=__import__, args=("half_way_there",))
    thread.start()
    try:
        assert gate.begun.wait(30)
        assert "half_way_there" in sys.modules and imported("half_way_there") is None
        gate.go_on.set()
        thread.join(30)
        assert imported("half_way_there").value == 1
    finally:
        gate.go_on.set()
        sys.modules.pop("half_way_there", None)

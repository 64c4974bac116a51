"""Imports without the garbage collector, and modules that another thread is still importing."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest

from raysgd._util.imports import imported, uncollected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collector_is_disabled_during_an_import(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ImportError):
            fail_to_import()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def fail_to_import() -> None:
    with uncollected():
        assert not gc.isenabled()
        raise ImportError("not installed")


def test_imported_returns_loaded_modules_only() -> None:
    assert imported("sys") is sys
    assert imported("no_such_module") is None and "no_such_module" not in sys.modules


def test_module_that_is_still_being_imported_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_way_there.py").write_text(
        "import support_gate\nsupport_gate.begun.set()\nsupport_gate.may_finish.wait(30)\nvalue = 1\n"
    )
    gate = type(sys)("support_gate")
    gate.begun, gate.may_finish = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "support_gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=__import__, args=("half_way_there",))
    thread.start()
    try:
        assert gate.begun.wait(30)
        assert "half_way_there" in sys.modules and imported("half_way_there") is None
        gate.may_finish.set()
        thread.join(30)
        assert imported("half_way_there").value == 1
    finally:
        gate.may_finish.set()
        sys.modules.pop("half_way_there", None)

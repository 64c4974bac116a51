"""A warm worker stays fast: libraries that a run has imported are left out of later garbage collections."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from raysgd.workers.process.reset import MANY_MODULES, Baseline

OBJECTS_EACH = 100


@pytest.fixture
def baseline() -> Iterator[Baseline]:
    made = Baseline()
    made.note_framework()
    yield made
    gc.unfreeze()


def import_libraries(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for number in range(count):
        module = ModuleType(f"library_{number}")
        module.objects = [[] for _ in range(OBJECTS_EACH)]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)


class Cycle:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_run_imported_is_left_out_of_later_collections(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_libraries(monkeypatch, MANY_MODULES)
    garbage = weakref.ref(Cycle())
    assert len(gc.get_objects()) > MANY_MODULES * OBJECTS_EACH
    baseline.settle()
    assert garbage() is None, "garbage would stay for ever"
    assert len(gc.get_objects()) < MANY_MODULES * OBJECTS_EACH / 2


def test_what_a_process_holds_in_its_group_is_not_frozen(baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept group, or one with an instance of the class API, lasts through a reset and is left later."""
    import_libraries(monkeypatch, MANY_MODULES)
    client = Cycle()
    reference = weakref.ref(client)
    baseline.restore(may_freeze=False)
    del client
    baseline.settle()
    assert reference() is None
    assert len(gc.get_objects()) < MANY_MODULES * OBJECTS_EACH / 2


def test_run_that_imports_little_costs_no_collection(baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    import_libraries(monkeypatch, MANY_MODULES // 2)
    gc.disable()  # no collection but that of `settle` frees the cycle
    try:
        garbage = weakref.ref(Cycle())
        frozen = gc.get_freeze_count()
        baseline.settle()
        assert garbage() is not None and gc.get_freeze_count() <= frozen
    finally:
        gc.enable()
        gc.collect()


def test_imports_of_several_runs_add_up(baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    import_libraries(monkeypatch, MANY_MODULES // 2)
    baseline.settle()
    import_libraries(monkeypatch, MANY_MODULES)
    baseline.restore()  # as before a run; it collects anyway
    assert len(gc.get_objects()) < MANY_MODULES * OBJECTS_EACH / 2

"""The collector of garbage is as it was after a large import."""

from __future__ import annotations

import gc

import pytest

from raysgd._util.imports import uncollected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_rests_meanwhile_and_is_as_it_was_afterwards(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ImportError):
            fails_in_its_import()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def fails_in_its_import() -> None:
    with uncollected():
        assert not gc.isenabled()
        raise ImportError("as it comes")

"""Fixtures of searches; `support.searches` implements them, and imports Tune."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def fit(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a search without its display; see `support.searches.fit_in`."""
    from support.searches import fit_in

    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    return fit_in(tmp_path)


@pytest.fixture
def no_leftovers_of_trials(ray_cluster: Any) -> Iterator[None]:
    """Check that the test leaves no resource, placement group or process behind."""
    from support.searches import check_nothing_is_held

    yield
    check_nothing_is_held()

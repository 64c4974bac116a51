"""Fixtures of searches; `support.searches` has what they are made of, and imports Tune."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def fit(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a search without its display; see `support.searches.fit_in`."""
    from support.searches import fit_in

    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    return fit_in(tmp_path)


@pytest.fixture
def nothing_is_left_of_trials(ray_cluster: Any) -> Iterator[None]:
    """The test must leave no resource, placement group or process behind."""
    from support.searches import check_nothing_is_held

    yield
    check_nothing_is_held()

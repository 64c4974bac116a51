"""Fixtures that several modules with real processes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def torch_trainer(
    request: pytest.FixtureRequest, ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A Trainer with torch's process group, as `trainer`; the module's ``TORCH_TRAINER`` has its arguments."""
    from support.runs import make_trainer

    settings = getattr(request.module, "TORCH_TRAINER", {})
    with make_trainer(tmp_path_factory.mktemp("runs"), backend="torch", **settings) as trainer:
        yield trainer

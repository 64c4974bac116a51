"""Machines of tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.drives import Drives
from support.machines import Machines, why_impossible


@pytest.fixture(scope="module")
def machines_of_module(tmp_path_factory: pytest.TempPathFactory, _no_process_is_left: None) -> Iterator[Machines]:
    if (why := why_impossible()) is not None:
        pytest.skip(f"machines cannot be made: {why}")
    with Machines(tmp_path_factory.mktemp("machines"), 3) as made:
        yield made


@pytest.fixture
def machines(machines_of_module: Machines) -> Machines:
    """Return three machines of two CPUs, which are the nodes of a cluster; the first one is its head."""
    machines_of_module.make_whole()
    return machines_of_module


@pytest.fixture
def drives(machines: Machines) -> Iterator[Drives]:
    """Yield what starts drivers on the machines."""
    made = Drives(machines)
    yield made
    made.end()

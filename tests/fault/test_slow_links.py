"""A cable between machines is slow. The machines are namespaces of this one."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from support.machines import Machines

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

RUN_S = 180.0


def causes(machines: Machines, storage: str) -> list[dict[str, Any]]:
    """Train on the three machines, and return what `raysgd why` finds."""
    output = machines.run(0, sys.executable, "-m", "support.link_job", storage, timeout_s=RUN_S)
    (run_dir,) = [line.removeprefix("ran in ") for line in output.splitlines() if line.startswith("ran in ")] or [""]
    assert run_dir, output[-5000:]
    found: list[dict[str, Any]] = json.loads(machines.run(0, "raysgd", "why", "--json", run_dir))["causes"]
    return found


def test_slow_link_is_named(machines: Machines) -> None:
    with machines.slow_cable(1, megabits=200):
        first = causes(machines, str(machines.folder / "slow"))[0]
    assert first["cause"] == "slow link" and first["share"] > 0.3
    assert re.search(r"for 5 MiB: 2\d MiB/s, less than 1 Gbit/s between 3 nodes", first["text"]), first["text"]
    assert "`raysgd doctor --cluster`" in first["remedy"]
    assert "slow link" not in [each["cause"] for each in causes(machines, str(machines.folder / "fast"))]

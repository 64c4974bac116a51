"""``raysgd doctor --cluster`` names what is cut and what is slow. The machines are namespaces of this one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.machines import Machines, why_impossible

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(280),
    pytest.mark.skipif(why_impossible() is not None, reason=f"machines cannot be made: {why_impossible()}"),
]
COMMAND = (sys.executable, "-m", "raysgd.cli")


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Yield three machines of two CPUs; the first two are nodes of a cluster."""
    with Machines(tmp_path_factory.mktemp("machines"), 3) as made:
        for machine in range(3):
            made.boot(machine)
        made.start_ray(0, 1)
        yield made


def doctor(machines: Machines) -> list[dict[str, Any]]:
    """Return the problems that the first machine finds."""
    storage = machines.folder / "storage"
    written = machines.run(0, *COMMAND, "doctor", "--cluster", "--storage-path", str(storage), "--json", timeout_s=90)
    found = json.loads(written[written.index("[") :])
    assert len({one["check"] for one in found if one["check"].startswith("node ")}) == 3, written
    return [one for one in found if one["state"] != "ok"]


def test_what_is_cut_or_slow_is_named(machines: Machines) -> None:
    begin = time.monotonic()
    refused = machines.run(2, *COMMAND, "attach", "nothing", "--address", machines.address(0) + ":6379", timeout_s=60)
    assert "no node of the cluster at" in refused and "runs on this machine" in refused, refused
    assert refused.count("\n") == 1 and time.monotonic() - begin < 20  # 5 s of these are Ray's wait for a node

    machines.start_ray(2)
    machines.run(1, "ip", "route", "add", "blackhole", machines.address(2))
    found = doctor(machines)
    machines.run(1, "ip", "route", "del", "blackhole", machines.address(2))
    (ports,) = [one["what"] for one in found if one["check"] == "ports"]
    assert "machine-1" in ports and "machine-2" in ports and "machine-0" not in ports

    limit = machines.run(2, *"tc qdisc add dev eth0 root tbf rate 50mbit burst 64kb latency 200ms".split())
    if not limit:  # the kernel can make a cable slow
        (slow, *_) = [one for one in doctor(machines) if "slow" in one["what"]]
        assert "machine-2" in slow["check"] and "with all other nodes" in slow["what"]
        machines.run(2, *"tc qdisc del dev eth0 root".split())

    machines.plug(2, is_in=False)
    found = [one for one in doctor(machines) if one["state"] == "wrong"]
    assert [one["check"] for one in found] == [f"node machine-2 ({machines.address(2)})"], found
    assert "does not answer" in found[0]["what"] or "runs no task" in found[0]["what"]

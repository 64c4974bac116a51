"""The time until training continues after a cable was out, on machines of the tests. Driver side."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.measures.base import Measure


def run_cut(system: Any, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from the plugging in of a cable to full size, or to the next step; three machines are namespaces of this one.

    *Grow*: a machine of an elastic group of 2 to 6 was cut off for 25 s. *Controller*: the machine of the driver and of the
    TrainerActor was cut off for 15 s; the GCS is on another one.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from support.drives import Drives, continue_after_a_cut_of_the_controller, grow_after_a_cut
    from support.machines import Machines

    series: dict[str, list[float]] = {"grow_s": [], "controller_s": []}
    with tempfile.TemporaryDirectory() as folder, Machines(Path(folder), 3) as machines:
        for _ in range(params["cuts"]):
            for name, measure in (
                ("grow_s", grow_after_a_cut),
                ("controller_s", continue_after_a_cut_of_the_controller),
            ):
                machines.make_whole()
                drives = Drives(machines)
                driver, seconds = measure(machines, drives)
                driver.stop()
                driver.wait_over()
                series[name].append(seconds)
    return series


CUT = Measure(
    name="cut",
    title="A cable was out, to full size or to the next step",
    systems=("raysgd_elastic",),
    units={"grow_s": "s", "controller_s": "s"},
    timeout_s=900.0,
    params=lambda system, quick: {"cuts": 1 if quick else 3},
    run=run_cut,
)

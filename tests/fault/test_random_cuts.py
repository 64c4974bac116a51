"""Random schedules of cuts and kills on machines, each of which ends by itself.

``RAYSGD_CUTS`` is the number of schedules, ``RAYSGD_CUTS_SEED`` the seed of the first one.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from support.drives import START_S, Drives, make_whole, trains
from support.machines import Machines

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

NUM_SCHEDULES = int(os.environ.get("RAYSGD_CUTS", 1))
FIRST_SEED = int(os.environ.get("RAYSGD_CUTS_SEED", 1))
#: Seconds in which faults begin.
FAULTS_S = 60.0


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES))
def test_random_schedule_of_cuts_and_kills(machines: Machines, drives: Drives, seed: int) -> None:
    draw = random.Random(seed)
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.12}, failure={"max_failures": 50})
    driver.wait_for(trains(6), START_S)
    end = time.monotonic() + FAULTS_S
    while time.monotonic() < end and driver.process.poll() is None:
        kind = draw.choice(["cut", "cut", "two cuts", "worker", "machine"])
        print(f"{time.time():.1f} {kind}", flush=True)
        if kind == "worker":
            machines.signal(draw.randrange(3), "ray::WorkerActor", signal.SIGKILL)
        elif kind == "machine":
            lost = draw.choice([1, 2])
            machines.kill(lost)
            time.sleep(draw.uniform(0, 8))
            machines.boot(lost)
            machines.start_ray(lost)
        else:
            chosen = draw.sample(range(3), 1 + (kind == "two cuts"))
            for machine in chosen:
                machines.plug(machine, is_in=False)
                time.sleep(draw.uniform(0, 1))
            time.sleep(draw.uniform(0.5, 18))
            for machine in chosen:
                machines.plug(machine, is_in=True)
        time.sleep(draw.uniform(0, 6))
    make_whole(machines, driver)
    driver.stop()
    driver.wait_over()

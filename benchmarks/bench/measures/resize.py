"""An elastic group of up to three loses a worker, and is given room for one more.

Shrinking is timed from the SIGKILL to the next step that was finished, by however many ranks. Growing is timed from the
moment at which a job gives its CPU back to the first step of the larger group, and split: until the CPU is taken (the look
for room, which raysgd takes every 2 s), from there to the last step of the smaller group (what
is started while training goes on), and the pause between that and the first step of the larger one.
"""

from __future__ import annotations

import time
from typing import Any

from bench.blows import Training
from bench.systems.fragile import FragileSystem

NAME = "resize"
TITLE = "An elastic group shrinks and grows"
SYSTEMS = ("ray_train", "ray_train_tuned", "raysgd_elastic")
QUICK_SYSTEMS = ("raysgd_elastic",)
UNITS = {"shrink_s": "s", "grow_s": "s", "grow_look_s": "s", "grow_start_s": "s", "grow_pause_s": "s"}
IS_FRESH = True
REPEAT = 1
TIMEOUT_S = 400.0

_SIZE = 3
_REPETITIONS = {"raysgd_elastic": 3}
#: Ray Train's elastic group did not begin within 90 s beside a job that held one of the CPUs, so there was nothing to grow.
_GROWS = ("raysgd_elastic",)
#: Ray Train looks for room once a minute by default; its tuned one as often as raysgd.
_LOOKS_S = {"ray_train": 60.0, "ray_train_tuned": 2.0}
#: Ray Train's steps wait for each save, of which growing needs none there.
_SAVES = {"raysgd_elastic": 10}


def params(system: str, quick: bool) -> dict[str, Any]:
    return {
        "num_cpus": _SIZE,
        "num_workers": [1, _SIZE],
        "repetitions": 1 if quick else _REPETITIONS.get(system, 1),
        "growths": 0 if system not in _GROWS else 1 if quick else _REPETITIONS[system],
        "limit_s": 150.0,
        "look_s": _LOOKS_S.get(system, 2.0),
        "save_every": _SAVES.get(system, 0),
    }


def run(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    system.start(params)
    series: dict[str, list[float]] = {name: [] for name in UNITS}
    for _ in range(params["repetitions"]):
        with system.counting_failures():
            series["shrink_s"].append(_shrink(system, params))
    for _ in range(params["growths"]):
        with system.counting_failures():
            for name, seconds in _grow(system, params).items():
                series[name].append(seconds)
    return {name: samples for name, samples in series.items() if samples}


def _training(system: FragileSystem, params: dict[str, Any]) -> Training:
    return Training(system, limit_s=params["limit_s"], save_every=params["save_every"])


def _shrink(system: FragileSystem, params: dict[str, Any]) -> float:
    with _training(system, params) as training:
        group = training.wait_for_whole(_SIZE)
        struck = training.strike(group)
        return training.wait_after(group).first_step - struck


def _grow(system: FragileSystem, params: dict[str, Any]) -> dict[str, float]:
    from ray.util.placement_group import placement_group, remove_placement_group

    system.reset()  # its processes hold all CPUs
    job = placement_group([{"CPU": 1}])
    if not job.wait(60):
        raise TimeoutError("the CPUs of the group before were not given back")
    system.params["num_workers"] = [_SIZE - 1, _SIZE]
    try:
        with _training(system, params) as training:
            small = training.wait_for("the small group", lambda group: group.size == _SIZE - 1 and group.steps >= 50)
            remove_placement_group(job)
            freed = time.time()
            taken = _wait_until_taken(params["limit_s"])
            large = training.wait_after(small, _SIZE)
            last = training.last_step_of(small)
    finally:  # also where the group never began
        remove_placement_group(job)
    system.params["num_workers"] = params["num_workers"]
    return {
        "grow_s": large.first_step - freed,
        "grow_look_s": taken - freed,
        "grow_start_s": last - taken,
        "grow_pause_s": large.first_step - last,
    }


def _wait_until_taken(limit_s: float) -> float:
    """When the CPU that was given back is in use again."""
    import ray

    deadline, was_free = time.monotonic() + limit_s, False
    while time.monotonic() < deadline:
        is_free = ray.available_resources().get("CPU", 0) >= 1
        if was_free and not is_free:
            return time.time()
        was_free = was_free or is_free
        time.sleep(0.02)
    raise TimeoutError("nobody took the CPU that was given back")

"""What readiness for failures costs while nothing fails, in a loop of 10 ms steps that reports every 10th step.

Two Trainers with two workers each take turns in the same Ray: one as it comes (heartbeats four times in 10 s, the search
for hangs) and with a spare, one whose heartbeats come once in weeks and that has no spare. Each pair of blocks of equal
work gives a percentage. The idle processes of both are there all the time, so what a process uses that does nothing is told
by itself.
"""

from __future__ import annotations

import time
from typing import Any

from bench.notes import gather, note
from bench.systems.fragile import FragileRaysgd, processes_of

NAME = "steady"
TITLE = "Cost of readiness in a 10 ms step that reports every 10th"
SYSTEMS = QUICK_SYSTEMS = ("raysgd_spare",)
UNITS = {"percent": "%", "idle_percent": "%", "step_s": "s"}
IS_FRESH = True
REPEAT = 2
TIMEOUT_S = 300.0

_READY = {"spares": 1, "progress_timeout_s": "auto"}
_RARE = {"heartbeat_timeout_s": 1e7}
_REPORT_EVERY = 10


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"num_cpus": 6, "num_workers": 2, "steps": 100, "pairs": 2 if quick else 25}


def run(system: FragileRaysgd, params: dict[str, Any]) -> dict[str, list[float]]:
    system.start(params)
    count = _calibrate()
    trainers = {}
    try:
        for name, given in {"ready": _READY, "rare": _RARE}.items():
            system.params = {**params, **given}
            trainers[name] = system.make_trainer()
            _block(system, trainers[name], count, 10)
        pairs = []
        for number in range(params["pairs"]):
            order = ("rare", "ready") if number % 2 == 0 else ("ready", "rare")
            took = {name: _block(system, trainers[name], count, params["steps"]) for name in order}
            pairs += list(zip(took["rare"], took["ready"], strict=True))
        idle = _idle_percent()
    finally:
        for trainer in trainers.values():
            trainer.shutdown()
    return {
        "percent": [100 * (ready / rare - 1) for rare, ready in pairs],
        "idle_percent": idle,
        "step_s": [rare / params["steps"] for rare, _ in pairs],
    }


def _calibrate() -> int:
    """Products of a step of 10 ms on this machine; the same for all processes."""
    from bench.busy import BusyStep

    return BusyStep(0.01).count


def _block(system: FragileRaysgd, trainer: Any, count: int, steps: int) -> list[float]:
    """Seconds of a block, by rank."""
    import raysgd

    config = {"out": str(system.folder), "count": count, "steps": steps}
    trainer.run(train, config, callbacks=[raysgd.callbacks.ProgressCallback(mode="off")])
    return gather(system.folder, "block")


def _idle_percent(seconds: float = 3.0) -> list[float]:
    """What workers that do nothing use of a core, as spares do, in percent."""

    def used() -> dict[int, float]:
        return {each.pid: sum(each.cpu_times()[:2]) for each in processes_of("ray::WorkerActor")}

    before = used()
    time.sleep(seconds)
    return [100 * (after - before[pid]) / seconds for pid, after in used().items() if pid in before]


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    import raysgd
    from bench.busy import BusyStep

    step = BusyStep.of(config["count"])
    dist.barrier()
    start = time.perf_counter()
    for i in range(config["steps"]):
        step()
        if i % _REPORT_EVERY == 0:
            raysgd.report(i=i, loss=0.5)
    note(config, "block", dist.get_rank(), time.perf_counter() - start)

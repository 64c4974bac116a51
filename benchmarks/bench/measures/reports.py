"""The cost and the latency of reports. Each measure runs in the driver, its train function in workers."""

from __future__ import annotations

import itertools
import time
from typing import Any

from bench.measures.base import ALL, Measure
from bench.systems.base import System
from bench.worker import NUM_WORKERS, gather, note, session_of

#: Calls per block, blocks, and calls after a pause. Systems whose call blocks get few, and no pauses, which would hide some of
#: the blocking.
_COST_SIZES = {"raysgd": (100, 200, 1000), "ray_train": (1, 4, 0), "ray_train_tuned": (1, 30, 0)}


def _params_of_report_cost(system: str, quick: bool) -> dict[str, Any]:
    block, blocks, paced = _COST_SIZES[system]
    if quick:
        blocks, paced = max(2, blocks // 10), paced // 10
    return {"block": block, "blocks": blocks, "paced": paced}


def run_report_cost(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time ``report`` in the training thread: in a loop that does nothing else, and once per millisecond."""
    system.run(train_report_cost, params)
    costs = gather(system.folder, "costs")
    return {"call_s": [c for cost in costs for c in cost[0]], "paced_call_s": [c for cost in costs for c in cost[1]]}


def train_report_cost(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = session_of(config).report
    for i in range(2):  # these fill queues that stay full
        report({"i": i, "loss": 0.5})
    dist.barrier()
    blocks = []
    for _ in range(config["blocks"]):
        start = time.perf_counter()
        for i in range(config["block"]):
            report({"i": i, "loss": 0.5})
        blocks.append((time.perf_counter() - start) / config["block"])
    time.sleep(0.2)
    paced = []
    for i in range(config["paced"]):
        time.sleep(0.001)
        start = time.perf_counter()
        report({"i": i, "loss": 0.5})
        paced.append(time.perf_counter() - start)
    note(config, "costs", dist.get_rank(), [blocks, paced])


REPORT_COST = Measure(
    name="report_cost",
    title="`report()` in the training thread",
    systems=ALL,
    units={"call_s": "s", "paced_call_s": "s"},
    is_fresh=False,
    repeat=2,
    params=_params_of_report_cost,
    run=run_report_cost,
)


#: The numbers of reports at 10 Hz and at 100 Hz. Ray Train reaches neither rate: its report() blocks.
_LATENCY_COUNTS = {"raysgd": (200, 1000), "ray_train": (4, 0), "ray_train_tuned": (60, 100)}


def _params_of_latency(system: str, quick: bool) -> dict[str, Any]:
    counts = [count // 10 if quick and count > 10 else count for count in _LATENCY_COUNTS[system]]
    return {"rates": [(hz, count) for hz, count in zip((10, 100), counts, strict=True) if count]}


def run_latency(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from ``report`` in a worker to the driver's loop, at a constant rate.

    A round is complete when the last rank has reported, so its time counts.
    """
    return {f"at_{hz}hz_s": _latencies(system, hz, count) for hz, count in params["rates"]}


def _latencies(system: System, hz: int, count: int) -> list[float]:
    rounds: list[tuple[float, list[dict[str, Any]]]] = []
    system.run(train_latency, {"hz": hz, "count": count}, on_report=lambda *arrived: rounds.append(arrived))
    if len(rounds) != count:
        raise RuntimeError(f"{len(rounds)} of {count} rounds arrived")
    latencies = [arrived - max(worker["t"] for worker in workers) for arrived, workers in rounds]
    return latencies[1:]  # the first comes while the run is still being set up


def train_latency(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = session_of(config).report
    dist.barrier()
    begin = time.monotonic()
    for i in range(config["count"]):
        wait_s = begin + i / config["hz"] - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        report({"i": i, "t": time.time()})


LATENCY = Measure(
    name="latency",
    title="`report()` to the driver's loop",
    systems=ALL,
    units={"at_10hz_s": "s", "at_100hz_s": "s"},
    is_fresh=False,
    repeat=2,
    params=_params_of_latency,
    run=run_latency,
)


#: The steps of 10 ms; every tenth reports.
_BUSY_STEPS = {"raysgd": (2000, 100), "ray_train": (30, 20), "ray_train_tuned": (300, 50)}


def run_latency_busy(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from ``report`` in a worker to the driver's loop while the workers keep all cores of a machine with two busy."""
    rounds: list[tuple[float, list[dict[str, Any]]]] = []
    system.run(train_latency_busy, params, on_report=lambda *arrived: rounds.append(arrived))
    if len(rounds) != -(-params["steps"] // _REPORT_EVERY):
        raise RuntimeError(f"{len(rounds)} rounds of {params['steps']} steps arrived")
    latencies = [arrived - max(worker["t"] for worker in workers) for arrived, workers in rounds]
    return {"at_10hz_s": latencies[1:]}


def train_latency_busy(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    from bench.worker import BusyStep

    report, step = session_of(config).report, BusyStep(_STEP_S)
    dist.barrier()
    for i in range(config["steps"]):
        step()
        if i % _REPORT_EVERY == 0:
            report({"i": i, "t": time.time()})


def _params_of_latency_busy(system: str, quick: bool) -> dict[str, Any]:
    full, small = _BUSY_STEPS[system]
    return {"steps": small if quick else full}


LATENCY_BUSY = Measure(
    name="latency_busy",
    title="`report()` to the driver's loop while both cores train",
    systems=ALL,
    units={"at_10hz_s": "s"},
    is_fresh=False,
    repeat=2,
    params=_params_of_latency_busy,
    run=run_latency_busy,
)


#: The reports of each worker; raysgd's exceed its queue in the worker, so that backpressure is included.
_RATE_COUNTS = {"raysgd": (300_000, 20_000), "ray_train": (4, 3), "ray_train_tuned": (60, 10)}


def _params_of_rate(system: str, quick: bool) -> dict[str, Any]:
    full, small = _RATE_COUNTS[system]
    return {"count": small if quick else full}


def run_rate(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Count reports per second: both workers report as fast as they can; each round must arrive complete and in order."""
    check = RoundCheck()
    system.run(train_rate, params, on_report=check)
    if check.num_rounds != params["count"]:
        raise RuntimeError(f"{check.num_rounds} of {params['count']} rounds arrived")
    # The clock starts when the first round arrives, so that round does not count.
    return {"reports_per_s": [NUM_WORKERS * (check.num_rounds - 1) / (check.last - check.first)]}


class RoundCheck:
    """Checks each round when it arrives."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.first = self.last = 0.0

    def __call__(self, arrived: float, workers: list[dict[str, Any]]) -> None:
        if [worker["i"] for worker in workers] != [self.num_rounds] * NUM_WORKERS:
            raise RuntimeError(f"round {self.num_rounds} arrived as {workers}")
        if not self.num_rounds:
            self.first = arrived
        self.num_rounds += 1
        self.last = arrived


def train_rate(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = session_of(config).report
    dist.barrier()
    for i in range(config["count"]):
        report({"i": i, "loss": 0.5})


RATE = Measure(
    name="rate",
    title="Reports a second, 2 workers, none lost",
    systems=ALL,
    units={"reports_per_s": "1/s"},
    is_fresh=False,
    repeat=2,
    params=_params_of_rate,
    run=run_rate,
)


_STEP_S = 0.01
_REPORT_EVERY = 10
#: Steps in a block, threes of blocks.
_OVERHEAD_SIZES = {"raysgd": (100, 60), "ray_train": (20, 2), "ray_train_tuned": (50, 6)}


def _params_of_overhead(system: str, quick: bool) -> dict[str, Any]:
    steps, threes = _OVERHEAD_SIZES[system]
    return {"steps": steps, "threes": 2 if quick else threes}


def run_overhead(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Measure the cost of the service in a loop of 10 ms steps that reports every 10th step, on the cores that train.

    A block with reports and two without come in turns, in another order each time, in the same processes; each three give a
    percentage, and the difference of the loop to itself.
    """
    system.run(train_overhead, params)
    blocks = [three for rank in gather(system.folder, "blocks") for three in rank]
    return {
        "percent": [100 * (reporting / silent - 1) for silent, reporting, _ in blocks],
        "itself_percent": [100 * (again / silent - 1) for silent, _, again in blocks],
        "step_s": [silent / params["steps"] for silent, _, _ in blocks],
    }


def train_overhead(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    from bench.worker import BusyStep

    report, step = session_of(config).report, BusyStep(_STEP_S)

    def block(reports: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for i in range(config["steps"]):
            step()
            if reports and i % _REPORT_EVERY == 0:
                report({"i": i, "loss": 0.5})
        took = time.perf_counter() - start
        time.sleep(0.03)  # reports that are still being sent belong to this block
        return took

    block(True)
    threes = []
    for number in range(config["threes"]):
        took = {}
        for kind in itertools.islice(itertools.cycle(range(3)), number % 3, number % 3 + 3):
            took[kind] = block(kind == 1)
        threes.append((took[0], took[1], took[2]))
    note(config, "blocks", dist.get_rank(), threes)


OVERHEAD = Measure(
    name="overhead",
    title="Cost of the service in a 10 ms step that reports every 10th",
    systems=ALL,
    quick_systems=("ray_train_tuned", "raysgd"),
    units={"percent": "%", "itself_percent": "%", "step_s": "s"},
    is_fresh=False,
    repeat=2,
    params=_params_of_overhead,
    run=run_overhead,
)

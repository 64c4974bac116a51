"""The time until training continues after a fault, and the cost of readiness for faults. Driver side, except train functions."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import psutil

from bench.faults import Training, measure_faults
from bench.measures.base import Measure
from bench.systems import VARIANTS
from bench.systems.fragile import FragileRaysgd, FragileSystem, processes_of
from bench.worker import gather, note

#: Runs, and kills in each. An elastic group that has lost a worker waits before it grows again, so it has one kill per run.
_KILLS = {"ray_train": (1, 2), "ray_train_tuned": (1, 2), "raysgd_elastic": (5, 1), "raysgd_spare": (1, 8)}


def _params_of_kill(system: str, quick: bool) -> dict[str, Any]:
    runs, faults = _KILLS.get(system, (1, 6))
    given = {"num_cpus": 4, "size": 2, "num_workers": 2, "limit_s": 90.0, "runs": runs, "faults": faults}
    if quick:
        given |= {"runs": min(runs, 2), "faults": min(faults, 2)}
    if system == "raysgd_spare":
        given["num_spares"] = 1
    if system == "raysgd_elastic":
        given |= {"num_workers": [1, 2], "save_every": 10}  # it grows back out of a checkpoint
    return given


def run_kill(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from the SIGKILL of one of two workers to the group's next finished step.

    raysgd has a spare process or none, or is an elastic group that continues with the other rank. Ray Train
    restarts the whole group. The bare mechanism is a new process with torch, and a new group.
    """
    system.start(params)
    return {"seconds": measure_faults(system, params)}


KILL = Measure(
    name="kill",
    title="Worker killed to next step",
    systems=("ray_train", "ray_train_tuned", "bare", *VARIANTS),
    quick_systems=("bare", *VARIANTS),
    units={"seconds": "s"},
    timeout_s=300.0,
    params=_params_of_kill,
    run=run_kill,
)


_STOPS = {"raysgd_spare": (1, 3), "raysgd_elastic": (2, 1)}


def _params_of_stop(system: str, quick: bool) -> dict[str, Any]:
    runs, faults = (1, 1) if quick else _STOPS.get(system, (1, 1))
    given = {"num_cpus": 4, "size": 2, "num_workers": 2, "limit_s": 150.0, "runs": runs, "faults": faults}
    if system == "raysgd_spare":
        given["num_spares"] = 1
    if system == "raysgd_elastic":
        given |= {"num_workers": [1, 2], "save_every": 10}  # it grows back out of a checkpoint
    return given


def run_stop(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from a worker's SIGSTOP, which closes no connection, to the group's next finished step.

    raysgd has its default, ``heartbeat_timeout_s=10``; Ray Train has ``RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=10``, because
    its default is 600 s.
    """
    system.start(params)
    return {"seconds": measure_faults(system, params, signal.SIGSTOP)}


STOP = Measure(
    name="stop",
    title="Worker stopped to next step",
    systems=("ray_train", "raysgd_spare", "raysgd_elastic"),
    quick_systems=("raysgd_spare",),
    units={"seconds": "s"},
    timeout_s=300.0,
    environment={"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10"},
    params=_params_of_stop,
    run=run_stop,
)


def _params_of_reliability(system: str, quick: bool) -> dict[str, Any]:
    # Each run has half of the kills, because a failure ends its run.
    faults = 1 if quick else 10
    return {"num_cpus": 8, "size": 5, "num_workers": 5, "limit_s": 60.0, "runs": 2, "faults": faults}


def run_reliability(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Kill one of five ranks twenty times, at random moments; return how often training continued, and how soon.

    Five processes share two cores, as logical CPUs; there is no spare. A try without recovery counts as a failure.
    """
    system.start(params)
    took: list[float] = []
    tries = params["runs"] * params["faults"]
    while len(took) + len(system.failures) < tries:
        faults = min(params["faults"], tries - len(took) - len(system.failures))
        took += measure_faults(system, {**params, "runs": 1, "faults": faults})
    return {"recovered_percent": [100.0 * len(took) / tries], "seconds": took}


RELIABILITY = Measure(
    name="reliability",
    title="A worker of five killed, again and again",
    systems=("raysgd_replace",),
    units={"recovered_percent": "%", "seconds": "s"},
    timeout_s=500.0,
    params=_params_of_reliability,
    run=run_reliability,
)


_SIGNALS = {"killed_s": signal.SIGKILL, "frozen_s": signal.SIGSTOP}


def _params_of_node(system: str, quick: bool) -> dict[str, Any]:
    killed, frozen = (1, 0) if quick or system == "ray_train" else (2, 1)
    spares = 1 if system == "raysgd_spare" else 0
    return {"num_workers": 2, "num_spares": spares, "limit_s": 150.0, "killed_s": killed, "frozen_s": frozen}


def run_node(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from the loss of a node with its worker to the next finished step; another node has room.

    Three nodes on this machine have room for one worker each; the group has two. *Killed*: the processes of a node get SIGKILL,
    which closes their connections. *Frozen*: they are stopped, as when a machine hangs or a cable is cut; only silence shows it.
    """
    series: dict[str, list[float]] = {}
    for name, number in _SIGNALS.items():
        series[name] = []
        for _ in range(params[name]):
            with system.counting_failures(), _nodes(system, params) as cluster:
                series[name].append(_lose_a_node(system, params, cluster, number))
    return series


def _lose_a_node(system: FragileSystem, params: dict[str, Any], cluster: Any, number: int) -> float:
    with Training(system, limit_s=params["limit_s"]) as training:
        group = training.wait_for_whole(2)
        nodes = {node: processes_of_node(node) for node in cluster.worker_nodes}
        hosts = [node for node, processes in nodes.items() if group.pids[-1] in [each.pid for each in processes]]
        sent = time.time()
        try:
            _signal(nodes[hosts[0]], number)
            return training.wait_after(group).first_step - sent
        finally:
            _signal(nodes[hosts[0]], signal.SIGKILL)


def processes_of_node(node: Any) -> list[psutil.Process]:
    """Return the processes that Ray started for a node, its raylet first, with their descendants."""
    found = []
    for started in node.all_processes.values():
        for each in started:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(each.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


@contextlib.contextmanager
def _nodes(system: FragileSystem, params: dict[str, Any]) -> Any:
    """Yield a cluster for the system: a head without CPUs, and three nodes with one CPU each."""
    import ray
    from ray.cluster_utils import Cluster

    system.params = dict(params)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        system.reset()
    finally:
        ray.shutdown()
        cluster.shutdown()


NODE = Measure(
    name="node",
    title="Node lost to next step",
    systems=("ray_train", "raysgd_replace", "raysgd_spare"),
    quick_systems=("raysgd_replace",),
    units={"killed_s": "s", "frozen_s": "s"},
    timeout_s=500.0,
    params=_params_of_node,
    run=run_node,
)


_ELASTIC_SIZE = 3
_REPETITIONS = {"raysgd_elastic": 3}
#: Not Ray Train: its elastic group did not start within 90 s while a job held one of the CPUs, so nothing could grow.
_GROWS = ("raysgd_elastic",)
#: The seconds between two searches for room: Ray Train's default; the tuned one has raysgd's.
_SEARCH_S = {"ray_train": 60.0, "ray_train_tuned": 2.0}
#: Ray Train's steps wait for each save, and it needs none to grow.
_SAVES = {"raysgd_elastic": 10}


def _params_of_resize(system: str, quick: bool) -> dict[str, Any]:
    return {
        "num_cpus": _ELASTIC_SIZE,
        "num_workers": [1, _ELASTIC_SIZE],
        "repetitions": 1 if quick else _REPETITIONS.get(system, 1),
        "growths": 0 if system not in _GROWS else 1 if quick else _REPETITIONS[system],
        "limit_s": 150.0,
        "look_s": _SEARCH_S.get(system, 2.0),
        "save_every": _SAVES.get(system, 0),
    }


def run_resize(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time how an elastic group of up to three shrinks and grows.

    Shrinking is timed from the SIGKILL to the next finished step of a group of any size. Growing is timed from the release of a
    job's CPU to the first step of the larger group, in three parts: until the CPU is taken (raysgd searches every 2 s), from
    there to the last step of the smaller group (a process starts while training continues), and the pause from that to the
    first step of the larger group.
    """
    system.start(params)
    series: dict[str, list[float]] = {name: [] for name in RESIZE.units}
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
        group = training.wait_for_whole(_ELASTIC_SIZE)
        sent = training.send_signal(group)
        return training.wait_after(group).first_step - sent


def _grow(system: FragileSystem, params: dict[str, Any]) -> dict[str, float]:
    from ray.util.placement_group import placement_group, remove_placement_group

    system.reset()  # the system's processes hold all CPUs
    job = placement_group([{"CPU": 1}])
    if not job.wait(60):
        raise TimeoutError("the CPUs of the previous group were not released")
    system.params["num_workers"] = [_ELASTIC_SIZE - 1, _ELASTIC_SIZE]
    try:
        with _training(system, params) as training:
            small = training.wait_for(
                "the small group", lambda group: group.size == _ELASTIC_SIZE - 1 and group.steps >= 50
            )
            remove_placement_group(job)
            freed = time.time()
            taken = _wait_until_taken(params["limit_s"])
            large = training.wait_after(small, _ELASTIC_SIZE)
            last = training.last_step_of(small)
    finally:  # also if the group never formed
        remove_placement_group(job)
    system.params["num_workers"] = params["num_workers"]
    return {
        "grow_s": large.first_step - freed,
        "grow_look_s": taken - freed,
        "grow_start_s": last - taken,
        "grow_pause_s": large.first_step - last,
    }


def _wait_until_taken(limit_s: float) -> float:
    """Wait until the released CPU is in use again, and return the time."""
    import ray

    deadline, was_free = time.monotonic() + limit_s, False
    while time.monotonic() < deadline:
        is_free = ray.available_resources().get("CPU", 0) >= 1
        if was_free and not is_free:
            return time.time()
        was_free = was_free or is_free
        time.sleep(0.02)
    raise TimeoutError("the released CPU was not used again")


RESIZE = Measure(
    name="resize",
    title="An elastic group shrinks and grows",
    systems=("ray_train", "ray_train_tuned", "raysgd_elastic"),
    quick_systems=("raysgd_elastic",),
    units={"shrink_s": "s", "grow_s": "s", "grow_look_s": "s", "grow_start_s": "s", "grow_pause_s": "s"},
    timeout_s=400.0,
    params=_params_of_resize,
    run=run_resize,
)


_READY = {"num_spares": 1, "progress_timeout_s": "auto"}
_RARE = {"heartbeat_timeout_s": 1e7}
_STEADY_REPORT_EVERY = 10


def _params_of_steady(system: str, quick: bool) -> dict[str, Any]:
    return {"num_cpus": 6, "num_workers": 2, "steps": 100, "pairs": 2 if quick else 25}


def run_steady(system: FragileRaysgd, params: dict[str, Any]) -> dict[str, list[float]]:
    """Measure the cost of readiness for failures in a loop of 10 ms steps that reports every 10th step; nothing fails.

    Two Trainers with two workers each take turns in the same Ray. One has default settings (heartbeats four times in 10 s, the
    search for hangs) and a spare; the other has heartbeats once in weeks and no spare. Each pair of blocks of equal work gives
    a percentage. The idle processes of both run all the time, so the CPU of an idle process is measured separately.
    """
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
    """Return the number of products that take 10 ms on this machine, for all processes."""
    from bench.worker import BusyStep

    return BusyStep(0.01).count


def _block(system: FragileRaysgd, trainer: Any, count: int, steps: int) -> list[float]:
    """Run a block of steps, and return its seconds by rank."""
    import raysgd

    config = {"out": str(system.folder), "count": count, "steps": steps}
    trainer.run(train_steady, config, callbacks=[raysgd.callbacks.ProgressCallback(mode="off")])
    return gather(system.folder, "block")


def _idle_percent(seconds: float = 3.0) -> list[float]:
    """Return the percentage of a core that each idle worker uses."""

    def used() -> dict[int, float]:
        return {each.pid: sum(each.cpu_times()[:2]) for each in processes_of("ray::WorkerActor")}

    before = used()
    time.sleep(seconds)
    return [100 * (after - before[pid]) / seconds for pid, after in used().items() if pid in before]


def train_steady(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    import raysgd
    from bench.worker import BusyStep

    step = BusyStep.of(config["count"])
    dist.barrier()
    start = time.perf_counter()
    for i in range(config["steps"]):
        step()
        if i % _STEADY_REPORT_EVERY == 0:
            raysgd.report(i=i, loss=0.5)
    note(config, "block", dist.get_rank(), time.perf_counter() - start)


STEADY = Measure(
    name="steady",
    title="Cost of readiness in a 10 ms step that reports every 10th",
    systems=("raysgd_spare",),
    units={"percent": "%", "idle_percent": "%", "step_s": "s"},
    repeat=2,
    timeout_s=300.0,
    params=_params_of_steady,
    run=run_steady,
)

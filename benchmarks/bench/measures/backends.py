"""Process groups of the frameworks: start, all-reduce, and recovery from a kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bench.faults import Training
from bench.measures.base import Measure
from bench.steps import ENOUGH, open_marks
from bench.systems import FRAMEWORKS, WITH_BACKEND, framework_of
from bench.systems.base import System
from bench.systems.fragile import FragileSystem
from bench.turn_lock import TURN_LOCK_VARIABLE, Turns
from bench.worker import gather, note

Floats = npt.NDArray[np.float32]


class Collective(Protocol):
    """The all-reduce of a framework whose process group has formed."""

    rank: int
    size: int

    def put(self, values: Floats) -> Any:
        """Return an array of the framework."""

    def add_up(self, values: Any) -> Any:
        """Wait for the sum over all ranks and return it; it may be ``values``, changed in place."""

    def get(self, values: Any) -> Floats:
        """Return a sum as a NumPy array."""


class TorchCollective:
    """``torch.distributed``, in place."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.put, self._all_reduce = torch.from_numpy, dist.all_reduce

    def add_up(self, values: Any) -> Any:
        self._all_reduce(values)
        return values

    def get(self, values: Any) -> Floats:
        return np.asarray(values)


class HorovodCollective:
    """Horovod with torch, in place. By the name Horovod knows the same tensor again."""

    def __init__(self) -> None:
        import horovod.torch as hvd
        import torch

        self.rank, self.size = hvd.rank(), hvd.size()
        self.put, self._hvd = torch.from_numpy, hvd

    def add_up(self, values: Any) -> Any:
        return self._hvd.allreduce_(values, op=self._hvd.Sum, name=f"of {len(values)}")

    def get(self, values: Any) -> Floats:
        return np.asarray(values)


class TensorflowCollective:
    """The all-reduce of a custom loop under ``MultiWorkerMirroredStrategy``."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.size, self.put = strategy.num_replicas_in_sync, tf.constant

        def here(values: Any) -> Any:
            on_device = tf.identity(values)  # the argument has no device, which all_reduce asks for
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, on_device)

        self.add_up = tf.function(lambda values: strategy.run(here, (values,)))

    def get(self, values: Any) -> Floats:
        return np.asarray(values)


class JaxCollective:
    """``psum`` over the processes, with one device each."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        self.rank, self.size, self._jax = jax.process_index(), jax.process_count(), jax
        mesh = jax.make_mesh((self.size,), ("rank",))
        self._by_rank = NamedSharding(mesh, PartitionSpec("rank"))
        self._sum = jax.jit(
            jax.shard_map(
                lambda values: jax.lax.psum(values, "rank"),
                mesh=mesh,
                in_specs=PartitionSpec("rank"),
                out_specs=PartitionSpec(),
            )
        )

    def put(self, values: Floats) -> Any:
        return self._jax.make_array_from_process_local_data(self._by_rank, values)

    def add_up(self, values: Any) -> Any:
        return self._jax.block_until_ready(self._sum(values))

    def get(self, values: Any) -> Floats:
        return np.asarray(values.addressable_data(0))


_KINDS: dict[str, Callable[[], Collective]] = {
    "torch": TorchCollective,
    "horovod": HorovodCollective,
    "tensorflow": TensorflowCollective,
    "jax": JaxCollective,
}


def make_collective(framework: str) -> Collective:
    """Return the all-reduce of a framework in this process's group."""
    return _KINDS[framework]()


#: The runs after the first one; after more than three, TensorFlow's processes would be replaced.
_WARM_RUNS = 3


def _params_of_backend_start(system: str, quick: bool) -> dict[str, Any]:
    is_ours = system in WITH_BACKEND.values()
    return {"framework": FRAMEWORKS[system], "warm_runs": (1 if quick else _WARM_RUNS) if is_ours else 0}


def run_backend_start(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time the start of a group until its first all-reduce, of one number: cold, and again with the same Trainer.

    The clock starts at the call (``run``, the launcher's command, the creation of the executor, the first plain process) and
    stops when the last of the two ranks has the sum. Ray was started before, and is idle.
    """
    cold = _start(system, params)
    return {"cold_s": [cold], "warm_s": [_start(system, params) for _ in range(params["warm_runs"])]}


def _start(system: System, params: dict[str, Any]) -> float:
    system.run(train_backend_start, params)
    return float(max(gather(system.folder, "added")) - system.called)


def train_backend_start(config: dict[str, Any]) -> None:
    import numpy as np

    collective = make_collective(config["framework"])
    total = collective.get(collective.add_up(collective.put(np.ones(1, np.float32))))
    added = time.time()
    assert total == [collective.size]
    note(config, "added", collective.rank, added)


BACKEND_START = Measure(
    name="backend_start",
    title="Start to first all-reduce",
    systems=tuple(FRAMEWORKS),
    units={"cold_s": "s", "warm_s": "s"},
    repeat=3,
    params=_params_of_backend_start,
    run=run_backend_start,
)


#: The bytes of an array, and the all-reduces in a block.
SIZES = {
    "4 KiB": (2**12, 200),
    "64 KiB": (2**16, 150),
    "1 MiB": (2**20, 50),
    "16 MiB": (2**24, 6),
    "64 MiB": (2**26, 2),
}


def _partners_of_backend_allreduce(system: str) -> str:
    return framework_of(system)


def _params_of_backend_allreduce(system: str, quick: bool) -> dict[str, Any]:
    return {
        "framework": framework_of(system),
        "blocks": 1 if quick else 12,
        "share": 0.1 if quick else 1.0,
        "settle_s": 0.0 if quick else 3.0,
    }


def run_backend_allreduce(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Return, for each array size, the bytes of one array divided by the time of its all-reduce over two ranks.

    A block has a number of all-reduces of one size. The sizes take turns, and for each size the systems with the same framework,
    which run at the same time (`bench.turn_lock`), so that other load of the machine affects all of them.
    """
    system.run(train_backend_allreduce, {**params, "turn_lock": os.environ.get(TURN_LOCK_VARIABLE)})
    by_rank = gather(system.folder, "blocks")
    return {
        name: [SIZES[name][0] / max(took) for took in zip(*(blocks[name] for blocks in by_rank), strict=True)]
        for name in SIZES
    }


def train_backend_allreduce(config: dict[str, Any]) -> None:
    import numpy as np

    collective = make_collective(config["framework"])
    one = collective.put(np.full(1, 0.0, np.float32))
    arrays = {name: collective.put(np.full(size // 4, 0.0, np.float32)) for name, (size, _) in SIZES.items()}

    def block(name: str) -> float:
        count = max(1, round(SIZES[name][1] * config["share"]))
        collective.add_up(one)
        start = time.perf_counter()
        for _ in range(count):
            collective.add_up(arrays[name])
        return (time.perf_counter() - start) / count

    time.sleep(config["settle_s"])  # Ray starts processes in place of those that it gave out
    for name in SIZES:
        block(name)
    with Turns(config["turn_lock"] if collective.rank == 0 else None) as turns:

        def in_turn(name: str) -> float:
            with turns.one():  # rank 0 takes the turn; the others wait for it in the first all-reduce
                return block(name)

        rounds = [{name: in_turn(name) for name in SIZES} for _ in range(config["blocks"])]
    note(config, "blocks", collective.rank, {name: [each[name] for each in rounds] for name in SIZES})


BACKEND_ALLREDUCE = Measure(
    name="backend_allreduce",
    title="All-reduce",
    systems=("bare", *(system for system in FRAMEWORKS if system != "horovodrun")),
    units=dict.fromkeys(SIZES, "bytes/s"),
    repeat=8,
    #: Ray gives its workers a lower priority, which other processes do not have.
    environment={"RAY_worker_niceness": "0"},
    params=_params_of_backend_allreduce,
    run=run_backend_allreduce,
    partners_of=_partners_of_backend_allreduce,
)


#: Rank 0's clock is sent by all-reduces of float32, which holds integers up to 2**24 only: so in two numbers below this.
_BASE = 2**20
_NUM_FLOATS = 2**16


def _params_of_backend_kill(system: str, quick: bool) -> dict[str, Any]:
    given = {"framework": FRAMEWORKS[system], "size": 3, "num_workers": 3, "num_cpus": 6, "limit_s": 90.0}
    kept = {"max_restarts": 100} if system == "torchrun" else {"num_spares": 1}
    # After more than three kills in a run, TensorFlow's processes would be replaced.
    return {**given, **kept, "runs": 1 if quick else 2, "faults": 1 if quick else 3}


def run_backend_kill(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from the SIGKILL of a rank other than 0, in a loop of all-reduces, to the first step of the next group.

    There are three ranks and a spare process. Only torchrun can be compared: it restarts all ranks.
    """
    system.start(params)
    took: list[float] = []
    for _ in range(params["runs"]):
        training = Training(
            system, limit_s=params["limit_s"], train=train_backend_kill, config={"framework": params["framework"]}
        )
        with system.counting_failures(), training:
            for _ in range(params["faults"]):
                group = training.wait_for_whole(params["size"])
                sent = training.send_signal(group, first_rank=1)
                took.append(training.wait_after(group).first_step - sent)
        system.reset()
    return {"seconds": took}


def train_backend_kill(config: dict[str, Any]) -> None:
    """All-reduce until the file `ENOUGH` exists; record the steps as `bench.steps` does."""
    import numpy as np

    collective, folder = make_collective(config["framework"]), Path(config["steps"])
    rank = collective.rank

    def of_rank_0(*values: float) -> list[int]:
        array = np.zeros(_NUM_FLOATS, np.float32)
        if rank == 0:
            array[: len(values)] = values
        return [int(value) for value in collective.get(collective.add_up(collective.put(array)))[: len(values)]]

    high, low = of_rank_0(*divmod(int(100 * time.time()), _BASE))
    with open_marks(folder, high * _BASE + low, collective.size, rank) as marks:
        is_enough = 0
        while not is_enough:
            (is_enough,) = of_rank_0((folder / ENOUGH).exists())
            marks.write(f"{time.time()!r}\n")
            time.sleep(config["step_s"])


BACKEND_KILL = Measure(
    name="backend_kill",
    title="Rank killed to next step",
    systems=("torchrun", *WITH_BACKEND.values()),
    units={"seconds": "s"},
    timeout_s=300.0,
    params=_params_of_backend_kill,
    run=run_backend_kill,
)

"""An all-reduce of one number in each framework, for tests of backends. Called in workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Total = Callable[[float], float]


def with_torch() -> Total:
    import torch
    import torch.distributed as dist

    def total(value: float) -> float:
        found = torch.tensor(float(value))
        dist.all_reduce(found)
        return float(found)

    return total


def with_torch_by_itself() -> Total:
    """Form the group first, as a script for torchrun does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return with_torch()


def with_horovod_and_torch() -> Total:
    import horovod.torch as hvd
    import torch

    return lambda value: float(hvd.allreduce(torch.tensor(float(value)), op=hvd.Sum, name="total"))


def with_horovod_and_tensorflow() -> Total:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return lambda value: float(hvd.allreduce(tf.constant(float(value)), op=hvd.Sum, name="total"))


def with_tensorflow() -> Total:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def added_up(value: Any) -> Any:
        def here() -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]) * value)

        return strategy.run(here)

    return lambda value: float(strategy.experimental_local_results(added_up(tf.constant(float(value))))[0])


def with_jax() -> Total:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    add_up = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
        )
    )

    def total(value: float) -> float:
        here = np.zeros((jax.local_device_count(),), np.float32)
        here[0] = value
        return float(np.asarray(add_up(jax.make_array_from_process_local_data(sharding, here)).addressable_data(0))[0])

    return total


TOTALS: dict[str, Callable[[], Total]] = {
    "torch": with_torch,
    "env": with_torch_by_itself,
    "horovod-torch": with_horovod_and_torch,
    "horovod-tensorflow": with_horovod_and_tensorflow,
    "tensorflow": with_tensorflow,
    "jax": with_jax,
}

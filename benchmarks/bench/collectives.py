"""An all-reduce in each framework, the same code whoever has brought the processes together. Worker side."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Collective(Protocol):
    """An all-reduce of arrays in a framework that is initialised."""

    rank: int
    size: int

    def put(self, values: Floats) -> Any:
        """What the framework computes with."""

    def add_up(self, values: Any) -> Any:
        """The sum over all ranks; returns when it is there. May be ``values`` itself, changed."""

    def get(self, values: Any) -> Floats:
        """The numbers of a sum."""


class OfTorch:
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


class OfHorovod:
    """Horovod with torch, in place. It needs a name, so that the same tensor is known again."""

    def __init__(self) -> None:
        import horovod.torch as hvd
        import torch

        self.rank, self.size = hvd.rank(), hvd.size()
        self.put, self._hvd = torch.from_numpy, hvd

    def add_up(self, values: Any) -> Any:
        return self._hvd.allreduce_(values, op=self._hvd.Sum, name=f"of {len(values)}")

    def get(self, values: Any) -> Floats:
        return np.asarray(values)


class OfTensorflow:
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


class OfJax:
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
    "torch": OfTorch,
    "horovod": OfHorovod,
    "tensorflow": OfTensorflow,
    "jax": OfJax,
}


def make_collective(framework: str) -> Collective:
    """The all-reduce of a framework, in the group that this process is in."""
    return _KINDS[framework]()

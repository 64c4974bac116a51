"""TensorFlow's strategy for several workers, for datasets that are split over them already. Worker side.

TensorFlow assumes that a dataset holds the data of all workers: it divides each batch by the number of workers, even if
auto-sharding is off, and reads ahead of the loop. Keras's ``fit`` distributes every dataset this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_OFF = tf.data.experimental.AutoShardPolicy.OFF


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """`tf.distribute.MultiWorkerMirroredStrategy` that keeps the batches of a worker's own shard.

    A dataset with auto-sharding switched off, such as one from ``to_tf`` (also after ``.map(...)``), counts as a shard. In
    ``fit(dataset)``, ``evaluate(dataset)`` and ``experimental_distribute_dataset(dataset)`` each of its batches is one step
    of this worker, keeps its size, and is read when the loop asks for it. The same holds for
    ``distribute_datasets_from_function``. Other datasets are distributed as in TensorFlow.

    A worker with several GPUs takes one batch for each GPU in a step. A worker whose shard ends early continues with empty
    batches until all shards have ended.
    """

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        if not _is_shard(dataset):
            return super().experimental_distribute_dataset(dataset, options)
        return self.distribute_datasets_from_function(lambda _: dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        if options is None:  # no read-ahead: rows read ahead would count as consumed
            options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=0)
        return super().distribute_datasets_from_function(dataset_fn, options)


def _is_shard(dataset: Any) -> bool:
    return isinstance(dataset, tf.data.Dataset) and dataset.options().experimental_distribute.auto_shard_policy == _OFF

"""TensorFlow's strategy for several workers, for datasets that are dealt to them already. Worker side.

TensorFlow takes what it is given for the data of all workers: it divides each batch by their number, also where automatic
sharding is off, and reads ahead of the loop. Keras's ``fit`` has it do so with every dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_OFF = tf.data.experimental.AutoShardPolicy.OFF


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """`tf.distribute.MultiWorkerMirroredStrategy`, which takes the batches of a worker's own share as they are.

    A dataset with automatic sharding switched off, as ``to_tf`` gives it, also behind ``.map(...)``, is such a share:
    in ``fit(dataset)``, ``evaluate(dataset)`` and ``experimental_distribute_dataset(dataset)`` each batch is one step of this
    worker, of the size that it has, and is taken when the loop asks for it. So it is with datasets made by
    ``distribute_datasets_from_function``. Whatever is not a share is distributed as TensorFlow does it.

    A worker with several GPUs takes a batch for each of them in a step. Workers whose shares end earlier than others' go on
    with batches of no rows until all have ended.
    """

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        if not _is_share(dataset):
            return super().experimental_distribute_dataset(dataset, options)
        return self.distribute_datasets_from_function(lambda _: dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        if options is None:  # nothing is read ahead of the loop: it would count as consumed
            options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=0)
        return super().distribute_datasets_from_function(dataset_fn, options)


def _is_share(dataset: Any) -> bool:
    return isinstance(dataset, tf.data.Dataset) and dataset.options().experimental_distribute.auto_shard_policy == _OFF

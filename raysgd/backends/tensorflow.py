"""The TensorFlow backend: ``TF_CONFIG`` for `tf.distribute.MultiWorkerMirroredStrategy`, which train_func makes itself.

Three facts shape it (see doc/design/0021-backends.md). TensorFlow has one server a process, for good, which is part of its
global context; a context can be thrown away, by a function that TensorFlow has for its own tests. Collectives wait for a dead
peer for ever, but can be aborted. Keras 3's ``fit`` does not work under this strategy, Keras 2's does: ``tf.keras`` is that
one here, where its package ``tf_keras`` is installed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from raysgd.backends.base import Backend, BackendConfig, Member
from raysgd.backends.legacy_keras import has_legacy_keras, use_legacy_keras
from raysgd.backends.meeting import MeetingPlace, free_address
from raysgd.config.checks import check_amount
from raysgd.errors import RaySGDError

#: The status code of gRPC and TensorFlow.
_UNAVAILABLE = 14
#: TensorFlow never ends a context's server: each leaves a port and some hundred threads, which do nothing.
_MAX_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """Settings of TensorFlow's multi-worker strategy.

    Attributes:
        legacy_keras: Have ``tf.keras`` be Keras 2 (the package ``tf_keras``), whose ``fit`` works under
            ``MultiWorkerMirroredStrategy``. False, or without that package: it is what is installed, Keras 3.
        replace_workers: After a failure or a resize, and for the next run, have new processes in place of those that were in
            a group. False: they throw their TensorFlow context away and go on, which takes half a second; what was made in
            it, such as a model in a global variable, is of no use then. After four groups a process is replaced, since
            TensorFlow leaves threads behind.
        init_timeout_s: Seconds for all members to meet.
    """

    name: ClassVar[str] = "tensorflow"
    legacy_keras: bool = True
    replace_workers: bool = False
    init_timeout_s: float = 30

    def __post_init__(self) -> None:
        check_amount("TensorflowConfig(init_timeout_s)", self.init_timeout_s, positive=True)

    @property
    def reforms_in_process(self) -> bool:
        return not self.replace_workers

    def make(self) -> Backend:
        return TensorflowBackend(self)


class TensorflowBackend(Backend):
    """One process's place in a TensorFlow cluster."""

    def __init__(self, config: TensorflowConfig) -> None:
        self._config = config
        self._place = MeetingPlace()
        self._has_joined = False
        self._num_groups = 0

    def load(self) -> None:
        if self._config.legacy_keras:
            use_legacy_keras()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        try:
            import tensorflow  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "backend='tensorflow' needs TensorFlow in the workers: pip install raysgd[tensorflow]"
            ) from error
        _switch_health_checks_off()

    def warm_up(self) -> None:
        import tensorflow as tf

        with contextlib.suppress(ImportError, AttributeError):
            _ = tf.keras.layers.Dense  # Keras is imported when it is looked at

    def open_rendezvous(self, node_ip: str) -> str:
        return self._place.open(node_ip)

    def is_worn_out(self) -> bool:
        return self._num_groups >= _MAX_GROUPS

    def set_up(self, member: Member) -> None:
        self._has_joined = True
        self._num_groups += 1
        addresses = self._place.meet(member, free_address(member.node_ip), self._config.init_timeout_s)
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": member.rank}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)

    def tear_down(self) -> None:
        self._place.close()
        os.environ.pop("TF_CONFIG", None)
        if self._has_joined and not self._config.replace_workers:
            import tensorflow as tf
            from tensorflow.python.eager import context

            with contextlib.suppress(ImportError, AttributeError):
                tf.keras.backend.clear_session()
            context._reset_context()
            gc.collect()
        self._has_joined = False

    def abort(self) -> None:
        from tensorflow.python.eager import context  # there is no public way

        with contextlib.suppress(Exception):  # whatever comes of it, the attempt must end
            if self._has_joined and context.context()._initialized:
                context.context().abort_collective_ops(_UNAVAILABLE, "the attempt has ended")

    def is_collective_error(self, error: BaseException) -> bool:
        import tensorflow as tf

        if isinstance(error, RaySGDError) or not isinstance(error, tf.errors.OpError):
            return False
        if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            return True
        # The second: another process has got the port meanwhile.
        return any(words in str(error) for words in ("ollective", "Could not start gRPC server"))

    def explain(self, error: BaseException) -> str | None:
        # What Keras 3 makes of a batch for several workers.
        if not isinstance(error, ValueError) or "to convert a value (PerReplica" not in str(error):
            return None
        if not has_legacy_keras():
            way = "install it in the workers, pip install tf_keras, and tf.keras is Keras 2"
        elif not self._config.legacy_keras:
            way = "leave TensorflowConfig(legacy_keras=True) at its default, and tf.keras is Keras 2"
        else:
            way = "make the model with tf.keras, which is Keras 2 here, rather than with `import keras`"
        return f"raysgd: Keras 3's fit does not work under MultiWorkerMirroredStrategy. Keras 2's does: {way}."


def _switch_health_checks_off() -> None:
    """The strategy looks every 30 s whether its peers are there, in a thread that outlives a broken group: raysgd does that."""
    from tensorflow.python.distribute import collective_all_reduce_strategy

    extended: Any = collective_all_reduce_strategy.CollectiveAllReduceExtended
    if hasattr(extended, "_enable_check_health"):
        extended._enable_check_health = False

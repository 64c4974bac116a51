"""The TensorFlow backend: sets ``TF_CONFIG`` for the `tf.distribute.MultiWorkerMirroredStrategy` that train_func creates.

Three facts shape it (doc/design/0021-backends.md). TensorFlow has one server per process, as part of its global context; a
function that TensorFlow has for its own tests discards the context. Collectives wait for a dead peer for ever, but can be
aborted. Keras 3's ``fit`` does not work under this strategy, and Keras 2's does; so ``tf.keras`` is Keras 2 if its package
``tf_keras`` is installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import socket
from dataclasses import dataclass
from typing import Any, ClassVar

from raysgd.backends.addresses import address_of, reserve_port
from raysgd.backends.base import Backend, BackendConfig, Member
from raysgd.config.argument_names import refuse_unknown_fields

#: The status code of gRPC and TensorFlow.
_UNAVAILABLE = 14
#: TensorFlow never stops a context's server: each leaves a port and some hundred idle threads behind.
_MAX_GROUPS = 4
#: TensorFlow reads this variable when ``tf.keras`` is first used.
_LEGACY_KERAS_VARIABLE = "TF_USE_LEGACY_KERAS"


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """Settings of TensorFlow's multi-worker strategy.

    Attributes:
        legacy_keras: Make ``tf.keras`` Keras 2 (the package ``tf_keras``), whose ``fit`` works under
            ``MultiWorkerMirroredStrategy``. False, or without that package: ``tf.keras`` is the installed Keras 3.
        replace_workers: Start new processes after a failure, after a resize and for the next run. False: the processes
            discard their TensorFlow context and continue, which takes half a second; objects of the old context, such as a
            model in a global variable, are invalid then. A process is replaced after four groups all the same, because
            TensorFlow leaves threads behind.
    """

    name: ClassVar[str] = "tensorflow"
    opens_on_all_ranks: ClassVar[bool] = True
    legacy_keras: bool = True
    replace_workers: bool = False

    @property
    def can_rejoin(self) -> bool:
        return not self.replace_workers

    def make_backend(self) -> Backend:
        return TensorflowBackend(self)


class TensorflowBackend(Backend):
    """The membership of one worker process in a TensorFlow cluster."""

    def __init__(self, config: TensorflowConfig) -> None:
        self._config = config
        self._port: socket.socket | None = None
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
        _disable_health_checks()

    def warm_up(self) -> None:
        import tensorflow as tf

        with contextlib.suppress(ImportError, AttributeError):
            _ = tf.keras.layers.Dense  # Keras is imported on first access

    def open_rendezvous(self, node_ip: str) -> str:
        self._release_port()
        self._port = reserve_port(node_ip)
        return address_of(self._port)

    def should_replace_process(self) -> bool:
        return self._num_groups >= _MAX_GROUPS

    def init_process_group(self, member: Member) -> None:
        self._has_joined = True
        self._num_groups += 1
        self._release_port()  # for the server of the strategy that train_func makes; TensorFlow's gRPC shares no ports
        workers = json.loads(member.rendezvous)
        cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": member.rank}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)

    def destroy_process_group(self) -> None:
        self._release_port()
        os.environ.pop("TF_CONFIG", None)
        if self._has_joined and not self._config.replace_workers:
            import tensorflow as tf
            from tensorflow.python.eager import context

            with contextlib.suppress(ImportError, AttributeError):
                tf.keras.backend.clear_session()
            context._reset_context()
            gc.collect()
        self._has_joined = False

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def abort_process_group(self) -> None:
        from tensorflow.python.eager import context  # TensorFlow has no public way to abort collectives

        with contextlib.suppress(Exception):  # the attempt must end in any case
            if self._has_joined and context.context()._initialized:
                context.context().abort_collective_ops(_UNAVAILABLE, "the attempt has ended")

    def is_collective_error(self, error: BaseException) -> bool:
        import tensorflow as tf

        if not isinstance(error, tf.errors.OpError):
            return False
        if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            return True
        # A gRPC server does not start if another process has taken the port meanwhile.
        return any(words in str(error) for words in ("ollective", "Could not start gRPC server"))

    def explain_error(self, error: BaseException) -> str | None:
        # Keras 3 raises this for a batch of several workers.
        if not isinstance(error, ValueError) or "to convert a value (PerReplica" not in str(error):
            return None
        if not has_legacy_keras():
            advice = "install it in the workers, pip install tf_keras, and tf.keras is Keras 2"
        elif not self._config.legacy_keras:
            advice = "leave TensorflowConfig(legacy_keras=True) at its default, and tf.keras is Keras 2"
        else:
            advice = "make the model with tf.keras, which is Keras 2 here, rather than with `import keras`"
        return f"raysgd: Keras 3's fit does not work under MultiWorkerMirroredStrategy. Keras 2's does: {advice}."


def _disable_health_checks() -> None:
    # The strategy checks its peers every 30 s in a thread that outlives a broken group; raysgd checks them itself.
    from tensorflow.python.distribute import collective_all_reduce_strategy

    extended: Any = collective_all_reduce_strategy.CollectiveAllReduceExtended
    if hasattr(extended, "_enable_check_health"):
        extended._enable_check_health = False


def has_legacy_keras() -> bool:
    """Return True if Keras 2, the package ``tf_keras``, is installed."""
    return importlib.util.find_spec("tf_keras") is not None


def use_legacy_keras() -> bool:
    """Make ``tf.keras`` Keras 2 and return True, if Keras 2 is installed; call it before TensorFlow is imported."""
    if not has_legacy_keras():
        return False
    os.environ[_LEGACY_KERAS_VARIABLE] = "1"
    return True

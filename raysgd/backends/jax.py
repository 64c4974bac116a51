"""The JAX backend: `jax.distributed` over all workers, with gloo between CPUs.

Two facts shape it (see doc/design/0021-backends.md). JAX's coordination service usually lives in process 0, and every other
process ends itself when that one dies: here it is in the coordinator's process, so that any worker may die. And with its
recoverability switched on, a process that has left a broken group, and has dropped its devices, can join another one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raysgd.backends import gloo_sockets
from raysgd.backends.base import Backend, BackendConfig, Coordinator, Member
from raysgd.backends.gloo_sockets import GlooGroup
from raysgd.backends.meeting import free_address
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.errors import ConfigError, RaySGDError

_HOW_TO_GET_IT = "backend='jax' needs JAX in the workers: pip install raysgd[jax]"
_KEY = "raysgd/gloo"
#: Ports that the service is tried at.
_MAX_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class JaxConfig(BackendConfig):
    """Settings of `jax.distributed`.

    Attributes:
        devices_per_worker: How many virtual devices a worker on CPUs has; of GPUs and TPUs it has those it was given.
        collectives: What CPU devices of several workers communicate by: ``"gloo"`` or ``"mpi"``.
        platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``; None: GPUs where workers are given them, CPUs elsewhere.
        init_timeout_s: Seconds for all members to join.
        timeout_s: Seconds without a sign of life after which JAX's service takes a member for dead. raysgd finds out before
            that (`raysgd.FailureConfig`); this is for what it cannot see.
    """

    name: ClassVar[str] = "jax"
    is_coordinated: ClassVar[bool] = True
    devices_per_worker: int = 1
    collectives: str = "gloo"
    platform: str | None = None
    init_timeout_s: float = 30
    timeout_s: float = 100

    def __post_init__(self) -> None:
        check_count("JaxConfig(devices_per_worker)", self.devices_per_worker, minimum=1)
        check_choice("JaxConfig(collectives)", self.collectives, ("gloo", "mpi"))
        if self.platform is not None:
            check_choice("JaxConfig(platform)", self.platform, ("cpu", "cuda", "rocm", "tpu"))
        check_amount("JaxConfig(init_timeout_s)", self.init_timeout_s, positive=True)
        check_amount("JaxConfig(timeout_s)", self.timeout_s, positive=True)

    def make(self) -> Backend:
        return JaxBackend(self)

    def make_coordinator(self) -> Coordinator:
        return JaxCoordinator(self.timeout_s)


class JaxCoordinator(Coordinator):
    """JAX's coordination service, one for each group."""

    def __init__(self, timeout_s: float) -> None:
        _quieten()
        try:
            from jaxlib import _jax  # without jax, whose import takes five times as long
        except ImportError as error:
            raise ImportError(_HOW_TO_GET_IT) from error
        self._make: Any = _jax.get_distributed_runtime_service
        self._timeout_s = timeout_s
        self._service: Any = None

    def open(self, node_ip: str, members: Sequence[Member]) -> str:
        service, self._service = self._service, None
        if service is not None:
            service.shutdown()
        for tries_left in reversed(range(_MAX_TRIES)):
            address = free_address(node_ip)
            try:
                self._service = self._make(
                    address,
                    len(members),
                    heartbeat_timeout=math.ceil(self._timeout_s),
                    shutdown_timeout=1,
                    recoverable=True,
                )
                break
            except Exception:  # another process has got the port meanwhile
                if not tries_left:
                    raise
        return address


class JaxBackend(Backend):
    """One process's membership in `jax.distributed`."""

    def __init__(self, config: JaxConfig) -> None:
        self._config = config
        self._gloo = GlooGroup()
        self._has_joined = False

    def load(self) -> None:
        _quieten()
        try:
            import jax  # noqa: F401
        except ImportError as error:
            raise ImportError(_HOW_TO_GET_IT) from error
        _configure("jax_enable_recoverability", True)

    def set_up(self, member: Member) -> None:
        import jax

        _check_devices_are_new()
        self._choose_devices(member)
        self._has_joined = True
        before = gloo_sockets.listeners()
        jax.distributed.initialize(
            coordinator_address=member.rendezvous,
            num_processes=member.world_size,
            process_id=member.rank,
            cluster_detection_method="deactivate",
            # Process 0 opens a service of its own in any case. Nobody comes there.
            coordinator_bind_address=free_address(member.node_ip),
            initialization_timeout=math.ceil(self._config.init_timeout_s),
            heartbeat_timeout_seconds=math.ceil(self._config.timeout_s),
            shutdown_timeout_seconds=1,
        )
        jax.devices()  # makes gloo's listener
        self._gloo = self._meet(member, gloo_sockets.listeners() - before)

    def tear_down(self) -> None:
        import jax
        import jax.extend

        if not self._has_joined:
            return
        self._has_joined = False
        self._gloo = GlooGroup()
        for step in (
            gc.collect,
            _forget_effects,
            jax.extend.backend.clear_backends,
            jax.distributed.shutdown,
            gc.collect,
        ):
            with contextlib.suppress(Exception):  # what is broken already
                step()

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # whatever comes of it, the attempt must end
            self._gloo.cut()

    def is_collective_error(self, error: BaseException) -> bool:
        import jax

        if isinstance(error, RaySGDError):
            return False
        text = str(error).lower()
        if type(error) is ValueError:  # so says jaxlib where an array is read whose collective has failed
            return "gloo" in text
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return False
        return any(word in text for word in ("gloo", "nccl", "unavailable", "coordination", "connection", "heartbeat"))

    def _choose_devices(self, member: Member) -> None:
        platform = self._config.platform or ("cuda" if member.has_gpu else "cpu")
        _configure("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        if platform == "cpu":
            _configure("jax_num_cpu_devices", self._config.devices_per_worker)
            _configure("jax_cpu_collectives_implementation", self._config.collectives)

    def _meet(self, member: Member, own: set[gloo_sockets.Address]) -> GlooGroup:
        """Tell the other members where this one listens, and hear it of them, by way of the service."""
        from jax._src.distributed import global_state  # there is no public way

        client: Any = global_state.client
        client.key_value_set(f"{_KEY}/{member.rank}", json.dumps(sorted(own)))
        wait_ms = math.ceil(self._config.init_timeout_s * 1000)
        told = [client.blocking_key_value_get(f"{_KEY}/{rank}", wait_ms) for rank in range(member.world_size)]
        return GlooGroup.of(own, [json.loads(each) for each in told])


def _quieten() -> None:
    """XLA tells of each step of the service, unless this is said before it is loaded."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _check_devices_are_new() -> None:
    """Those of a process are fixed when its first array is made, which is too early before the group is there.

    Raises:
        ConfigError: There are devices. They, and the arrays on them, are dropped, so that the next attempt has new ones.
    """
    import jax.extend
    from jax._src import xla_bridge  # there is no public way

    backends: Any = jax.extend.backend
    if xla_bridge.backends_are_initialized():
        backends.clear_backends()
        raise ConfigError(
            "JAX arrays were made before train_func was entered: in its config, in a global variable, when a module was "
            "imported, or by a function of execute. Make them within train_func, or give NumPy arrays."
        )


def _forget_effects() -> None:
    """Of a step that broke off, as of `jax.debug.print`: `clear_backends` would wait for them, raise, and keep the devices."""
    from jax._src import dispatch  # there is no public way

    tokens: Any = dispatch.runtime_tokens
    tokens.clear()


def _configure(name: str, value: Any) -> None:
    import jax

    settings: Any = jax.config
    settings.update(name, value)

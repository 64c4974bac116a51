"""The JAX backend: `jax.distributed` over all workers, with gloo between CPUs. Runs in workers, its config anywhere.

Two facts shape it (doc/design/0021-backends.md). JAX's coordination service usually runs in process 0, and every other
process exits when process 0 dies. Here the service runs in the coordinator's process, so that any worker may die. And with
``jax_enable_recoverability`` a process that has left a broken group and dropped its devices can join another group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from raysgd.backends.addresses import find_free_address
from raysgd.backends.base import Backend, BackendConfig, Coordinator, Member, refuse_shared_gpu
from raysgd.backends.gloo_sockets import Address, GlooListeners, list_listeners
from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_bool, check_choice, check_count
from raysgd.errors import ConfigError
from raysgd.session import context

_INSTALL_HINT = "backend='jax' needs JAX in the workers: pip install raysgd[jax]"
_KEY = "raysgd/gloo"
#: The number of ports to try for the service.
_MAX_TRIES = 3
#: The time for computations to end when a process leaves its group; as long again after its connections were shut down.
_LEAVE_S = 5.0
#: What belongs to the devices of this process, such as compiled steps. It is dropped with the devices when the group ends.
held_with_devices: dict[Any, Any] = {}


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class JaxConfig(BackendConfig):
    """Settings of `jax.distributed`.

    Attributes:
        devices_per_worker: The number of virtual devices of a worker on CPUs; GPUs and TPUs are those it was given.
        collectives: How CPU devices of several workers communicate: ``"gloo"`` or ``"mpi"``.
        platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``. None: GPUs if workers are given GPUs, else CPUs.
        init_timeout_s: The time for all members to join.
        timeout_s: The time without a heartbeat after which JAX's service regards a member as dead. raysgd's own detection
            (`raysgd.FailureConfig`) is faster; this is the fallback for what raysgd cannot see.
        keep_group: Whether workers stay in their group from one run to the next, with their arrays and compiled functions of
            modules. A later run with the same workers does not refuse arrays from before train_func.
    """

    name: ClassVar[str] = "jax"
    has_coordinator: ClassVar[bool] = True
    devices_per_worker: int = 1
    collectives: Literal["gloo", "mpi"] = "gloo"
    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None
    init_timeout_s: float = 30
    timeout_s: float = 100
    keep_group: bool = False

    def __post_init__(self) -> None:
        check_count("JaxConfig(devices_per_worker)", self.devices_per_worker, minimum=1)
        check_choice("JaxConfig(collectives)", self.collectives, ("gloo", "mpi"))
        if self.platform is not None:
            check_choice("JaxConfig(platform)", self.platform, ("cpu", "cuda", "rocm", "tpu"))
        check_amount("JaxConfig(init_timeout_s)", self.init_timeout_s, positive=True)
        check_amount("JaxConfig(timeout_s)", self.timeout_s, positive=True)

        check_bool("JaxConfig(keep_group)", self.keep_group)

    @property
    def keeps_group(self) -> bool:
        return self.keep_group

    def make_backend(self) -> Backend:
        return JaxBackend(self)

    def make_coordinator(self) -> Coordinator:
        return JaxCoordinator(self.timeout_s)


class JaxCoordinator(Coordinator):
    """Runs JAX's coordination service, one for each group."""

    def __init__(self, timeout_s: float) -> None:
        _reduce_logging()
        try:
            from jaxlib import _jax  # without jax, whose import takes five times as long
        except ImportError as error:
            raise ImportError(_INSTALL_HINT) from error
        self._make: Any = _jax.get_distributed_runtime_service
        self._timeout_s = timeout_s
        self._service: Any = None

    def open_rendezvous(self, node_ip: str, members: Sequence[Member]) -> str:
        service, self._service = self._service, None
        if service is not None:
            service.shutdown()
        for tries_left in reversed(range(_MAX_TRIES)):
            address = find_free_address(node_ip)
            try:
                self._service = self._make(
                    address,
                    len(members),
                    heartbeat_timeout=math.ceil(self._timeout_s),
                    shutdown_timeout=1,
                    recoverable=True,
                )
                break
            except Exception:  # another process may have taken the port meanwhile
                if not tries_left:
                    raise
        return address


class JaxBackend(Backend):
    """The membership of one worker process in `jax.distributed`."""

    can_import_early: ClassVar[bool] = False  # some modules make arrays, which would fix the devices

    def __init__(self, config: JaxConfig) -> None:
        self._config = config
        self._gloo = GlooListeners()
        self._member: Member | None = None
        self._is_stuck = False

    def load(self) -> None:
        _reduce_logging()
        try:
            import jax  # noqa: F401
        except ImportError as error:
            raise ImportError(_INSTALL_HINT) from error
        _configure("jax_enable_recoverability", True)
        _time_compilations()

    def init_process_group(self, member: Member) -> None:
        import jax

        member = replace(member, attempt=0)
        if member == self._member:  # the group was kept
            return
        self._check_gpus(member)
        _check_no_devices()
        self._choose_devices(member)
        self._member = member
        before = list_listeners()
        jax.distributed.initialize(
            coordinator_address=member.rendezvous,
            num_processes=member.world_size,
            process_id=member.rank,
            cluster_detection_method="deactivate",
            # Process 0 starts a service of its own in any case; no process connects to it.
            coordinator_bind_address=find_free_address(member.node_ip),
            initialization_timeout=math.ceil(self._config.init_timeout_s),
            heartbeat_timeout_seconds=math.ceil(self._config.timeout_s),
            shutdown_timeout_seconds=1,
        )
        jax.devices()  # opens gloo's listener
        self._gloo = self._exchange_listeners(member, list_listeners() - before)

    def destroy_process_group(self) -> None:
        if self._member is None:
            return
        self._member = None
        held_with_devices.clear()
        # JAX waits for computations that have begun. One may wait for a rank that has left, or for a connection to it.
        leaving = threading.Thread(target=_leave, name="raysgd-jax-leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
        if leaving.is_alive():
            self.abort_process_group()
            leaving.join(_LEAVE_S)
        self._is_stuck = leaving.is_alive()
        self._gloo = GlooListeners()

    def should_replace_process(self) -> bool:
        return self._is_stuck

    def abort_process_group(self) -> None:
        with contextlib.suppress(OSError):  # the attempt must end in any case
            self._gloo.shut_down()

    def is_collective_error(self, error: BaseException) -> bool:
        import jax

        text = str(error).lower()
        if type(error) is ValueError:  # jaxlib raises it when an array is read whose collective has failed
            return "gloo" in text
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return False
        return any(word in text for word in ("gloo", "nccl", "unavailable", "coordination", "connection", "heartbeat"))

    def _platform_of(self, member: Member) -> str:
        return self._config.platform or ("cuda" if member.has_gpu else "cpu")

    def _check_gpus(self, member: Member) -> None:
        if member.shares_gpu and member.world_size > 1 and self._platform_of(member) in ("cuda", "rocm"):
            raise ConfigError(
                f"{refuse_shared_gpu(member)} Give each worker a GPU of its own (gpus_per_worker=1), or train on CPUs "
                '(JaxConfig(platform="cpu")). Workers that do not communicate can share a GPU with backend="none": set '
                "XLA_PYTHON_CLIENT_MEM_FRACTION for each, because JAX takes three quarters of the memory."
            )

    def _choose_devices(self, member: Member) -> None:
        platform = self._platform_of(member)
        _configure("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        if platform == "cpu":
            _configure("jax_num_cpu_devices", self._config.devices_per_worker)
            _configure("jax_cpu_collectives_implementation", self._config.collectives)

    def _exchange_listeners(self, member: Member, own: set[Address]) -> GlooListeners:
        from jax._src.distributed import global_state  # JAX has no public access to the service's key-value store

        client: Any = global_state.client
        client.key_value_set(f"{_KEY}/{member.rank}", json.dumps(sorted(own)))
        wait_ms = math.ceil(self._config.init_timeout_s * 1000)
        values = [client.blocking_key_value_get(f"{_KEY}/{rank}", wait_ms) for rank in range(member.world_size)]
        return GlooListeners.from_exchange(own, [json.loads(value) for value in values])


def _reduce_logging() -> None:
    # Without this XLA logs each step of the service; it is read when XLA is loaded.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _leave() -> None:
    import jax
    import jax.extend

    for step in (
        gc.collect,
        _clear_pending_effects,
        jax.extend.backend.clear_backends,
        jax.distributed.shutdown,
        gc.collect,
    ):
        with contextlib.suppress(Exception):  # the group may be broken already
            step()


def _check_no_devices() -> None:
    """Refuse arrays from before the group: JAX fixes the devices of a process when its first array is created.

    Raises:
        ConfigError: There are devices. They and their arrays are dropped, so that the next attempt can start clean.
    """
    import jax.extend
    from jax._src import xla_bridge  # JAX has no public way to ask

    backends: Any = jax.extend.backend
    if xla_bridge.backends_are_initialized():
        backends.clear_backends()
        raise ConfigError(
            "JAX arrays were created before train_func was entered: in its config, in a global variable, when a module was "
            "imported, or by a function of execute. Create them inside train_func, or give NumPy arrays."
        )


def _clear_pending_effects() -> None:
    # Effects of an interrupted step, such as jax.debug.print: clear_backends would wait for them, raise, and keep the devices.
    from jax._src import dispatch  # JAX has no public way to drop them

    tokens: Any = dispatch.runtime_tokens
    tokens.clear()


def _configure(name: str, value: Any) -> None:
    import jax

    settings: Any = jax.config
    settings.update(name, value)


def _time_compilations() -> None:
    """Count the time that JAX compiles as that use of train_func's time."""
    import jax

    global _is_timed
    if not _is_timed:
        _is_timed = True
        jax.monitoring.register_event_duration_secs_listener(_on_duration)


_is_timed = False


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event in ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"):
        context.current().progress.compiling.add(duration_secs)

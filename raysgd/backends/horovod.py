"""The Horovod backend: gloo between the members, which meet at an HTTP server in a process of its own.

Only Horovod's library is used, not `horovodrun`, ssh, its drivers or `horovod.ray`. Workers of a node have the same host name,
so that Horovod groups them by node. Host names are valid for one group only, so that Horovod never excludes a
machine on which a worker was lost. See doc/design/0021-backends.md.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import psutil

from raysgd.backends import torch_compiler
from raysgd.backends.addresses import find_interface
from raysgd.backends.base import Backend, BackendConfig, Coordinator, Member
from raysgd.backends.gloo_sockets import GlooConnections, list_connections
from raysgd.backends.tensorflow import use_legacy_keras
from raysgd.backends.torch import tensor_reducers
from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_choice, check_names
from raysgd.errors import ConfigError

_INSTALL_HINT = (
    "backend='horovod' needs Horovod in the workers, built for their torch or TensorFlow: doc/guides/backends.md says how "
    "(make horovod in raysgd's own environment)"
)
#: The path on the rendezvous server under which members exchange their connections.
_SCOPE = "raysgd"
_POLL_S = 0.005


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class HorovodConfig(BackendConfig):
    """Settings of Horovod.

    Attributes:
        framework: The framework whose Horovod train_func uses: ``"torch"`` (``import horovod.torch as hvd``) or
            ``"tensorflow"``. Horovod is initialised before train_func is entered; ``hvd.init()`` inside does nothing.
        timeout_s: The time after which a gloo operation, or joining a group, fails; rounded up to whole seconds. A rank that
            waits for a dead peer is usually released at once, and after this time at the latest.
        nics: Names of network interfaces; each node uses the first one that it has. None: that of the node's address.
        legacy_keras: With TensorFlow, make ``tf.keras`` and ``keras`` Keras 2 (the package ``tf_keras``), which
            ``horovod.tensorflow.keras`` needs.
    """

    name: ClassVar[str] = "horovod"
    shows_node_gpus: ClassVar[bool] = True
    has_coordinator: ClassVar[bool] = True
    framework: Literal["torch", "tensorflow"] = "torch"
    timeout_s: float = 10
    nics: Sequence[str] | None = None
    legacy_keras: bool = True

    def __post_init__(self) -> None:
        check_choice("HorovodConfig(framework)", self.framework, ("torch", "tensorflow"))
        check_amount("HorovodConfig(timeout_s)", self.timeout_s, positive=True)
        if self.nics is not None:
            check_names("HorovodConfig(nics)", self.nics)

    def make_backend(self) -> Backend:
        return HorovodBackend(self)

    def make_coordinator(self) -> Coordinator:
        return HorovodCoordinator()


class HorovodCoordinator(Coordinator):
    """Runs Horovod's rendezvous server, a new one for each group: late requests of an older group are refused."""

    def __init__(self) -> None:
        try:
            from horovod.runner.http import http_server
        except ImportError as error:
            raise ImportError(_INSTALL_HINT) from error
        self._module: Any = http_server
        self._server: Any = None

    def open_rendezvous(self, node_ip: str, members: Sequence[Member]) -> str:
        self._close()
        self._server = self._module.RendezvousHTTPServer((node_ip, 0), self._module.RendezvousHandler, verbose=0)
        self._server.daemon_threads = True
        slots = assign_slots(members)
        self._server.init(slots)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="raysgd-rendezvous", daemon=True).start()
        return json.dumps({"address": list(self._server.server_address[:2]), "slots": [vars(slot) for slot in slots]})

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@dataclass(frozen=True)
class Slot:
    """A member's place in Horovod's terms; ``cross`` counts across nodes, among members with the same local rank."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def assign_slots(members: Sequence[Member]) -> list[Slot]:
    """Return the members' slots, by rank."""
    nodes: dict[int, list[int]] = {}
    for member in members:
        nodes.setdefault(member.local_rank, []).append(member.node_rank)
    across = {local_rank: sorted(node_ranks) for local_rank, node_ranks in nodes.items()}
    return [
        Slot(
            hostname=f"node{member.node_rank}",
            rank=member.rank,
            size=member.world_size,
            local_rank=member.local_rank,
            local_size=member.local_world_size,
            cross_rank=across[member.local_rank].index(member.node_rank),
            cross_size=len(across[member.local_rank]),
        )
        for member in members
    ]


class HorovodBackend(Backend):
    """The Horovod group of one worker process."""

    def __init__(self, config: HorovodConfig) -> None:
        self._config = config
        self._hvd: Any = None
        self._gloo = GlooConnections()

    def load(self) -> None:
        if self._config.framework == "tensorflow" and self._config.legacy_keras and use_legacy_keras():
            import tf_keras

            sys.modules.setdefault("keras", tf_keras)  # Horovod's callbacks import Keras 2 by this name
        try:
            self._hvd = importlib.import_module(f"horovod.{self._config.framework}")
        except ImportError as error:
            raise ImportError(f"{_INSTALL_HINT}: {error}") from error
        torch_compiler.defer()
        _refuse_elastic_run()

    def init_process_group(self, member: Member) -> None:
        rendezvous = json.loads(member.rendezvous)
        address: tuple[str, int] = tuple(rendezvous["address"])
        self._set_environment(Slot(**rendezvous["slots"][member.rank]), address, member)
        before = list_connections()
        try:
            self._hvd.init()
        except ValueError as error:  # Horovod gives no details; a peer may have died
            raise RuntimeError(f"the Horovod group did not form: {error}") from error
        own = list_connections() - before
        self._gloo = GlooConnections.from_exchange(own, _exchange(address, member, sorted(own), self._config.timeout_s))

    def destroy_process_group(self) -> None:
        self._gloo = GlooConnections()
        if self._hvd is not None:
            with contextlib.suppress(Exception):  # the group may be broken already
                self._hvd.shutdown()

    def abort_process_group(self) -> None:
        with contextlib.suppress(OSError):  # the attempt must end in any case
            self._gloo.shut_down()

    def is_collective_error(self, error: BaseException) -> bool:
        from horovod.common.exceptions import HorovodInternalError

        if isinstance(error, HorovodInternalError):
            return True
        is_from_tensorflow = type(error).__module__.startswith("tensorflow.")
        return is_from_tensorflow and "horovod" in str(error).lower()

    def get_reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        if self._config.framework != "torch":
            return {}
        return tensor_reducers()

    def _set_environment(self, slot: Slot, address: tuple[str, int], member: Member) -> None:
        """Set the variables that Horovod's own launcher sets."""
        os.environ.update({f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot).items()})
        os.environ.update(
            HOROVOD_GLOO_RENDEZVOUS_ADDR=address[0],
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(address[1]),
            HOROVOD_GLOO_TIMEOUT_SECONDS=str(math.ceil(self._config.timeout_s)),
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
        )
        interface = self._interface(member.node_ip)
        if interface is not None:
            os.environ["HOROVOD_GLOO_IFACE"] = interface

    def _interface(self, node_ip: str) -> str | None:
        if self._config.nics is None:
            return find_interface(node_ip)
        available = psutil.net_if_addrs()
        chosen = next((nic for nic in self._config.nics if nic in available), None)
        if chosen is None:
            raise ValueError(
                f"HorovodConfig(nics={list(self._config.nics)}): the node {node_ip} has none of these interfaces; "
                f"give one of {', '.join(sorted(available))}."
            )
        return chosen


class _RefusesElasticRun:
    """Replaces Horovod's `WorkerNotificationManager`, whose ``init`` is the first call of ``hvd.elastic.run``."""

    def init(self) -> None:
        raise ConfigError(
            "hvd.elastic.run does not work inside a run: raysgd itself replaces lost workers and calls train_func again. "
            "Remove hvd.elastic.run; save the state with raysgd.save_checkpoint, and resume from it with "
            "raysgd.load_checkpoint."
        )


def _refuse_elastic_run() -> None:
    """Make `hvd.elastic.run` raise a `ConfigError`; see doc/design/0023-refuse-elastic-run.md."""
    elastic: Any = importlib.import_module("horovod.common.elastic")
    elastic.notification_manager = _RefusesElasticRun()


def _exchange(address: tuple[str, int], member: Member, value: Any, timeout_s: float) -> list[Any]:
    """Exchange values at the rendezvous server; return those of all members, by rank."""
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=timeout_s)) as link:
        _request(link, "PUT", member.rank, json.dumps(value).encode())
        values: list[Any] = []
        while len(values) < member.world_size:
            answer = _request(link, "GET", len(values))
            if answer is not None:
                values.append(json.loads(answer))
            elif time.monotonic() > deadline:
                raise TimeoutError(f"rank {len(values)} has not joined within {timeout_s:g} s")
            else:
                time.sleep(_POLL_S)
        return values


def _request(link: http.client.HTTPConnection, method: str, rank: int, body: bytes | None = None) -> bytes | None:
    link.request(method, f"/{_SCOPE}/{rank}", body)
    answer = link.getresponse()
    data = answer.read()
    return data if answer.status == http.client.OK else None

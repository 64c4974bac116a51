"""The Horovod backend: gloo between the members, who meet at an HTTP server in a process of its own.

Horovod's part here is its library: `horovodrun`, ssh, its drivers and `horovod.ray` are not used. Workers of a node have the
node's name, so that local and cross ranks are right; a name says nothing beyond one group, so no machine is ever
blacklisted for a worker that was lost on it. See doc/design/0021-backends.md.
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
from typing import Any, ClassVar

from raysgd.backends import gloo_sockets, horovod_elastic
from raysgd.backends.base import Backend, BackendConfig, Coordinator, Member
from raysgd.backends.gloo_sockets import Pairs
from raysgd.backends.legacy_keras import use_legacy_keras
from raysgd.backends.meeting import interface_of
from raysgd.config.checks import check_amount, check_choice, check_names
from raysgd.errors import RaySGDError

_HOW_TO_GET_IT = (
    "backend='horovod' needs Horovod in the workers, built for their torch or TensorFlow: doc/guides/backends.md says how "
    "(make horovod in raysgd's own environment)"
)
#: Where members tell each other their connections, at the server of the rendezvous.
_SCOPE = "raysgd"
_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class HorovodConfig(BackendConfig):
    """Settings of Horovod.

    Attributes:
        framework: Whose Horovod train_func uses: ``"torch"`` (``import horovod.torch as hvd``) or ``"tensorflow"``. It is
            initialised when train_func begins; ``hvd.init()`` there does nothing.
        timeout_s: Seconds after which an operation of gloo's fails, and so does joining a group; rounded up to whole ones.
            A rank that waits for a dead peer is freed at once in most cases, and after these seconds in all.
        nics: Names of network interfaces; of each node the first that it has is used. None: that of the node's address.
        elastic: Who recovers when workers are lost or come. ``"raysgd"``: train_func is entered again, from its newest
            checkpoint. ``"horovod"``: functions under ``hvd.elastic.run`` go on inside train_func from their state's last
            commit; raysgd has the workers and their ranks only. Outside of such a function it is raysgd in any case. With
            the first such a function is refused when it is called.
        legacy_keras: With TensorFlow: have ``tf.keras`` and ``keras`` be Keras 2 (the package ``tf_keras``), which is what
            ``horovod.tensorflow.keras`` works with.
    """

    name: ClassVar[str] = "horovod"
    shares_gpus: ClassVar[bool] = True
    is_coordinated: ClassVar[bool] = True
    framework: str = "torch"
    timeout_s: float = 10
    nics: Sequence[str] | None = None
    elastic: str = "raysgd"
    legacy_keras: bool = True

    def __post_init__(self) -> None:
        check_choice("HorovodConfig(elastic)", self.elastic, ("raysgd", "horovod"))
        check_choice("HorovodConfig(framework)", self.framework, ("torch", "tensorflow"))
        check_amount("HorovodConfig(timeout_s)", self.timeout_s, positive=True)
        if self.nics is not None:
            check_names("HorovodConfig(nics)", self.nics)

    @property
    def recovers_inside(self) -> bool:
        return self.elastic == "horovod"

    def make(self) -> Backend:
        return HorovodBackend(self)

    def make_coordinator(self) -> Coordinator:
        return HorovodCoordinator()


class HorovodCoordinator(Coordinator):
    """Horovod's own rendezvous server, one for each group: what comes late from an older one finds it closed."""

    def __init__(self) -> None:
        try:
            from horovod.runner.http import http_server
        except ImportError as error:
            raise ImportError(_HOW_TO_GET_IT) from error
        self._module: Any = http_server
        self._server: Any = None

    def open(self, node_ip: str, members: Sequence[Member]) -> str:
        self._close()
        self._server = self._module.RendezvousHTTPServer((node_ip, 0), self._module.RendezvousHandler, verbose=0)
        self._server.daemon_threads = True
        slots = slots_of(members)
        self._server.init(slots)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="raysgd-rendezvous", daemon=True).start()
        described = [slot.to_dict() for slot in slots]
        return json.dumps({"address": list(self._server.server_address[:2]), "slots": described})

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@dataclass(frozen=True)
class Slot:
    """A member's place, in Horovod's terms: ``cross`` is across nodes, among those with the same local rank."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def slots_of(members: Sequence[Member]) -> list[Slot]:
    """The members' places, by rank."""
    nodes: dict[int, list[int]] = {}
    for member in members:
        nodes.setdefault(member.local_rank, []).append(member.node_rank)
    across = {local_rank: sorted(those) for local_rank, those in nodes.items()}
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
    """One process's membership in a Horovod group."""

    def __init__(self, config: HorovodConfig) -> None:
        self._config = config
        self._hvd: Any = None
        self._gloo = Pairs()
        self._notices: horovod_elastic.Notices | None = None

    def load(self) -> None:
        if self._config.framework == "tensorflow" and self._config.legacy_keras and use_legacy_keras():
            import tf_keras

            sys.modules.setdefault("keras", tf_keras)  # Horovod's callbacks look for Keras 2 there
        try:
            self._hvd = importlib.import_module(f"horovod.{self._config.framework}")
        except ImportError as error:
            raise ImportError(f"{_HOW_TO_GET_IT}: {error}") from error

    def warm_up(self) -> None:
        if self._config.framework == "torch":
            import torch

            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)

    def set_up(self, member: Member) -> None:
        told = json.loads(member.rendezvous)
        address = told["address"][0], told["address"][1]
        self._export(Slot(**told["slots"][member.rank]), address, member)
        before = gloo_sockets.connected()
        try:
            self._hvd.init()
        except ValueError as error:  # all that it says; a peer may have died
            raise RuntimeError(f"the Horovod group did not form: {error}") from error
        own = gloo_sockets.connected() - before
        self._gloo = Pairs.of(own, _exchange(address, member, sorted(own), self._config.timeout_s))

    def tear_down(self) -> None:
        self._gloo = Pairs()
        if self._hvd is not None:
            with contextlib.suppress(Exception):  # what is broken already
                self._hvd.shutdown()

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # whatever comes of it, the attempt must end
            self._gloo.cut()

    def recover_inside(self, rejoin: Callable[[int | None, bool], None]) -> None:
        if self._config.recovers_inside:
            self._notices = horovod_elastic.install(self._config.framework, rejoin)
        else:
            horovod_elastic.refuse()

    def broken_group(self, why: str) -> Exception | None:
        from horovod.common.exceptions import HorovodInternalError

        return HorovodInternalError(why) if self._notices is not None and self._notices.is_heard else None

    def change_group(self) -> bool:
        return self._notices is not None and self._notices.hosts_changed()

    def is_collective_error(self, error: BaseException) -> bool:
        from horovod.common.exceptions import HorovodInternalError

        if isinstance(error, RaySGDError):
            return False
        if isinstance(error, HorovodInternalError):
            return True
        is_tensorflows = type(error).__module__.startswith("tensorflow.")
        return is_tensorflows and "horovod" in str(error).lower()

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        if self._config.framework != "torch":
            return {}
        from raysgd.backends.torch import tensor_reducers

        return tensor_reducers()

    def _export(self, slot: Slot, address: tuple[str, int], member: Member) -> None:
        """The variables that Horovod's own launcher would set."""
        os.environ.update({f"HOROVOD_{name.upper()}": str(value) for name, value in slot.to_dict().items()})
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
            return interface_of(node_ip)
        import psutil

        here = psutil.net_if_addrs()
        found = next((nic for nic in self._config.nics if nic in here), None)
        if found is None:
            raise ValueError(f"HorovodConfig(nics={list(self._config.nics)}): {node_ip} has {', '.join(sorted(here))}.")
        return found


def _exchange(address: tuple[str, int], member: Member, brought: Any, timeout_s: float) -> list[Any]:
    """What all members have brought, by rank, by way of the rendezvous server."""
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=timeout_s)) as link:
        _request(link, "PUT", member.rank, json.dumps(brought).encode())
        found: list[Any] = []
        while len(found) < member.world_size:
            answer = _request(link, "GET", len(found))
            if answer is not None:
                found.append(json.loads(answer))
            elif time.monotonic() > deadline:
                raise TimeoutError(f"rank {len(found)} has not joined within {timeout_s:g} s")
            else:
                time.sleep(_POLL_S)
        return found


def _request(link: http.client.HTTPConnection, method: str, rank: int, body: bytes | None = None) -> bytes | None:
    link.request(method, f"/{_SCOPE}/{rank}", body)
    answer = link.getresponse()
    data = answer.read()
    return data if answer.status == http.client.OK else None

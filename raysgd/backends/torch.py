"""The torch backend: gloo on CPU, nccl on GPU, over a store bound to rank 0's own address.

Two facts about gloo shape it (see doc/design/0003-leaving-a-gloo-group.md): a group whose sockets are not closed holds
its peers, and ``torch._dynamo`` imports ``torch.distributed.nn.functional``, whose default arguments hold the live group
for ever, unless that module was imported before the first group was made. So `load` imports it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from raysgd.backends import gloo_sockets
from raysgd.backends.base import Backend, BackendConfig, Member
from raysgd.backends.flight_record import FlightRecord, last_collectives
from raysgd.backends.gloo_sockets import GlooGroup
from raysgd.backends.meeting import interface_of
from raysgd.backends.torch_stores import Place, check_init_method, forget_store, join_store
from raysgd.config.checks import check_amount, check_choice
from raysgd.errors import ConfigError, RaySGDError

_COLLECTIVE_ERRORS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "process group",
    "socket",
    "broken pipe",
)


@dataclass(frozen=True, kw_only=True)
class TorchConfig(BackendConfig):
    """Settings of the torch process group.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``; None: nccl where each worker has GPUs of its own, gloo elsewhere (nccl refuses two
            members on one GPU).
        init_method: Where the members meet, as torch has it: ``"tcp://host:port"``, an address of rank 0's node;
            ``"file:///path"``, a name beside which all nodes see new files; ``"env://"``, what ``MASTER_ADDR`` and
            ``MASTER_PORT`` say in the workers. None: at rank 0's address, and a port that is free.
        init_timeout_s: Seconds for all members to join a new group.
        timeout_s: Seconds after which a collective that does not end fails.
    """

    name: ClassVar[str] = "torch"
    shares_gpus: ClassVar[bool] = True
    backend: str | None = None
    init_method: str | None = None
    init_timeout_s: float = 10
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_choice("TorchConfig(backend)", self.backend, ("gloo", "nccl"))
        check_init_method(self.init_method)
        check_amount("TorchConfig(init_timeout_s)", self.init_timeout_s, positive=True)
        check_amount("TorchConfig(timeout_s)", self.timeout_s, positive=True)

    def make(self) -> Backend:
        return TorchBackend(self)


class TorchBackend(Backend):
    """One process's membership in a torch process group."""

    def __init__(self, config: TorchConfig) -> None:
        self._config = config
        self._place: Place | None = None
        self._store: Any = None
        self._gloo = GlooGroup()

    def load(self) -> None:
        try:
            import torch.distributed.nn.functional  # noqa: F401  (before the first group: see above)
        except ImportError as error:
            raise ImportError("backend='torch' needs torch in the workers: pip install raysgd[torch]") from error

    def warm_up(self) -> None:
        """The first optimizer imports as much as torch itself is, ``torch._dynamo`` with all it needs."""
        import torch

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)

    def take_device(self) -> None:
        import torch

        index = os.environ.get("RAYSGD_DEVICE_INDEX")  # as `raysgd.torch.device` reads it: without it no GPU is ours
        if index and torch.cuda.is_available():
            torch.cuda.set_device(int(index))

    def open_rendezvous(self, node_ip: str) -> str:
        self._place = Place.open(self._config.init_method, node_ip)
        return self._place.told

    def set_up(self, member: Member) -> None:
        import torch.distributed as dist

        self.take_device()
        backend = self._config.backend or ("nccl" if member.has_gpu and not member.shares_gpu else "gloo")
        _check_available(backend)
        if self._place is None or self._place.told != member.rendezvous:
            self._place = Place(member.rendezvous)
        _export(member)
        self._store = join_store(self._place, member, self._config.init_timeout_s)
        before = gloo_sockets.listeners() if backend == "gloo" else set()
        dist.init_process_group(
            backend,
            store=self._store,
            rank=member.rank,
            world_size=member.world_size,
            timeout=timedelta(seconds=self._config.timeout_s),
        )
        if backend == "gloo":
            self._gloo = _meet(self._store, member, gloo_sockets.listeners() - before)
        # nccl's ranks meet in the store at their first collective, which some may come to later than others.
        self._store.set_timeout(timedelta(seconds=self._config.timeout_s))

    def tear_down(self) -> None:
        import torch.distributed as dist

        self._gloo = GlooGroup()
        gc.collect()  # what a traceback or a cycle still holds of the group keeps its sockets open
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:
                pass
        self._store = None
        if self._place is not None:
            self._place.close()
            forget_store(self._place)
            self._place = None
        gc.collect()

    def abort(self) -> None:
        import torch.distributed as dist

        with contextlib.suppress(OSError):  # whatever comes of it, the attempt must end
            self._gloo.cut()
        if self._is_nccl():
            dist.distributed_c10d._abort_process_group()

    def is_collective_error(self, error: BaseException) -> bool:
        import torch.distributed as dist

        if isinstance(error, RaySGDError):  # whose text may be that of a storage, say
            return False
        if isinstance(error, dist.DistError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(word in text for word in _COLLECTIVE_ERRORS)

    def flight_record(self) -> FlightRecord | None:
        import torch._C._distributed_c10d as c10d

        # Builds for CUDA have one recorder for nccl and one for the others.
        names = ("_dump_nccl_trace", "_dump_fr_trace") if self._is_nccl() else ("_dump_fr_trace",)
        dump_trace = next((found for name in names if (found := getattr(c10d, name, None)) is not None), None)
        if dump_trace is None:  # an older torch
            return None
        # To name the frames of stacks it would import torch._dynamo, with the interpreter's lock held for seconds.
        dump: bytes = dump_trace(includeStackTraces=False)
        return FlightRecord(last_collectives(pickle.loads(dump)), dump)

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        from torch.nn.parallel import DistributedDataParallel

        return {DistributedDataParallel: lambda wrapped: (_same, (wrapped.module,)), **tensor_reducers()}

    @staticmethod
    def _is_nccl() -> bool:
        import torch.distributed as dist

        return dist.is_initialized() and dist.get_backend() == "nccl"


def tensor_reducers() -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
    """How tensors are reduced when train_func returns them: on the CPU."""
    import torch

    return {torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_tensor}


def _meet(store: Any, member: Member, own: set[gloo_sockets.Address]) -> GlooGroup:
    """Tell the other members where this one listens, and hear it of them."""
    keys = [f"raysgd/gloo/{rank}" for rank in range(member.world_size)]
    store.set(keys[member.rank], json.dumps(sorted(own)))
    return GlooGroup.of(own, [json.loads(value) for value in store.multi_get(keys)])


def _check_available(backend: str) -> None:
    """Refuse what would fail in the same way at every retry.

    Raises:
        ConfigError: There is no nccl in this build of torch, or no GPU that it can see.
    """
    import torch
    import torch.distributed as dist

    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        has_nccl = dist.is_nccl_available()
        raise ConfigError(
            f"torch {torch.__version__} on {socket.gethostname()} "
            + ("sees no GPU" if has_nccl else "has no nccl built in")
            + ", which workers with GPUs need. Install a build of torch for them, or give "
            'Trainer(backend_args={"backend": "gloo"}).'
        )


def _export(member: Member) -> None:
    """The variables torchrun would set, which libraries read; gloo's own sockets bind the node's address by them."""
    os.environ.update(
        RANK=str(member.rank),
        WORLD_SIZE=str(member.world_size),
        LOCAL_RANK=str(member.local_rank),
        LOCAL_WORLD_SIZE=str(member.local_world_size),
        NODE_RANK=str(member.node_rank),
        GROUP_RANK=str(member.node_rank),
    )
    interface = interface_of(member.node_ip)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _same(obj: Any) -> Any:
    return obj


def _reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    if tensor.device.type == "cpu":
        return tuple(tensor.__reduce_ex__(2))
    return tuple(tensor.cpu().__reduce_ex__(2))

"""The torch backend: gloo on CPUs, nccl on GPUs, over a store at rank 0's own address. Runs in workers, its config anywhere.

Two facts about gloo shape it (doc/design/0003-leaving-a-gloo-group.md). A group whose sockets stay open blocks its peers.
And ``torch._dynamo`` imports ``torch.distributed.nn.functional``, whose default arguments keep the live group for ever, unless
that module was imported before the first group was created. `TorchBackend.load` therefore imports it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from raysgd._util.imports import imported
from raysgd._util.text import with_article
from raysgd.backends import torch_compiler, torch_groups, torch_scripts, torch_transfers
from raysgd.backends.addresses import address_family, find_interface
from raysgd.backends.base import Backend, BackendConfig, Member, refuse_shared_gpu
from raysgd.backends.flight_recorder import FlightRecord, display_name, last_of_each_group, read_collectives
from raysgd.backends.torch_exchange import ExchangeWatch
from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_choice
from raysgd.errors import ConfigError, SerializationError

_BACKLOG = 2048


def check_init_method(init_method: str | None) -> None:
    """Raise a ConfigError if `TorchConfig` does not support the form of ``init_method``."""
    if init_method is None:
        return
    parts = urlsplit(init_method)
    is_tcp = parts.scheme == "tcp" and parts.hostname and _parse_port(init_method)
    if not (is_tcp or init_method == "env://" or (parts.scheme == "file" and parts.path)):
        raise ConfigError(
            f"TorchConfig(init_method={init_method!r}) is not supported; "
            "give 'tcp://host:port', 'file:///path', 'env://' or None."
        )


@dataclass
class Rendezvous:
    """Where the members of one group meet.

    Attributes:
        address: What the other members need, as JSON.
        listener: The listening socket, on rank 0, until a store takes it over.
    """

    address: str
    listener: socket.socket | None = None

    @classmethod
    def open(cls, init_method: str | None, node_ip: str) -> Rendezvous:
        """Choose the place and listen there, on rank 0.

        Raises:
            ConfigError: Rank 0 cannot listen there.
        """
        if init_method is not None and init_method.startswith("file:"):
            return cls(json.dumps({"path": f"{urlsplit(init_method).path}.{uuid.uuid4().hex}"}))
        host, port = _address(init_method, node_ip)
        try:
            # The socket stays open until the store takes it over, so that no other process can take the port.
            listener = socket.create_server((host, port), family=address_family(host), backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"TorchConfig(init_method={init_method!r}): rank 0, on {socket.gethostname()} ({node_ip}), cannot listen at "
                f"{host}:{port}: {error.strerror or error}"
            ) from error
        return cls(json.dumps({"host": host, "port": listener.getsockname()[1]}), listener)

    def close(self) -> None:
        """Close the socket, if no store has taken it over."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None


def join_store(rendezvous: Rendezvous, member: Member, timeout_s: float, *, waits: bool = True) -> Any:
    """Return the store of the group, on rank 0 with its server; set its address in the environment for other libraries.

    ``waits``: Wait there for all members, which torch does in steps of 10 ms. A gloo group needs no such wait: its members
    wait for each other while they connect.
    """
    import torch.distributed as dist

    address, timeout = json.loads(rendezvous.address), timedelta(seconds=timeout_s)
    if "path" in address:
        store = dist.FileStore(address["path"], member.world_size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    os.environ.update(MASTER_ADDR=address["host"], MASTER_PORT=str(address["port"]))
    fd = None
    if member.rank == 0 and rendezvous.listener is not None:
        fd, rendezvous.listener = rendezvous.listener.detach(), None  # the store closes it
    return dist.TCPStore(  # type: ignore[attr-defined]
        address["host"],
        address["port"],
        world_size=member.world_size,
        is_master=member.rank == 0,
        timeout=timeout,
        master_listen_fd=fd,
        wait_for_workers=waits,
    )


def remove_store_file(rendezvous: Rendezvous) -> None:
    """Remove the file of a group that met in a file, unless another member that has left did so."""
    if path := json.loads(rendezvous.address).get("path"):
        with contextlib.suppress(OSError):
            os.remove(path)


def _address(init_method: str | None, node_ip: str) -> tuple[str, int]:
    if init_method is None:
        return node_ip, 0
    if init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"TorchConfig(init_method='env://'): {' and '.join(missing)} must be set in the workers, as by "
                "Trainer(runtime_env={'env_vars': {...}})."
            )
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return urlsplit(init_method).hostname or node_ip, _parse_port(init_method) or 0


def _parse_port(init_method: str) -> int | None:
    try:
        return urlsplit(init_method).port
    except ValueError:  # out of range
        return None


_COLLECTIVE_ERRORS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "process group",
    "socket",
    "broken pipe",
)


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class TorchConfig(BackendConfig):
    """Settings of the torch process group.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``. None: nccl if each worker has GPUs of its own, else gloo (nccl refuses two members
            on one GPU, also on two MIG devices of it).
        init_method: Where the members meet, as in torch. ``"tcp://host:port"``: an address of rank 0's node.
            ``"file:///path"``: a path prefix in a folder that all nodes share. ``"env://"``: ``MASTER_ADDR`` and
            ``MASTER_PORT`` of the workers' environment. None: rank 0's address and a free port.
        init_timeout_s: The time for all members to join a new group.
        timeout_s: The time after which a blocked collective fails.
        warn_unsynchronized: Whether to warn if each rank trains a model of its own: all ranks have made optimizer steps, and
            no collective has carried gradients or parameters by their tenth report, or by the end.
    """

    name: ClassVar[str] = "torch"
    shows_node_gpus: ClassVar[bool] = True
    backend: Literal["gloo", "nccl"] | None = None
    init_method: str | None = None
    init_timeout_s: float = 10
    timeout_s: float = 1800
    warn_unsynchronized: bool = True

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_choice("TorchConfig(backend)", self.backend, ("gloo", "nccl"))
        check_init_method(self.init_method)
        check_amount("TorchConfig(init_timeout_s)", self.init_timeout_s, positive=True)
        check_amount("TorchConfig(timeout_s)", self.timeout_s, positive=True)

    def make_backend(self) -> Backend:
        return TorchBackend(self)


class TorchBackend(Backend):
    """The torch process group of one worker process."""

    def __init__(self, config: TorchConfig) -> None:
        self._config = config
        self._rendezvous: Rendezvous | None = None
        self._store: Any = None
        self._exchange: ExchangeWatch | None = None
        self._world_size = 1
        self._began_ns = 0

    def load(self) -> None:
        was_preloaded = imported("torch") is not None
        try:
            import torch.distributed.nn.functional  # (before the first group exists: see the module docstring)
        except ImportError as error:
            raise ImportError("backend='torch' needs torch in the workers: pip install raysgd[torch]") from error
        if was_preloaded and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(threads):
            torch.set_num_threads(int(threads))  # Ray has set the variable after the import, which reads it
        torch_compiler.defer()
        torch_scripts.install()
        torch_groups.install()
        torch_transfers.install()

    def set_device(self) -> None:
        import torch

        index = os.environ.get("RAYSGD_DEVICE_INDEX")  # as in `raysgd.torch.device`: unset if the worker has no GPU
        if index and torch.cuda.is_available():
            torch.cuda.set_device(int(index))

    def open_rendezvous(self, node_ip: str) -> str:
        if (
            self._rendezvous is not None
        ):  # no group formed there: another worker was replaced, or the attempt ended before
            self._rendezvous.close()
        self._rendezvous = Rendezvous.open(self._config.init_method, node_ip)
        return self._rendezvous.address

    def init_process_group(self, member: Member) -> None:
        import torch.distributed as dist

        self.set_device()
        backend = self._config.backend or ("nccl" if member.has_gpu and not member.shares_gpu else "gloo")
        _check_available(backend)
        if backend == "nccl" and member.shares_gpu and member.world_size > 1:
            raise ConfigError(
                f"{refuse_shared_gpu(member)} Give each worker a GPU of its own (gpus_per_worker=1), or use gloo: "
                "TorchConfig(backend=None) chooses it for workers that share a GPU."
            )
        if self._rendezvous is None or self._rendezvous.address != member.rendezvous:
            self._rendezvous = Rendezvous(member.rendezvous)
        _set_environment(member)
        _reset_accelerate()
        self._store = join_store(self._rendezvous, member, self._config.init_timeout_s, waits=backend != "gloo")
        self._began_ns = time.time_ns()
        dist.init_process_group(
            backend,
            store=self._store,
            rank=member.rank,
            world_size=member.world_size,
            # Also the time in which gloo's members connect: one of them may have been lost since they met in the store.
            timeout=timedelta(seconds=self._config.init_timeout_s),
        )
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._config.timeout_s))
        torch_scripts.give(torch_scripts.GivenGroup(backend, member.rank, member.world_size))
        self._watch_exchange(member.world_size)
        # nccl's ranks meet in the store at their first collective, which some may reach much later than others.
        self._store.set_timeout(timedelta(seconds=self._config.timeout_s))

    def destroy_process_group(self) -> None:
        torch_scripts.take_back()
        torch_transfers.forget_all()
        self._watch_exchange(1)
        torch_groups.leave_all()  # whatever still refers to a group: its peers must see that this rank has left
        gc.collect()  # a traceback or a cycle that refers to the group keeps its sockets open
        torch_groups.destroy_all()
        self._store = None
        if self._rendezvous is not None:
            self._rendezvous.close()
            remove_store_file(self._rendezvous)
            self._rendezvous = None
        gc.collect()

    def abort_process_group(self) -> None:
        import torch.distributed as dist

        torch_groups.cut_all()
        if self._is_nccl():
            dist.distributed_c10d._abort_process_group()

    def is_collective_error(self, error: BaseException) -> bool:
        return is_error_of_group(error)

    def gather(self, payload: bytes) -> list[bytes] | None:
        import torch.distributed as dist

        if not dist.is_initialized():
            return None
        payloads: list[Any] = [None] * self._world_size
        dist.all_gather_object(payloads, payload)
        return payloads

    def dump_flight_record(self) -> FlightRecord | None:
        # CUDA builds have one recorder for nccl and one for other backends.
        names = ("_dump_nccl_trace", "_dump_fr_trace") if self._is_nccl() else ("_dump_fr_trace",)
        if not (dumps := _dump_traces(names)):  # an older torch
            return None
        ranks = {name: ranks for name, (ranks, _) in _list_groups().items()}
        collectives = read_collectives(pickle.loads(dumps[0]), self._began_ns, ranks)
        transfers = torch_transfers.read_transfers()
        pending = [one for one in transfers if not one.is_done]
        return FlightRecord((*last_of_each_group(collectives), *pending), dumps[0], (*collectives, *transfers))

    def count_collectives(self) -> Mapping[str, int]:
        return {name: number for name, (_, number) in _list_groups().items()}

    def find_unsynchronized_training(self) -> str | None:
        names = ("_dump_nccl_trace", "_dump_fr_trace")
        watch = self._exchange
        if watch is None or not watch.has_trained_alone(
            lambda: map(pickle.loads, _dump_traces(names)), self.count_collectives
        ):
            return None
        return (
            f"each of the {self._world_size} ranks trains a model of its own: optimizers have made steps on every rank, and no "
            "collective has carried gradients or parameters. Train the model that raysgd.torch.prepare_model(model) returns; "
            'with Lightning, give its Trainer strategy="ddp" and devices=raysgd.local_world_size(). If the models shall '
            'differ, raysgd.Trainer(backend_args={"warn_unsynchronized": False}) switches this warning off.'
        )

    def get_reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        return model_reducers()

    def _watch_exchange(self, world_size: int) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._world_size = world_size
        self._exchange = ExchangeWatch() if world_size > 1 and self._config.warn_unsynchronized else None

    @staticmethod
    def _is_nccl() -> bool:
        import torch.distributed as dist

        return dist.is_initialized() and dist.get_backend() == "nccl"


def _list_groups() -> dict[str, tuple[list[int], int]]:
    """Return for each process group of this process its ranks, and how many operations this rank has begun there.

    For nccl these are collectives; for gloo also sends and receives.
    """
    found = {}
    for group, ranks in torch_transfers.list_own_groups():
        with contextlib.suppress(RuntimeError):  # its library may not count, and it may have been destroyed just now
            number = group._get_sequence_number_for_group()
            found[display_name(group.group_name, group.group_desc)] = sorted(ranks), number
    return found


def _dump_traces(names: Sequence[str]) -> list[bytes]:
    """Return the flight records that these functions of torch make, as far as it has them."""
    import torch._C._distributed_c10d as c10d

    functions = [function for name in names if (function := getattr(c10d, name, None)) is not None]
    # With stack traces it would import torch._dynamo, which holds the interpreter's lock for seconds.
    return [function(includeStackTraces=False) for function in functions]


def is_error_of_group(error: BaseException) -> bool:
    """Return True if ``error`` looks as if a process group of torch, or its store, was broken by another rank."""
    dist = imported("torch.distributed")
    if dist is not None and isinstance(error, getattr(dist, "DistError", ())):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _COLLECTIVE_ERRORS)


def model_reducers() -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
    """Return how models and tensors are pickled when train_func returns them: without DDP, on the CPU.

    Models of FSDP are refused.
    """
    from torch.nn.parallel import DistributedDataParallel

    reducers: dict[type, Callable[[Any], tuple[Any, ...]]]
    reducers = {DistributedDataParallel: lambda wrapped: (_identity, (wrapped.module,)), **tensor_reducers()}
    if (fsdp := imported("torch.distributed.fsdp")) is not None:
        reducers[fsdp.FSDPModule] = _refuse_sharded
    return reducers


def _refuse_sharded(model: Any) -> tuple[Any, ...]:
    raise SerializationError(
        f"the parameters of {with_article(type(model).__name__)} are divided over the ranks, as by zero_stage=3. Save them by "
        "engine.save_checkpoint(): load() of the checkpoint has whole tensors in the driver, and raysgd.torch.export makes files "
        "for from_pretrained."
    )


def tensor_reducers() -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
    """Return how tensors are pickled when train_func returns them: moved to the CPU."""
    import torch

    return {torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_tensor}


def _check_available(backend: str) -> None:
    # A ConfigError ends the run at once; torch's own error would be retried and fail each time.
    import torch
    import torch.distributed as dist

    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        problem = "sees no GPU" if dist.is_nccl_available() else "has no nccl built in"
        raise ConfigError(
            f"torch {torch.__version__} on {socket.gethostname()} {problem}, which workers with GPUs need. "
            'Install a build of torch for them, or give Trainer(backend_args={"backend": "gloo"}).'
        )


def _set_environment(member: Member) -> None:
    """Set the variables that torchrun and ``accelerate launch`` set, because libraries read them, and gloo's interface."""
    os.environ.update(
        RANK=str(member.rank),
        WORLD_SIZE=str(member.world_size),
        LOCAL_RANK=str(member.local_rank),
        LOCAL_WORLD_SIZE=str(member.local_world_size),
        NODE_RANK=str(member.node_rank),
        GROUP_RANK=str(member.node_rank),
    )
    # Accelerate, on which transformers.Trainer is built, would not use a group on CPUs, and choose a GPU by the local rank.
    if index := os.environ.get("RAYSGD_DEVICE_INDEX"):
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", f"cuda:{index}")
    else:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    interface = find_interface(member.node_ip)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _reset_accelerate() -> None:
    """Reset what Accelerate keeps for the life of a process: the ranks, world size and loaders of its first group."""
    if (state := imported("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _identity(obj: Any) -> Any:
    return obj


def _reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.cpu().__reduce_ex__(2))

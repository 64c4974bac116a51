"""The ``"env"`` backend: the environment that torchrun gives, and no process group. Runs in workers, its config anywhere.

The script forms its group itself, as ``torch.distributed.init_process_group()`` does without arguments. Each attempt has new
processes, as with torchrun, so a script finds no state of an earlier attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raysgd._util.imports import imported
from raysgd.backends.addresses import address_family, find_interface
from raysgd.backends.base import Backend, BackendConfig, Member
from raysgd.backends.torch import is_error_of_group, model_reducers
from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_count
from raysgd.errors import ConfigError


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class EnvConfig(BackendConfig):
    """Settings of the ``"env"`` backend. raysgd uses them only for variables that scripts for torchrun may read.

    Attributes:
        max_restarts: The value of ``TORCHELASTIC_MAX_RESTARTS``; ``FailureConfig(max_failures=...)`` is the limit itself.
        run_id: The value of ``TORCHELASTIC_RUN_ID``.
    """

    name: ClassVar[str] = "env"
    shows_node_gpus: ClassVar[bool] = True
    grows_without_save: ClassVar[bool] = True
    max_restarts: int = 0
    run_id: str = "none"

    def __post_init__(self) -> None:
        check_count("EnvConfig(max_restarts)", self.max_restarts, minimum=-1)
        if not self.run_id:
            raise ConfigError("EnvConfig(run_id='') is not a name; leave it out, or give the run's name.")

    @property
    def can_rejoin(self) -> bool:
        return False

    def make_backend(self) -> Backend:
        return EnvBackend(self)


class EnvBackend(Backend):
    """The environment of one worker process, and the port that is reserved for the group of its script."""

    waits_for_members: ClassVar[bool] = False

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._port: socket.socket | None = None

    def load(self) -> None:
        return None  # the script chooses its framework, and may set variables before it imports that

    def open_rendezvous(self, node_ip: str) -> str:
        self._port = _reserve_port(node_ip)
        return json.dumps([node_ip, self._port.getsockname()[1]])

    def init_process_group(self, member: Member) -> None:
        os.environ.update(variables(member, self._config))
        # Without it, gloo asks for the address of the host's name, which other nodes may not reach.
        if (interface := find_interface(member.node_ip)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def destroy_process_group(self) -> None:
        dist = imported("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            with contextlib.suppress(Exception):  # the group may be broken already
                dist.destroy_process_group()
        if self._port is not None:
            self._port.close()
            self._port = None

    def is_collective_error(self, error: BaseException) -> bool:
        return is_error_of_group(error)

    def get_reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        return {} if imported("torch") is None else model_reducers()


def variables(member: Member, config: EnvConfig) -> dict[str, str]:
    """Return the variables that torchrun sets for a member of a group."""
    host, port = json.loads(member.rendezvous)
    values = {
        "RANK": member.rank,
        "WORLD_SIZE": member.world_size,
        "LOCAL_RANK": member.local_rank,
        "LOCAL_WORLD_SIZE": member.local_world_size,
        "GROUP_RANK": member.node_rank,
        "GROUP_WORLD_SIZE": member.num_nodes,
        "ROLE_RANK": member.rank,
        "ROLE_WORLD_SIZE": member.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": member.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts,
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 of the script has the store
    }
    return {name: str(value) for name, value in values.items()}


def _reserve_port(node_ip: str) -> socket.socket:
    """Return a socket that is bound to a free port of all addresses, and does not listen.

    The kernel gives the port to nobody who asks for any port. A server that asks for this one and allows its address to be
    reused gets it, as torch's store does.
    """
    family = address_family(node_ip)
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("::" if family == socket.AF_INET6 else "", 0))
    return reserved

"""The contract that every backend implements.

A backend has two halves. Its `BackendConfig` is created and checked in the driver, and is sent to the workers as data: it
must not import the framework. Its `Backend` is created once in each worker process and serves all attempts of that process.

The order of calls in a worker, and the thread that makes each call::

    load()                       a thread of its own, once; importing the framework may take seconds
    open_rendezvous(ip)          rank 0 only (all ranks if `BackendConfig.opens_on_all_ranks`), after all workers have loaded: an
                                 earlier death costs nobody a timeout
    init_process_group(member)   the training thread, on all ranks at once
      ... train_func ...
    destroy_process_group()      the training thread if train_func failed, any thread after all ranks returned; later, or not at
                                 all, if `BackendConfig.keeps_group`
    abort_process_group()        any thread, while train_func may be blocked in a collective

The next attempt starts again at `open_rendezvous`, possibly with another rank and another world size. Where a process
cannot join a second group (`BackendConfig.can_rejoin` is False), a new process makes these calls instead.

A backend whose members meet at a server has a third part, a `Coordinator`. It is created once, in a process of its own on
the TrainerActor's node, and `Coordinator.open_rendezvous` is called in place of `Backend.open_rendezvous`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raysgd.backends.flight_recorder import FlightRecord
from raysgd.errors import RaySGDError


@dataclass(frozen=True)
class Member:
    """A worker's place in the process group of an attempt.

    Attributes:
        rendezvous: The value that `Backend.open_rendezvous` on rank 0, or `Coordinator.open_rendezvous`, returned. With
            `BackendConfig.opens_on_all_ranks` it is JSON, the list of the values of all ranks.
        node_ip: This worker's address, the only one that its servers may bind.
        has_gpu: Whether the workers were given GPUs.
        shares_gpu: Whether several workers may use the same GPU: each was given a fraction of one, or they have MIG devices.
        workers_per_replica: Ranks that hold one replica of the model between them; they are consecutive.
        num_nodes: The number of nodes with members.
        attempt: The number of the attempt, from 1.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    rendezvous: str
    node_ip: str
    has_gpu: bool
    shares_gpu: bool = False
    workers_per_replica: int = 1
    num_nodes: int = 1
    attempt: int = 1


def refuse_shared_gpu(member: Member) -> str:
    """Return why workers that share a GPU cannot form a group of nccl: the first sentence of an error."""
    return (
        f"The {member.world_size} workers share GPUs (each was given a fraction of one, or they have MIG devices), and nccl, "
        'by which GPUs communicate, refuses two members on one GPU ("Duplicate GPU detected").'
    )


@dataclass(frozen=True, kw_only=True)
class BackendConfig(ABC):
    """Settings of a backend: a frozen keyword-only dataclass, checked when it is created."""

    name: ClassVar[str]
    #: Whether the workers of a node must see each other's GPUs in ``CUDA_VISIBLE_DEVICES``.
    shows_node_gpus: ClassVar[bool] = False
    #: Whether `Backend.open_rendezvous` is called on all ranks, and not on rank 0 alone.
    opens_on_all_ranks: ClassVar[bool] = False
    #: Whether this backend has a `Coordinator`.
    has_coordinator: ClassVar[bool] = False
    #: Whether an elastic group of a run that saves no checkpoints grows at once, by a new attempt. Otherwise it stays as it is.
    grows_without_save: ClassVar[bool] = False

    @property
    def can_rejoin(self) -> bool:
        """Whether a process that has left one group can join another.

        If False, processes that were in a group are replaced before the next group forms, by spares first. The next group
        may follow a failure, a resize or the start of another run.
        """
        return True

    @property
    def keeps_group(self) -> bool:
        """Whether workers that have all returned stay in their group, for a next run with the same workers and ranks.

        `Backend.init_process_group` is then called again with an equal `Member`, but for ``attempt``, and does nothing.
        """
        return False

    @abstractmethod
    def make_backend(self) -> Backend:
        """Create the worker half; called in the worker process."""

    def make_coordinator(self) -> Coordinator:
        """Create the coordinator; called in the coordinator's process if ``has_coordinator`` is True.

        Raises:
            ImportError: A dependency is not installed; the text names the extra to install.
        """
        raise NotImplementedError(f"{type(self).__name__} has no coordinator")


class Backend(ABC):
    """The worker half of a backend. An instance belongs to one process; Trainers share nothing."""

    #: Whether `init_process_group` waits for the other members. If so, it is called after all of them have unpickled
    #: train_func: a new process may need minutes to import what train_func uses, and its peers must stay interruptible.
    waits_for_members: ClassVar[bool] = True
    #: Whether the modules that train_func imports may be imported before the group exists.
    can_import_early: ClassVar[bool] = True

    @abstractmethod
    def load(self) -> None:
        """Import the framework, and everything that must be imported before the first group exists.

        Raises:
            ImportError: The framework is not installed; the text names the extra to install.
        """

    def should_replace_process(self) -> bool:
        """Return True if earlier groups left so much behind that a new process should replace this one."""
        return False

    def warm_up(self) -> None:
        """Import what training loops import later. Called in spares and joining workers, because no rank waits for them."""
        return

    def set_device(self) -> None:
        """Make this worker's GPU the current thread's device, if the framework has a device for each thread."""
        return

    def open_rendezvous(self, node_ip: str) -> str:
        """Open the place where the members meet, bound to ``node_ip``; return the value of `Member.rendezvous`.

        ``node_ip`` is the address of this rank's node, or a loopback address if all members are on that node. It may be called
        again before `init_process_group`: then nobody meets at the earlier place.
        """
        return ""

    @abstractmethod
    def init_process_group(self, member: Member) -> None:
        """Join the group; return when all members have joined, raise after the backend's own timeout."""

    @abstractmethod
    def destroy_process_group(self) -> None:
        """Leave the group and close its sockets; do nothing without a group, and do not raise for a broken one."""

    def abort_process_group(self) -> None:
        """Make collectives that block in this process fail, if the framework can do so."""
        return

    def is_collective_error(self, error: BaseException) -> bool:
        """Return True if ``error`` looks like the consequence of a peer's failure. Not called for raysgd's own errors."""
        return False

    def dump_flight_record(self) -> FlightRecord | None:
        """Return the recent collectives of this process, or None if the framework does not record them.

        Called in another thread than train_func's, which may be blocked in a collective.
        """
        return None

    def find_unsynchronized_training(self) -> str | None:
        """Return a warning if train_func has trained a model that shares nothing with those of other ranks, or None.

        Called in another thread after each of a rank's first reports, and in the training thread when train_func has
        returned. The run shows the warning once, if every rank has returned one.
        """
        return None

    def count_collectives(self) -> Mapping[str, int]:
        """Return how many collectives this process has begun in each process group, as `dump_flight_record` numbers them.

        The number may be too high, if sends and receives cannot be distinguished from collectives.

        Called now and then in another thread while ranks make no session calls. It must take no more than a millisecond,
        because whatever delays one rank delays all.
        """
        return {}

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Return the payloads of all ranks, by rank; None if the group cannot exchange bytes. Called on all ranks."""
        return None

    def explain_error(self, error: BaseException) -> str | None:
        """Return advice to show below an error of train_func that does not itself say what to do, or None."""
        return None

    def get_reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """Return how to pickle, by type, what train_func returns: models without wrappers, GPU tensors on the CPU."""
        return {}


def is_collective_error(backend: Backend, error: BaseException) -> bool:
    """Return the backend's answer, except for raysgd's own errors: their text may quote any other error."""
    return not isinstance(error, RaySGDError) and backend.is_collective_error(error)


class Coordinator(ABC):
    """A server at which the members of every group of a Trainer meet. It outlives the workers.

    When no further group is to form, its process is ended, and the server with it.
    """

    @abstractmethod
    def open_rendezvous(self, node_ip: str, members: Sequence[Member]) -> str:
        """Prepare for a new group and discard the previous one; return the value of `Member.rendezvous`.

        Args:
            node_ip: The address of this process's node, the only one that servers may bind.
            members: The members by rank; their ``rendezvous`` is empty.
        """

"""The contract of a backend.

A backend has two halves. Its `BackendConfig` is made in the driver, checked there, and travels as data: it must not
import the framework. Its `Backend` is made in each worker process, once, and serves all attempts of that process.

The order of calls in a worker, and the thread they come from::

    load()                              once, in a thread of its own; the framework may take seconds to import
    open_rendezvous(ip)                 rank 0 only, when all workers have loaded: a death before costs nobody a timeout
    set_up(member)                      training thread, all ranks at once
      ... train_func ...
    tear_down()                         the training thread if train_func failed, any thread after all ranks returned
    abort()                             any thread, while train_func may be blocked in a collective

and again from `open_rendezvous` for the next attempt, possibly with another rank and another number of members. Where a
process cannot join a second group (`BackendConfig.reforms_in_process`), it is another process that does all of this.

A backend whose members meet at a server has a third part, a `Coordinator`: it is made once, in a process of its own beside
the TrainerActor, and its `Coordinator.open` is called in place of `Backend.open_rendezvous`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from raysgd.backends.flight_record import FlightRecord


@dataclass(frozen=True)
class Member:
    """What a worker must know to join the group of an attempt.

    Attributes:
        rendezvous: What rank 0's `Backend.open_rendezvous` returned.
        node_ip: This worker's address, the only one its servers may bind.
        has_gpu: Whether the workers were given GPUs.
        shares_gpu: Whether what each was given is a part of one, so that several may be on the same.
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


@dataclass(frozen=True, kw_only=True)
class BackendConfig(ABC):
    """Settings of a backend: a frozen keyword-only dataclass, checked when made."""

    name: ClassVar[str]
    #: Whether the workers of a node must see each other's GPUs in ``CUDA_VISIBLE_DEVICES``.
    shares_gpus: ClassVar[bool] = False
    #: Whether there is a `Coordinator`.
    is_coordinated: ClassVar[bool] = False

    @property
    def reforms_in_process(self) -> bool:
        """Whether a living process can leave one group and join another.

        Where it cannot, those that were in a group are replaced for the next one, by spares first, whether it is for a
        failure, another size or another run.
        """
        return True

    @property
    def recovers_inside(self) -> bool:
        """Whether train_func can get over the loss of members by itself, without being left (`Backend.recover_inside`).

        Who has lived longest is rank 0 then, whose state the others take over.
        """
        return False

    @abstractmethod
    def make(self) -> Backend:
        """The backend's worker half; called in the worker process."""

    def make_coordinator(self) -> Coordinator:
        """The part that is called where ``is_coordinated``; called in the process where it stays.

        Raises:
            ImportError: What it needs is not installed; the text names the extra to install.
        """
        raise NotImplementedError(f"{type(self).__name__} has no coordinator")


class Backend(ABC):
    """The worker half. Attributes of an instance belong to one process; nothing is shared between Trainers."""

    #: Whether `set_up` waits for the other members. It is then called when all of them have train_func in their memory: a
    #: process that is new may need minutes to import what train_func uses, in which its peers wait where they can be freed.
    waits_for_members: ClassVar[bool] = True

    @abstractmethod
    def load(self) -> None:
        """Import the framework, and what must be imported before the first group is made.

        Raises:
            ImportError: It is not installed; the text names the extra to install.
        """

    def is_worn_out(self) -> bool:
        """Whether this process should be in no further group, for what the earlier ones have left; another takes its rank."""
        return False

    def warm_up(self) -> None:
        """Import what training loops import later, in a process that nobody waits for: a spare, or a newcomer."""
        return

    def take_device(self) -> None:
        """Have the current thread use this worker's GPU, where a framework has such a thing by thread; not only in a group."""
        return

    def open_rendezvous(self, node_ip: str) -> str:
        """Open the place where the members meet, bound to ``node_ip``; returns what `Member.rendezvous` shall be."""
        return ""

    @abstractmethod
    def set_up(self, member: Member) -> None:
        """Join the group. Returns when all members have joined; raises after the backend's own timeout."""

    @abstractmethod
    def tear_down(self) -> None:
        """Leave the group and close its sockets. Does nothing where there is none; does not raise for a broken one."""

    def abort(self) -> None:
        """Make collectives that block in this process fail, where the framework can."""
        return

    def recover_inside(self, rejoin: Callable[[int | None, bool], None]) -> None:
        """Called after `load`: have the framework call ``rejoin`` in train_func's thread where it wants a new group.

        It is given the rounds of the run after which train_func's state stands (`raysgd.session.base.Session.iteration` when it
        was committed), from which iterations go on, None: after all that were made; and whether the group is broken, or
        `change_group` was what made it leave.
        That leaves the present one by `tear_down`, waits until the controller knows who the members are to be, joins them by
        `set_up`, and returns; or raises `raysgd.errors.AttemptEnded`, which is to be let through. For
        `BackendConfig.recovers_inside`.
        """
        return

    def broken_group(self, why: str) -> Exception | None:
        """What train_func is to get from session calls in a group that is broken, if it can get over that where it is now.

        None: it cannot; it is interrupted, left and entered again.
        """
        return None

    def change_group(self) -> bool:
        """The members are to change: have train_func call ``rejoin`` at a time that suits it. False: it cannot be told now.

        Called for rank 0 alone.
        """
        return False

    def is_collective_error(self, error: BaseException) -> bool:
        """Whether ``error`` looks like the consequence of a peer's failure rather than a cause."""
        return False

    def flight_record(self) -> FlightRecord | None:
        """What the collectives of this process were lately, where the framework knows. Called in another thread than
        train_func's, which may wait in one.
        """
        return None

    def explain(self, error: BaseException) -> str | None:
        """What to do about an error of train_func whose own text does not tell, for the user to read below it."""
        return None

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """How objects are reduced when train_func returns them: wrapped models unwrapped, GPU tensors on the CPU."""
        return {}


class Coordinator(ABC):
    """A server that the members of a backend meet at. It outlives them, and every group of a Trainer meets there.

    When no further group is to come its process is ended, and the server with it.
    """

    @abstractmethod
    def open(self, node_ip: str, members: Sequence[Member]) -> str:
        """Make ready for a group; returns what `Member.rendezvous` shall be. What the group before it left is forgotten.

        Args:
            node_ip: The address of this process's node, the only one that servers may bind.
            members: By rank; their ``rendezvous`` is empty.
        """

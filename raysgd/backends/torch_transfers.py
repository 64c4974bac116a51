"""Records sends and receives between ranks, which PyTorch's flight recorder does not have for gloo, and times waiting.

torch makes each of them by a method of `torch.distributed.ProcessGroup`: also the asynchronous ones, those in a batch, and
those of objects. `install` puts functions around these methods. So a send or receive costs less than two microseconds. The
sends from one rank to another are numbered alike at both ends, for each tag. Python code waits for an
operation by ``Work.wait``, as that of FSDP2 does; DDP waits in C++, see `raysgd.torch.reduction`. With nccl it returns at once.
Worker side.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from raysgd.backends.flight_recorder import FROM_ANY, Collective, Transfer, display_name
from raysgd.errors import UsageError
from raysgd.session import context

#: An attribute of the functions that `install` puts in place.
_MARK = "_is_of_raysgd"
#: In the place of the other rank: any rank, and all ranks.
_ANY, _ALL = -1, -2


class _Call:
    """A call that another thread may see before it has returned, where torch makes no ``Work``."""

    def is_completed(self) -> bool:
        return False


#: The name of a process group, the operation, the other rank's number in the group, and the tag.
_Key = tuple[str, str, int, int]
#: How often it was done, when the last one began, and a reference to the last one while it is not done.
_Last = tuple[int, int, Callable[[], Any]]
_transfers: dict[_Key, _Last] = {}


def install() -> None:
    """Record the sends and receives of this process, and time its waiting from now on; once in a process."""
    from torch.distributed import ProcessGroup, Work

    if hasattr(ProcessGroup.send, _MARK):
        return
    for operation in ("send", "recv", "recv_anysource"):
        setattr(ProcessGroup, operation, _recorded_transfer(operation, getattr(ProcessGroup, operation)))
    methods: Any = ProcessGroup  # torch's annotations lack this one
    methods.monitored_barrier = _recorded_barrier(methods.monitored_barrier)
    Work.wait = _timed_wait(Work.wait)  # type: ignore[method-assign]


def forget_all() -> None:
    """Forget the sends and receives of an attempt that has ended."""
    _transfers.clear()


def read_transfers() -> tuple[Collective, ...]:
    """Return the last send or receive of this process for each group, direction, other rank and tag."""
    groups = {str(group.group_name): (group, ranks) for group, ranks in list_own_groups()}
    return tuple(_describe(*groups[key[0]], key, last) for key, last in list(_transfers.items()) if key[0] in groups)


def list_own_groups() -> list[tuple[Any, dict[int, int]]]:
    """Return the process groups that this process is in, each with its world ranks and their numbers in the group."""
    from torch.distributed import GroupMember, distributed_c10d

    # torch lists one more in a process that is not in all groups: a number, in the place of those.
    groups: list[tuple[Any, dict[int, int]]] = list(distributed_c10d._world.pg_group_ranks.items())
    return [(group, ranks) for group, ranks in groups if group is not GroupMember.NON_GROUP_MEMBER]


def _recorded_transfer(operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
    is_from_any = operation == "recv_anysource"

    @functools.wraps(original)
    def transfer(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not tensors[0].is_cpu:
            _refuse_gloo(group, tensors[0].device)
        work = original(group, tensors, *args, **kwargs)
        if tensors[0].is_cpu:  # otherwise it is nccl, whose sends and receives the flight recorder has
            *peer, tag = *args, *kwargs.values()
            _record((group.group_name, operation, _ANY if is_from_any else peer[0], tag), weakref.ref(work))
        return work

    setattr(transfer, _MARK, True)
    return transfer


def _refuse_gloo(group: Any, device: Any) -> None:
    """Raise a UsageError for a tensor that gloo would take for one of the CPU: it ends the process at its address."""
    if group._get_backend(device).name() == "gloo":
        raise UsageError(
            f"gloo cannot send or receive a tensor on {device}: send tensor.cpu(), receive into a tensor on the CPU, or give "
            "each worker a GPU of its own (gpus_per_worker=1), which makes a group of nccl."
        )


def _recorded_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any, *args: Any, **kwargs: Any) -> Any:
        call = _Call()
        _record((group.group_name, "monitored_barrier", _ALL, 0), weakref.ref(call))
        with context.current().progress.waiting:
            return original(group, *args, **kwargs)  # `call` ends with this frame

    return barrier


def _timed_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        with context.current().progress.waiting:
            return original(work, *args, **kwargs)

    return wait


def _record(key: _Key, work: Callable[[], Any]) -> None:
    number = _transfers[key][0] + 1 if key in _transfers else 1
    _transfers[key] = number, time.time_ns(), work


def _describe(group: Any, ranks: dict[int, int], key: _Key, last: _Last) -> Collective:
    """Return a transfer of a group as a collective; ``ranks`` are the world ranks with their numbers in the group."""
    _, operation, peer, tag = key
    number, began_ns, work = last
    of_world = {number: rank for rank, number in ranks.items()}
    here, name = of_world[group.rank()], display_name(group.group_name, group.group_desc)
    transfer: Transfer = ""
    members = sorted(ranks)
    if peer == _ALL:
        place = f"{operation}() of {name}"
    elif peer == _ANY:
        transfer, place = FROM_ANY, f"{name} from any rank to rank {here}"
    else:
        transfer = "send" if operation == "send" else "receive"
        members = [here, of_world[peer]] if transfer == "send" else [of_world[peer], here]
        place = f"{name} from rank {members[0]} to rank {members[1]}"
    if tag:
        place += f" with tag {tag}"
    pending = work()
    is_done = pending is None or pending.is_completed()
    return Collective(place, number, f"gloo:{operation}", (), is_done, began_ns, tuple(members), transfer=transfer)

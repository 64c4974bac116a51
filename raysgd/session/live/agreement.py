"""`Agreement`: ranks that hold pieces of a state change them only if all ranks have their gradients. Worker side."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

from raysgd.errors import AttemptEnded, SessionError

#: Seconds after the end of the attempt until all that ranks have noted is in the store; and at most, if it does not end.
_NOTED_S, _AT_MOST_S = 0.05, 1.0
#: Where rank 1 says where its store is.
_SECOND = "live/second"
#: Seconds to connect to the store of rank 1. If it has died, torch tries again for so long.
_CONNECT_S = 0.5
#: The stores of the newest group: other ranks may ask them after this one has left, until it joins another group with pieces.
_kept: list[Any] = []


@final
class Agreement:
    """The exchange of a number before the changes of each step.

    A rank may die within that exchange, after it has ended on some of the ranks. The others then ask a store in which each rank
    has noted before that it has its gradients, and the first that asks decides for all. The group's store is on rank 0. Rank 1
    opens another one, for the case that rank 0 is the one that has died.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        device: The device of the tensors that the group exchanges.
    """

    def __init__(self, rank: int, world_size: int, device: Any) -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._world_size = rank, world_size
        self._number = torch.zeros(1, device=device)
        group: Any = dist.distributed_c10d._get_default_store()
        _kept[:] = [group]
        self._stores = _kept.copy()  # in the order in which they are asked
        needs_second = isinstance(group._underlying_non_prefix_store, dist.TCPStore)  # type: ignore[attr-defined]
        self._must_join = needs_second and rank != 1
        if needs_second and rank == 1:
            self._open_second(group)

    def reach(self, step: int, is_over: Callable[[], bool]) -> None:
        """Wait until all ranks have their gradients; then each of them makes its changes, even if the attempt is over by then.

        Args:
            step: The number of steps before this one.
            is_over: Whether the attempt is over.

        Raises:
            Exception, AttemptEnded: No rank makes its changes.
        """
        import torch.distributed as dist

        if self._must_join:
            self._join_second(is_over)
        try:
            self._note(str(step))
            dist.all_reduce(self._number.fill_(1))
            if int(self._number) != self._world_size:  # an aborted collective on a GPU raises no error
                raise SessionError("the ranks could not agree that all of them have their gradients")
        except (Exception, AttemptEnded):
            if not self._is_decided(str(step), is_over):
                raise

    def _note(self, step: str) -> None:
        for store in reversed(self._stores):  # so that the first one has nothing that a later one does not have
            with suppress(RuntimeError):  # its rank has died, which the exchange finds out
                store.set(_key(self._rank), step)

    def _is_decided(self, step: str, is_over: Callable[[], bool]) -> bool:
        """Return whether all ranks have noted that they have their gradients, as the first rank that asks finds it."""
        for store in self._stores:
            with suppress(RuntimeError):  # its rank has died
                return decide(store, step, self._world_size, is_over)
        return False

    def _open_second(self, group: Any) -> None:
        import torch.distributed as dist

        family, kind, *_, address = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as towards_group:
            towards_group.connect(address)
            host = towards_group.getsockname()[0]
        second = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        _kept.append(second)
        group.set(_SECOND, f"{host} {second.port}")
        self._stores.append(second)

    def _join_second(self, is_over: Callable[[], bool]) -> None:
        import torch.distributed as dist

        self._must_join, (group,) = False, self._stores
        with suppress(RuntimeError):  # one of both has died
            while not group.check([_SECOND]):
                if is_over():
                    return
                time.sleep(0.001)
            host, port = group.get(_SECOND).decode().split()
            timeout = timedelta(seconds=_CONNECT_S)
            self._stores.append(dist.TCPStore(host, int(port), wait_for_workers=False, timeout=timeout))  # type: ignore[attr-defined]


def decide(store: Any, step: str, world_size: int, is_over: Callable[[], bool]) -> bool:
    """Return whether all ranks have noted in a store that they have their gradients, as the first rank that asks finds it.

    Ranks that are late may still note it, until the attempt ends: after that none begins the exchange.

    Raises:
        RuntimeError: The rank with the store has died.
    """
    limit = time.monotonic() + _AT_MOST_S
    keys = [_key(rank) for rank in range(world_size)]
    while not (are_ready := all(store.check([key]) and store.get(key) == step.encode() for key in keys)):
        now = time.monotonic()
        if is_over():
            limit = min(limit, now + _NOTED_S)
        if now > limit:
            break
        time.sleep(_NOTED_S / 10)
    found: bytes = store.compare_set(f"live/{step}", "", "changes" if are_ready else "none")
    return found == b"changes"


def _key(rank: int) -> str:
    return f"live/{rank} noted"

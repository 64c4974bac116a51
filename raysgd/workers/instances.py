"""The class API in a worker: an instance of the user's class, and functions called with it. Worker side."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from raysgd.backends.base import Member
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.local import LocalSession
from raysgd.workers.pickling import Reducers, loads
from raysgd.workers.returned import dumps_returned, failed_call


class MemberSession(LocalSession):
    """Ranks and sizes of the group for code of the class API, which has no attempt: reports are printed."""

    in_worker = True

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.identity = Identity(
            member.rank, member.world_size, member.local_rank, member.local_world_size, member.node_rank
        )


class Instances:
    """Holds at most one instance."""

    def __init__(self) -> None:
        self._instance: Any = None

    def make(self, blob: bytes, member: Member, node: str, is_collective: Callable[[BaseException], bool]) -> None:
        """Make the instance of ``(class, args, kwargs)``; a class of None makes none.

        Args:
            blob: A pickle of these.
            member: This worker in its group.
            node: As users are told of it.
            is_collective: Whether an error is one of a collective, which may follow from another rank's.

        Raises:
            CallFailed: The constructor failed.
        """
        context.install(MemberSession(member))
        try:
            cls, args, kwargs = loads(blob)
            self._instance = None if cls is None else cls(*args, **kwargs)
            return
        except BaseException as error:
            failed = failed_call(error, member.rank, node, __file__)
            failed.data["in_collective"] = is_collective(error)
            # What they hold keeps the group's sockets open, and so the peers.
            traceback.clear_frames(error.__traceback__)
        raise failed

    def execute(self, blob: bytes, has_instance: bool, reducers: Reducers, rank: int, node: str) -> bytes:
        """Call a function; the pickle of what it returned.

        Raises:
            CallFailed: It failed, or what it returned cannot travel.
        """
        try:
            function = loads(blob)
            value = function(self._instance) if has_instance else function()
            return dumps_returned(value, "the function", reducers)
        except BaseException as error:
            failed = failed_call(error, rank, node, __file__)
        raise failed

    def drop(self) -> None:
        self._instance = None
        context.uninstall()

"""The class API in a worker: an instance of the user's class, and functions called with it. Worker side."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from raysgd.backends.base import Member
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.local import LocalSession
from raysgd.workers.pickling import Reducers, dumps_returned, failed_call, loads


class MemberSession(LocalSession):
    """Gives code of the class API the ranks and sizes of its group. It has no attempt, so reports are printed."""

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
        """Make the instance of ``(class, args, kwargs)``; for a class of None, none.

        Args:
            blob: The pickle of these.
            member: This worker in its group.
            node: Its node, as users see it.
            is_collective: Returns whether an error is one of a collective, which may follow from another rank's error.

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
            # The frames hold the group's open sockets, for which the peers would wait.
            traceback.clear_frames(error.__traceback__)
        raise failed

    def execute(self, blob: bytes, has_instance: bool, reducers: Reducers, rank: int, node: str) -> bytes:
        """Call a function; returns the pickle of its value.

        Raises:
            CallFailed: The function failed, or its value does not pickle.
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

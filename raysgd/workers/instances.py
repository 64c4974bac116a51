"""The class API in a worker: an instance of the user's class, and functions called with it. Worker side."""

from __future__ import annotations

from typing import Any

from raysgd.backends.base import Member
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.local import LocalSession
from raysgd.workers.pickling import Reducers, dumps_named, loads


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

    def make(self, blob: bytes, member: Member) -> None:
        """Make the instance of ``(class, args, kwargs)``; a class of None makes none."""
        context.install(MemberSession(member))
        cls, args, kwargs = loads(blob)
        self._instance = None if cls is None else cls(*args, **kwargs)

    def execute(self, blob: bytes, has_instance: bool, reducers: Reducers) -> bytes:
        function = loads(blob)
        value = function(self._instance) if has_instance else function()
        return dumps_named(value, "the value the function returned", reducers)

    def drop(self) -> None:
        self._instance = None
        context.uninstall()

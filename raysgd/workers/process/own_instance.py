"""The class API in a worker: an instance of the user's class, and functions called with it. Worker side."""

from __future__ import annotations

import traceback
from typing import Any

from raysgd.backends.base import Backend, Member, is_collective_error
from raysgd.session import context
from raysgd.session.local import LocalSession
from raysgd.workers.orders import Blob
from raysgd.workers.pickling import dumps_returned, failed_call, loads_call
from raysgd.workers.process.build import identity_of, resolve


class MemberSession(LocalSession):
    """Gives code of the class API the ranks and sizes of its group. It has no attempt, so reports are printed."""

    in_worker = True

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.identity = identity_of(member)


class OwnInstance:
    """Holds at most one instance, which is a member of a process group.

    Args:
        node: This process's node, as users see it.

    Attributes:
        is_in_group: This process is in a group, with an instance or without one.
    """

    def __init__(self, backend: Backend, node: str) -> None:
        self._backend = backend
        self._node = node
        self._instance: Any = None
        self.is_in_group = False

    def make(self, blob: Blob, member: Member) -> None:
        """Join a group and make the instance, given a pickle of ``(class, args, kwargs)``; none if the class is None.

        Raises:
            CallFailed: The constructor failed.
        """
        self._backend.init_process_group(member)
        self.is_in_group = True
        try:
            self._construct(resolve(blob), member)
        except BaseException:
            self.drop()
            raise

    def execute(self, blob: Blob, has_instance: bool, rank: int) -> bytes:
        """Call a function; return the pickle of its value.

        Raises:
            CallFailed: The function failed, or its value does not pickle.
        """
        data = resolve(blob)
        self._backend.set_device()
        try:
            function = loads_call(data)
            value = function(self._instance) if has_instance else function()
            return dumps_returned(value, "the function", self._backend.get_reducers())
        except BaseException as error:
            failed = failed_call(error, rank, self._node, __file__)
        raise failed  # outside of the handler: otherwise the error is sent a second time, as its context

    def drop(self) -> None:
        """Drop the instance and leave its group."""
        self._instance = None
        context.uninstall()
        self._backend.destroy_process_group()
        self.is_in_group = False

    def _construct(self, data: bytes, member: Member) -> None:
        context.install(MemberSession(member))
        try:
            cls, args, kwargs = loads_call(data)
            self._instance = None if cls is None else cls(*args, **kwargs)
            return
        except BaseException as error:
            failed = failed_call(error, member.rank, self._node, __file__)
            failed.data["in_collective"] = is_collective_error(self._backend, error)
            # The frames hold the group's open sockets, for which the peers would wait.
            traceback.clear_frames(error.__traceback__)
        raise failed

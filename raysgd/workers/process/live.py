"""The state of a complete step that a process keeps for the next attempt, and its way to other workers. Worker side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from raysgd._util.logs import get_logger
from raysgd.checkpoint.streaming import read_state, stream_state
from raysgd.errors import CheckpointError, CheckpointNotFoundError, UsageError
from raysgd.session import rank_state
from raysgd.session.events import HeldStep, LiveReport, Mark
from raysgd.session.live.kept import KeptState, without_meshes
from raysgd.session.live.state import LiveState
from raysgd.transport import Endpoint, Listener, connect
from raysgd.workers.orders import LiveOrder

#: Kind of the connection in its hello.
_KIND = "live"
#: Seconds without a byte from the other worker, after which the copy has failed.
_SILENCE_S = 30.0
_CLOSE_S, _POLL_S = 1.0, 0.1


class LiveHolder:
    """Keeps the state of a complete step until an attempt has begun that does not need it any more."""

    def __init__(self, node_ip: str) -> None:
        self._node_ip = node_ip
        self._run_id = ""
        self._last = (0, 0)  # rank and attempt
        self._marks: tuple[Mark, ...] = ()
        self._problem: str | None = None
        self._kept: KeptState | None = None
        self._copy: _Copy | None = None
        self._server: _Server | None = None

    def begin(self, run_id: str, order: LiveOrder | None) -> None:
        """An attempt begins. Only the state that it starts from is kept; one that another worker holds is copied from now on."""
        if self._kept is not None and (order is None or not _is_same_step(self._kept.held, order.held)):
            self.release()
        self._run_id, self._marks, self._problem = run_id, (), None
        self._abandon_copy()
        if order is not None and order.endpoint is not None and not self._holds(order.held):
            self._copy = _Copy(order.endpoint, order.held)

    def state_of(self, held: HeldStep) -> KeptState:
        """Return the state of a step; one that another worker holds is kept until a step of this attempt is complete.

        What this process held is sent on to those that still need it.

        Raises:
            CheckpointNotFoundError: It is not there any more, or the copy did not arrive.
            UsageError: It was released.
        """
        if self._kept is None or not self._holds(held):
            if self._copy is None:
                raise UsageError(
                    "load_checkpoint() was called after live_state().step(), without a checkpoint since: call it once, before "
                    "training."
                )
            self._kept = self._copy.result()
        return self._kept

    def _holds(self, held: HeldStep) -> bool:
        return self._kept is not None and self._kept.held.piece == held.piece

    def _abandon_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.abandon()

    def release(self) -> None:
        """Keep no state any more."""
        self._kept = None
        self._abandon_copy()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def on_left(self, rank: int, attempt: int, live: LiveState | None, problem: str | None) -> None:
        """train_func has left the attempt; the user's objects are released.

        What the attempt started from is kept if no newer step was taken, and it was not released before.
        """
        self._last, self._problem = (rank, attempt), problem
        if live is None:
            return
        self._marks = tuple(live.marks)
        try:
            kept = live.take()
        except Exception as error:  # a device that failed, or the user's own state_dict()
            get_logger().warning("the live state could not be kept: %s: %s", type(error).__name__, error)
            kept = None
        if kept is not None:
            self.release()
            self._kept = kept
        live.close()

    def report(self, run_id: str) -> LiveReport | None:
        """Return what this process has of a run; it releases what it has of another one."""
        if run_id != self._run_id:
            self.release()
            return None
        kept = self._kept
        if kept is not None and not kept.is_unchanged:
            self.release()
            kept = None
        held = None if kept is None else kept.held
        if held is None and not self._marks and self._problem is None:
            return None
        if kept is not None and (self._server is None or self._server.kept is not kept):
            if self._server is not None:
                self._server.close()
            self._server = _Server(kept, self._node_ip)
        endpoint = None if self._server is None else self._server.endpoint
        return LiveReport(*self._last, self._marks, held, endpoint, self._problem)


class _Server:
    """Sends a state to other workers, from a thread of its own.

    Attributes:
        endpoint: Where they connect to.
    """

    def __init__(self, kept: KeptState, node_ip: str) -> None:
        self.kept = kept
        self._loop = asyncio.new_event_loop()
        self._listener = Listener({_KIND: self._send})
        self.endpoint = self._loop.run_until_complete(self._listener.open(node_ip))
        self._thread = threading.Thread(target=self._serve, name="raysgd-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and the connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._listener.close()
        sending = asyncio.all_tasks(self._loop)
        for task in sending:
            task.cancel()
        if sending:
            self._loop.run_until_complete(asyncio.wait(sending))
        self._loop.close()

    async def _send(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the state, without its checksums if it has changed meanwhile; nothing if another one or piece is asked for."""
        if _key(self.kept.held) != hello["step"]:
            return
        writer.transport.set_write_buffer_limits(high=0)  # a chunk is valid until the next one
        for chunk in stream_state(self.kept.state, is_valid=lambda: self.kept.is_unchanged):
            writer.write(chunk)
            await writer.drain()


@dataclass(frozen=True)
class FromSurvivor:
    """A starting point: the state of a complete step, in this process's memory or in another worker's.

    Its tensors are those that the last attempt trained, or copies that were sent.
    """

    order: LiveOrder
    holder: LiveHolder

    def load(
        self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        kept = self.holder.state_of(self.order.held)
        return without_meshes(kept.state), rank_state.after_step(self.order.small, self.order.held.positions)


class _Copy:
    """A state on its way from another worker, while this one builds its model."""

    def __init__(self, endpoint: Endpoint, held: HeldStep) -> None:
        self._endpoint = endpoint
        self._held = held
        self._line: socket.socket | None = None
        self._is_abandoned = False
        self._found: Future[Any] = Future()
        threading.Thread(target=self._run, name="raysgd-live-copy", daemon=True).start()

    def result(self) -> KeptState:
        """Wait for the state.

        Raises:
            CheckpointNotFoundError: It is not there any more, or the copy did not arrive.
        """
        while not self._found.done():  # a wait in C would not be interrupted at the end of the attempt
            wait([self._found], _POLL_S)
        try:
            return KeptState(self._held, self._found.result())
        except (OSError, CheckpointError) as error:
            raise CheckpointNotFoundError(
                f"{self._where} could not be copied: {type(error).__name__}: {error}"
            ) from error

    def abandon(self) -> None:
        """Copy no more."""
        self._is_abandoned = True
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has arrived
                self._line.shutdown(socket.SHUT_RDWR)

    @property
    def _where(self) -> str:
        return f"the state of step {self._held.id.step} on another worker"

    def _run(self) -> None:
        try:
            self._found.set_result(self._read())
        except BaseException as error:
            self._found.set_exception(error)

    def _read(self) -> Any:
        with (
            connect(self._endpoint, {"kind": _KIND, "step": _key(self._held)}, _SILENCE_S) as self._line,
            self._line.makefile("rb") as stream,
        ):
            self._line.settimeout(_SILENCE_S)
            if self._is_abandoned:
                raise ConnectionAbortedError("the attempt is over")
            return read_state(stream, self._where)


def _is_same_step(one: HeldStep, other: HeldStep) -> bool:
    return (one.id, one.place) == (other.id, other.place)


def _key(held: HeldStep) -> list[int]:
    return [*held.id, held.piece, held.place]

"""The controller's side of simulated workers: a real `WorkerGroup`, of which only what calls Ray is replaced.

A worker's handle sends its calls over one connection to the process of `bench.scale_peers`, which holds all workers. A call
of an actor costs Ray more than such a message, so this is the least that a group can cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray.exceptions import RayActorError

from raysgd.backends.none import NoneConfig
from raysgd.config import FailureConfig, ScalingConfig
from raysgd.transport import pack, read_message
from raysgd.workers.group import group as real
from raysgd.workers.group import joining, monitor
from raysgd.workers.group.processes import Worker
from raysgd.workers.placement.capacity import Node

#: Kind of the connection of the workers' process, in its hello.
KIND = "calls"
OWN_NODE = "controller"
_NUM_CPUS = 1e6


class Calls:
    """Calls of simulated workers, over one connection.

    Attributes:
        num_calls: The calls so far.
        num_items: The items of streams so far.
        on_stream: Called with the name of each method that is called for a stream.
        stats: What the workers' process has measured; see `bench.scale_peers.Workers.describe`.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_items = 0
        self.stats: dict[str, Any] = {}
        self.is_connected = asyncio.Event()
        self.on_stream: Callable[[str], None] = lambda method: None
        self._writer: asyncio.StreamWriter | None = None
        self._open: dict[int, tuple[int, asyncio.Future[Any] | asyncio.Queue[Any]]] = {}

    async def serve(self, hello: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_connected.set()
        with contextlib.suppress(EOFError):
            while True:
                kind, key, value = await read_message(reader)
                if kind == "stats":
                    self.stats = value
                elif kind == "died":
                    self._fail(key)
                else:
                    self._answer(kind, key, value)

    def call(self, worker: int, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Call a method of a worker; return its answer."""
        answer = asyncio.get_running_loop().create_future()
        self._send(worker, method, args, answer)
        return answer

    def open_stream(self, worker: int, method: str, args: tuple[Any, ...]) -> AsyncIterator[Any]:
        """Call a method that answers with a stream, at once; return the stream."""
        items: asyncio.Queue[Any] = asyncio.Queue()
        self._send(worker, method, args, items)
        self.on_stream(method)
        return _items(items)

    def _send(self, worker: int, method: str, args: tuple[Any, ...], answer: Any) -> None:
        assert self._writer is not None
        self.num_calls += 1
        self._open[self.num_calls] = worker, answer
        self._writer.write(pack((self.num_calls, worker, method, args)))

    def _answer(self, kind: str, key: int, value: Any) -> None:
        if key not in self._open:  # the worker has died since
            return
        _, answer = self._open[key]
        if kind == "item":
            self.num_items += 1
            answer.put_nowait(value)  # type: ignore[union-attr]
            return
        del self._open[key]
        if isinstance(answer, asyncio.Queue):
            answer.put_nowait(None)
        elif not answer.done():
            answer.set_result(value)

    def _fail(self, worker: int) -> None:
        for key in [key for key, (other, _) in self._open.items() if other == worker]:
            _, answer = self._open.pop(key)
            error = RayActorError(error_msg="The actor died unexpectedly: its connection was closed.")
            if isinstance(answer, asyncio.Queue):
                answer.put_nowait(error)
            elif not answer.done():
                answer.set_exception(error)
                answer.exception()  # nobody may wait for it


async def _items(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


class _Method:
    def __init__(self, calls: Calls, worker: int, name: str, *, is_stream: bool = False) -> None:
        self._given = calls, worker, name
        self._is_stream = is_stream

    def options(self, **options: Any) -> _Method:
        return _Method(*self._given, is_stream=options.get("num_returns") == "streaming")

    def remote(self, *args: Any) -> Any:
        calls, worker, name = self._given
        return (calls.open_stream if self._is_stream else calls.call)(worker, name, args)


class Handle:
    """Stands in for the handle of a worker's actor."""

    def __init__(self, calls: Calls, worker: int) -> None:
        self._calls = calls
        self._actor_id = worker.to_bytes(16)
        self._worker = worker

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._calls, self._worker, name)


class Slot:
    """Stands in for a `WorkerSlot` that always has its resources."""

    placement = None


class Slots:
    """Stands in for `WorkerSlots`, with room for every slot."""

    is_in_existing_placement = False
    name = "simulated"

    def __init__(self, *_: Any) -> None:
        self.is_open = False
        self._free: list[Slot] = []

    async def open(self, count: int) -> None:
        self.is_open = True
        self._free = [Slot() for _ in range(count)]

    async def take(self, avoid: Collection[str] = (), *, must_have_node: bool = False) -> Slot | None:
        return self._free.pop() if self._free else None

    async def take_placed(self, avoid: Collection[str], num_left: int = 0) -> Slot | None:
        return await self.take() if len(self._free) > num_left else None

    async def add(self, avoid: Collection[str] = ()) -> Slot:
        return Slot()

    async def find(self, avoid: Collection[str]) -> Slot:
        return Slot()

    def release(self, slot: Slot) -> None:
        self._free.append(slot)

    def remove(self, slot: Slot) -> None:
        return None

    async def remove_unplaced(self) -> None:
        return None

    async def look(self) -> None:
        return None

    def is_placed(self, slot: Slot) -> bool:
        return True

    def close(self) -> None:
        self._free.clear()


class Starter:
    """Stands in for `WorkerStarter`: the workers wait in their process."""

    calls: Calls

    def __init__(self, *_: Any) -> None:
        self._num_started = 0

    async def start(self, slot: Any, *, warm_up: bool = False) -> Worker:
        handle = Handle(self.calls, self._num_started)
        self._num_started += 1
        return Worker(slot, handle, handle.load.remote(NoneConfig(), "controller", warm_up))


class Agents:
    """Stands in for `NodeAgents`: no process is to be examined."""

    def __init__(self, *_: Any) -> None:
        return None

    async def explain_death(self, error: BaseException, info: Any) -> str:
        return str(error)

    async def is_node_gone(self, info: Any) -> bool:
        return False

    async def check_processes(self, *_: Any) -> list[Any]:
        return []

    def watch_workers(self, workers: Any) -> None:
        return None

    def keep_copies(self, parts: Sequence[Any]) -> None:
        return None

    def expect_exit(self, info: Any) -> None:
        return None

    def close(self) -> None:
        return None


def _room() -> list[Node]:
    return [Node("spare", "spare", {"CPU": _NUM_CPUS}, {"CPU": _NUM_CPUS})]


def _ray() -> Any:
    context = SimpleNamespace(get_node_id=lambda: OWN_NODE)
    return SimpleNamespace(kill=lambda handle: handle.exit.remote(), get_runtime_context=lambda: context)


@contextlib.contextmanager
def without_ray(calls: Calls) -> Iterator[None]:
    """Replace what a `WorkerGroup` needs of Ray."""
    starter = type("Starter", (Starter,), {"calls": calls})
    parts = {"WorkerSlots": Slots, "WorkerStarter": starter, "NodeAgents": Agents}
    with (
        mock.patch.multiple(real, **parts, ray=_ray(), list_nodes=_room, check_feasible=lambda *_: None),
        mock.patch.object(real, "wait_until_feasible", mock.AsyncMock()),
        mock.patch.multiple(joining, has_autoscaler=lambda: False, list_nodes=_room),
        mock.patch.object(monitor, "list_draining_nodes", dict),
    ):
        yield


class Formed:
    """A group that was ordered: when it was ordered, was ready and had its orders, and the CPU seconds of this process then."""

    def __init__(self) -> None:
        self.size = 0
        self.times: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.mark("begun")

    def mark(self, what: str) -> None:
        self.times[what], self.cpu[what] = time.time(), time.process_time()

    def per_worker_s(self) -> dict[str, float]:
        """Return the CPU seconds per worker: to form the group, and to order its attempt."""
        return {
            "form": (self.cpu["ready"] - self.cpu["begun"]) / self.size,
            "order": (self.cpu["ordered"] - self.cpu["ready"]) / self.size,
        }


class SimulatedGroup(real.WorkerGroup):
    """A `WorkerGroup` of simulated workers; made within `without_ray`.

    Attributes:
        formed: One entry for each group that was ordered.
        has_ordered: Set while all workers have the orders of the last one.
    """

    def __init__(self, calls: Calls, num_workers: int | tuple[int, int], failure: FailureConfig) -> None:
        super().__init__(
            "simulated",
            ScalingConfig(num_workers=num_workers),
            NoneConfig(),
            failure,
            controller="",
            runtime_env=None,
            versions={},
        )
        calls.on_stream = self._count_order
        self.formed: list[Formed] = []
        self.has_ordered = asyncio.Event()
        self._num_ordered = 0

    async def get_ready(self, *, keep_size: bool = False, run_id: str = "") -> list[str]:
        self.has_ordered.clear()
        self._num_ordered = 0
        self.formed.append(Formed())
        return await super().get_ready(keep_size=keep_size, run_id=run_id)

    async def open_rendezvous(self) -> str:
        opened = await super().open_rendezvous()
        self.formed[-1].size = self.size
        self.formed[-1].mark("ready")
        return opened

    def _count_order(self, method: str) -> None:
        self._num_ordered += method == "run"
        if self._num_ordered == self.size and method == "run":
            self.formed[-1].mark("ordered")
            self.has_ordered.set()

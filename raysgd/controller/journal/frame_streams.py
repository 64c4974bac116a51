"""Both ends of the way of a run's frames to a reader: over a connection if there is one, else through a Ray stream.

Both ways can begin at any frame. A reader whose connection breaks continues through Ray with the next frame, and learns
there whether the TrainerActor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raysgd.controller.frames import Frame
from raysgd.controller.requests import RunNotGiven
from raysgd.controller.watchdog import ASK_AGAIN_S, comes_back
from raysgd.transport import Endpoint, connect, pack, receive_message

#: Kind of the connection in its hello.
KIND = "frames"
#: Items of the Ray stream that may wait for a reader. Further frames stay in the frame log until they are read.
STREAM_AHEAD = 16
_CONNECT_TIMEOUT_S = 3.0


async def serve_frames(
    read: Callable[[str, int], Awaitable[AsyncIterator[list[Frame]]]],
    hello: dict[str, Any],
    _: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Serve one connection. ``read`` returns batches of a run's frames, from a number on; ``hello`` names both."""
    async for batch in await read(str(hello["run"]), int(hello["seq"])):
        writer.write(pack(batch))
        await writer.drain()


def follow_frames(controller: Any, run_id: str, *, last: str, send_again: Callable[[], bool]) -> Iterator[list[Frame]]:
    """Yield batches of a run's frames as they come, also across restarts of the TrainerActor.

    Args:
        controller: Handle of the TrainerActor.
        run_id: The run.
        last: Kind of the last frame to read.
        send_again: Called when a restarted TrainerActor must get the run's request again; returns whether it will.

    Raises:
        RayError: The TrainerActor is gone for good, or there is no such run.
    """
    seq = 0
    while True:
        try:
            _check_ray_is_up()
            endpoint = ray.get(controller.endpoint.remote())
            for batch in read_frames(controller, endpoint, run_id, seq=seq, last=last):
                seq = batch[-1].seq + 1
                yield batch
            return
        except RayActorError:
            if not comes_back(controller):
                raise
            send_again()
        except RayTaskError as error:
            if not isinstance(error.cause, RunNotGiven) or not send_again():
                raise
            time.sleep(ASK_AGAIN_S)


def read_frames(
    controller: Any, endpoint: Endpoint | None, run_id: str, *, seq: int = 0, last: str
) -> Iterator[list[Frame]]:
    """Yield batches of a run's frames as they come, up to the batch that holds a frame of kind ``last``.

    Args:
        controller: Handle of the TrainerActor.
        endpoint: Where to connect; None: read through Ray.
        run_id: The run.
        seq: Number to begin at.
        last: Kind of the last frame to read.

    Raises:
        RayError: The TrainerActor is gone, or there is no such run.
    """
    if endpoint is not None:
        hello = {"kind": KIND, "run": run_id, "seq": seq}
        # It may not be reachable, or break: the rest comes through Ray.
        with (
            contextlib.suppress(OSError, EOFError),
            connect(endpoint, hello, _CONNECT_TIMEOUT_S) as line,
            line.makefile("rb", buffering=1 << 16) as file,
        ):
            while True:
                batch = receive_message(file)
                yield batch
                seq = batch[-1].seq + 1
                if last in {frame.kind for frame in batch}:
                    return
    _check_ray_is_up()
    stream = controller.stream.options(
        num_returns="streaming", _generator_backpressure_num_objects=STREAM_AHEAD
    ).remote(run_id, seq)
    for ref in stream:
        batch = ray.get(ref)
        yield batch
        if last in {frame.kind for frame in batch}:
            return


def _check_ray_is_up() -> None:
    if not ray.is_initialized():  # a call would start Ray again
        raise RayActorError

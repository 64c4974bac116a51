"""``raysgd logs``: what the workers of a run printed. Driver side.

Ray writes the output of each worker process to two files on its node. A worker records in the events ``entered`` and ``left``
which files these are, and what they held then. The command reads the parts between, here or in a task on the worker's node.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from raysgd.cli import cluster
from raysgd.cli.console import (
    FAILED,
    SUCCEEDED,
    address_flag,
    json_flag,
    print_error,
    print_json,
    storage_flag,
    whole_number,
)
from raysgd.cli.runs.finding import find_run
from raysgd.cli.script import MARK
from raysgd.errors import ConfigError
from raysgd.result import Event
from raysgd.runs.reading import outcome_of
from raysgd.runs.state import StateReader

#: Seconds between two looks at the files of a live run.
_INTERVAL_S = 0.3
#: Seconds for a node to answer; one that did not is not asked again for some time, whatever else was printed on it.
_NODE_TIMEOUT_S = 20.0
_ASK_AGAIN_S = 60.0
#: Bytes that are read at once.
_CHUNK_BYTES = 1 << 20
_STREAMS = ("stdout", "stderr")
#: Lines by which Ray's processes say who they are.
_OF_RAY = re.compile(r":(?:actor_name|task_name|job_id):.*")


@dataclass(frozen=True)
class Part:
    """The part of a file that a rank printed in one attempt.

    Attributes:
        node: The node's name, as in events.
        node_id: Ray's id of it.
        begin: Where the attempt begins in the file.
        end: Where it ends; None: at the end of the file.
    """

    attempt: int
    rank: int
    stream: str
    node: str
    node_id: str
    path: str
    begin: int
    end: int | None = None


class GoneError(Exception):
    """A file, or its node, is gone."""


def find_parts(events: Sequence[Event]) -> list[Part]:
    """Return the parts of a run's output, in the order of attempts and ranks, from its events."""
    nodes: dict[int, Mapping[str, Any]] = {}
    found: dict[tuple[int, int, str], Part] = {}
    for event in events:
        data = event.data
        if event.kind == "worker_up":
            nodes[data["rank"]] = data
        elif event.kind in ("entered", "left") and "output" in data:
            for stream, (path, size) in zip(_STREAMS, data["output"], strict=True):
                key = (data["attempt"], data["rank"], stream)
                if event.kind == "left":
                    if key in found:
                        found[key] = replace(found[key], end=size)
                    continue
                node = nodes.get(data["rank"], {})
                found[key] = Part(*key, node.get("node", "?"), node.get("node_id", ""), path, size)
    return [found[key] for key in sorted(found)]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_part(path: str, begin: int, end: int | None) -> bytes | None:
    """Return a part of a file on this machine, at most a chunk of it; None if the file is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            limit = _CHUNK_BYTES if end is None else min(_CHUNK_BYTES, max(0, end - begin))
            return file.read(limit)
    except OSError:
        return None


class Reader:
    """Reads files here and on other nodes.

    Args:
        address: The cluster, which is connected to when a file of another node is first read.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._read_there: Any = None
        self._silent_until: dict[str, float] = {}  # by node, in the time of time.monotonic

    def read(self, part: Part, begin: int) -> bytes:
        """Return what is in a part from ``begin`` on; empty if there is no more.

        Raises:
            GoneError: The file or its node is gone.
        """
        is_here = part.node.partition(" ")[0] == socket.gethostname()
        data = read_part(part.path, begin, part.end) if is_here else self._read_on_node(part, begin)
        if data is None:
            raise GoneError(f"{part.path} on {part.node} is gone: Ray removed it, or its node was started again")
        return data

    def _read_on_node(self, part: Part, begin: int) -> bytes | None:
        if self._read_there is None and cluster.connect(self._address) is None:
            raise GoneError(f"what workers printed is on {part.node}, and there is no cluster to ask for it")
        import ray
        from ray.exceptions import GetTimeoutError, RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._read_there is None:
            self._read_there = ray.remote(num_cpus=0, max_retries=0)(read_part)
        if part.node_id not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            raise GoneError(
                f"{part.node} is lost: it is not in the cluster any more, and what its workers printed is on its disk alone"
            )
        silent = f"{part.node} does not answer, though Ray still lists it; what its workers printed is not shown"
        if time.monotonic() < self._silent_until.get(part.node_id, 0.0):
            raise GoneError(silent)
        task = self._read_there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(part.node_id, soft=False))
        try:
            data: bytes | None = ray.get(task.remote(part.path, begin, part.end), timeout=_NODE_TIMEOUT_S)
        except GetTimeoutError:
            self._silent_until[part.node_id] = time.monotonic() + _ASK_AGAIN_S
            raise GoneError(silent) from None
        except RayError as error:
            raise GoneError(f"{part.path} cannot be read on {part.node}: {type(error).__name__}") from None
        return data


class Lines:
    """Cuts the output of parts into lines, and remembers how far each was read.

    Args:
        reader: Reads the files.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._place: dict[tuple[int, int, str], int] = {}
        self._unfinished: dict[tuple[int, int, str], bytes] = {}
        self.gone: dict[str, None] = {}

    def take(self, part: Part, *, is_last: bool) -> Iterator[str]:
        """Yield the new lines of a part; ``is_last``: also an unfinished one."""
        key = (part.attempt, part.rank, part.stream)
        while True:
            place = self._place.get(key, part.begin)
            try:
                data = self._reader.read(part, place)
            except GoneError as error:
                self.gone[str(error)] = None
                return
            self._place[key] = place + len(data)
            *lines, unfinished = (self._unfinished.get(key, b"") + data).split(b"\n")
            self._unfinished[key] = unfinished
            yield from (text for line in lines if (text := clean(line)) is not None)
            if not data:
                break
        if is_last and (text := clean(self._unfinished.pop(key, b""))):
            yield text


def clean(line: bytes) -> str | None:
    """Return the text of a line; None for one that Ray or `raysgd run` wrote for itself."""
    text = line.decode(errors="replace").rstrip("\r")
    before, mark, _ = text.partition(f"{MARK}:")
    return None if _OF_RAY.fullmatch(text) or (mark and not before) else before if mark else text


# -- the command -------------------------------------------------------------------------------------------------------


@click.command("logs")
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Show new lines until the run ends.")
@click.option("--rank", type=whole_number(0), metavar="N", help="Only what this rank printed.")
@click.option("--stream", type=click.Choice(_STREAMS), help="Only one of the streams.")
@click.option("--attempt", type=whole_number(1), metavar="N", help="Only one attempt.")
@storage_flag
@address_flag
@json_flag
def command(
    run: str,
    follow: bool,
    rank: int | None,
    stream: str | None,
    attempt: int | None,
    storage_path: str,
    address: str | None,
    as_json: bool,
) -> int:
    """Show what the workers of RUN printed, by attempt and rank.

    The output is in files of Ray on the workers' nodes, which Ray keeps as long as the cluster runs, and often longer. Exit
    status 1 if some of it is gone.
    """
    events = StateReader(find_run(run, storage_path, address))
    asked = {"rank": rank, "stream": stream, "attempt": attempt}

    def find(events: Sequence[Event]) -> list[Part]:
        return [
            one
            for one in find_parts(events)
            if all(value in (None, getattr(one, name)) for name, value in asked.items())
        ]

    events.update()
    parts = find(events.events)
    if not parts and (not follow or outcome_of(events.events)):
        raise ConfigError(_explain_nothing(run, events.events, asked))
    show = _show_json if as_json else _Shower(is_single=rank is not None)
    lines = Lines(Reader(address))
    if follow:
        _follow(events, lines, show, find)
    else:
        for part in parts:
            for line in lines.take(part, is_last=True):
                show(part, line)
    for problem in lines.gone:
        print_error(f"raysgd logs: {problem}.")
    return FAILED if lines.gone else SUCCEEDED


def _follow(
    events: StateReader,
    lines: Lines,
    show: Callable[[Part, str], None],
    find: Callable[[Sequence[Event]], list[Part]],
) -> None:
    """Show lines as they come, until the run has ended."""
    while True:
        events.update()
        is_over = outcome_of(events.events) is not None
        for part in find(events.events):
            for line in lines.take(part, is_last=is_over or part.end is not None):
                show(part, line)
        if is_over:
            return
        time.sleep(_INTERVAL_S)


def _explain_nothing(run: str, events: Sequence[Event], asked: Mapping[str, Any]) -> str:
    if outcome_of(events) is None and not any(event.kind == "entered" for event in events):
        return f"no worker of {run} has entered train_func yet; `raysgd logs -f` waits for that."
    if not any("output" in event.data for event in events):
        return (
            f"the files of {run} do not say where its output is: no worker has entered train_func, or the workers ran on a "
            "system other than Linux, or with an earlier version of raysgd."
        )
    parts = find_parts(events)
    ranks, attempts = (sorted({getattr(part, name) for part in parts}) for name in ("rank", "attempt"))
    flags = " ".join(f"--{name} {value}" for name, value in asked.items() if value is not None)
    return f"{run} has no output of {flags}; it has ranks {ranks} and attempts {attempts}."


class _Shower:
    """Prints lines with the rank before each; ranks differ in colour on a terminal."""

    _COLOURS = ("cyan", "magenta", "green", "yellow", "blue")

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single
        self._has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def __call__(self, part: Part, line: str) -> None:
        head = f"(rank {part.rank}{', stderr' * (part.stream == 'stderr')}) "
        if self._has_colours:
            head = click.style(head, fg=self._COLOURS[part.rank % len(self._COLOURS)])
        print(line if self._is_single else head + line, flush=True)


def _show_json(part: Part, line: str) -> None:
    fields = {"attempt": part.attempt, "rank": part.rank, "stream": part.stream, "line": line}
    print_json(fields, is_line=True)

"""``raysgd logs``: what the workers of a run printed. Driver side."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from raysgd.cli.runs.completing import run_argument
from raysgd.cli.runs.finding import find_run
from raysgd.errors import ConfigError
from raysgd.result import Event
from raysgd.runs.output import STREAMS, GoneError, Lines, Part, find_parts, gone, is_here, read_here, read_part
from raysgd.runs.reading import outcome_of
from raysgd.runs.state import StateReader

#: Seconds between two looks at the files of a live run.
_INTERVAL_S = 0.3
#: Seconds for a node to answer; one that did not is not asked again for some time, whatever else was printed on it.
_NODE_TIMEOUT_S = 20.0
_ASK_AGAIN_S = 60.0


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
        if is_here(part):
            return read_here(part, begin)
        if (data := self._read_on_node(part, begin)) is None:
            raise gone(part)
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


@click.command("logs")
@run_argument()
@click.option("-f", "--follow", is_flag=True, help="Show new lines until the run ends.")
@click.option("--rank", type=whole_number(0), metavar="N", help="Only what this rank printed.")
@click.option("--stream", type=click.Choice(STREAMS), help="Only one of the streams.")
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
    lines = Lines(Reader(address).read)
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

"""``raysgd ls``, ``status`` and ``compare``: what there is, and what its files say. Driver side; no Ray is started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from raysgd._util.metric_names import in_order
from raysgd.cli import cluster
from raysgd.cli.console import (
    FAILED,
    SUCCEEDED,
    address_flag,
    json_flag,
    number,
    print_error,
    print_json,
    print_table,
    storage_flag,
)
from raysgd.cli.runs.completing import run_argument
from raysgd.cli.runs.finding import existing_folder, find_run, with_live
from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError, RaySGDError
from raysgd.result import ENDED, Event
from raysgd.runs.finding import find_runs
from raysgd.runs.state import RunState, read_state

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.runs.comparing import Difference

_NUM_EVENTS = 5
#: Events that say how a run goes; others are many, or are shown in another way.
_SHOWN_EVENTS = (
    "failure",
    "continued",
    "hang",
    "mismatch",
    "preemption",
    "resize",
    "paused",
    "resumed",
    "controller_restart",
    "warning",
)


def age(then_s: float) -> str:
    """Return how long ago a time is, in seconds since the epoch."""
    from raysgd._util.text import in_time

    if not then_s:
        return "-"
    passed_s = time.time() - then_s
    return f"{passed_s / 86400:.0f} days" if passed_s > 2 * 86400 else in_time(passed_s)


# -- ls ----------------------------------------------------------------------------------------------------------------


@click.command("ls")
@click.argument("folder", required=False)
@click.option("--metric", metavar="NAME", help="The metric to show (default: the one that `raysgd ui` shows first).")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Only runs with this tag; may be repeated.")
@click.option("--live", "only_live", is_flag=True, help="Only runs that are live in the cluster.")
@storage_flag
@address_flag
@json_flag
def list_command(
    folder: str | None,
    metric: str | None,
    tags: tuple[str, ...],
    only_live: bool,
    storage_path: str,
    address: str | None,
    as_json: bool,
) -> int:
    """List the runs in FOLDER, or in the storage path, newest first, and those that are live in a running cluster.

    FOLDER is a storage path or the folder of a Trainer, path or URI. Ray is not started: a running cluster is asked.
    """
    place = existing_folder(folder or storage_path)
    if folder is not None and not place.exists():
        raise ConfigError(f"there is no folder {folder}; give one that holds runs, or none for {storage_path}.")
    states, problems = _read_states(place)
    if cluster.connect(address) is not None:
        states = with_live(states, cluster.live_trainers())
    states = [state for state in states if state.is_live or not only_live]
    states = [state for state in states if set(tags) <= set(state.annotations.tags)]
    for problem in problems:
        print_error(problem)
    if metric is not None and states and not any(metric in state.own_metrics for state in states):
        known = sorted({name for state in states for name in state.own_metrics})
        print_error(f"no run has a metric {metric}{nearest(metric, known)}.")
    if as_json:
        print_json([state.to_json() for state in states])
    elif states:
        columns = ["run", "state", "iteration", "metric", "workers", "age"]
        rows = [_row(state, metric) for state in states]
        for name, shown in (
            ("title", [s.annotations.title for s in states]),
            ("tags", [", ".join(s.annotations.tags) for s in states]),
        ):
            if any(shown):
                columns.append(name)
                rows = [(*row, text or None) for row, text in zip(rows, shown, strict=True)]
        print_table(columns, rows, right=("iteration", "workers", "age"))
    else:
        tagged = f" with the tag {' and '.join(tags)}" if tags else ""
        print_error(f"there are no {'live ' * only_live}runs in {place.path_of('')}{tagged}.")
    return SUCCEEDED


def _read_states(folder: Storage) -> tuple[list[RunState], list[str]]:
    """Read the states of all runs in a folder, newest first; return them, and a line for each that cannot be read."""
    states: list[RunState] = []
    problems: list[str] = []
    for run in find_runs(folder, problems):
        try:
            states.append(read_state(run))
        except RaySGDError as error:  # such as damaged files
            problems.append(f"{run.path_of('')} cannot be read: {error}")
    return sorted(states, key=lambda state: state.started_s, reverse=True), problems


def _row(state: RunState, metric: str | None) -> tuple[Any, ...]:
    from raysgd.callbacks.values import is_number, short

    numbers = (name for name, value in state.own_metrics.items() if is_number(value))
    name = metric or next(iter(in_order(numbers)), "")
    shown = f"{name}={short(state.own_metrics[name])}" if name in state.own_metrics else None
    return state.name, state.state, state.iteration, shown, state.world_size or None, age(state.started_s)


# -- status ------------------------------------------------------------------------------------------------------------


@click.command("status")
@run_argument()
@storage_flag
@address_flag
@json_flag
def status_command(run: str, storage_path: str, address: str | None, as_json: bool) -> int:
    """Show the state of RUN: a folder, a name in the storage path, or the name of a detached Trainer."""
    folder = find_run(run, storage_path, address)
    state = read_state(folder)
    if state.state not in ENDED and cluster.connect(address) is not None:
        state = next(each for each in with_live([state], cluster.live_trainers()) if each.run_dir == state.run_dir)
    checkpoints = _checkpoints(folder)
    if as_json:
        shown = {key: state.description.get(key) for key in ("backend", "config", "command_line", "versions")}
        events = [{"kind": each.kind, "timestamp": each.timestamp, "data": each.data} for each in _shown_events(state)]
        print_json({**state.to_json(), **shown, "message": state.message, "checkpoints": checkpoints, "events": events})
        return SUCCEEDED
    print_table(("", ""), _facts(state, checkpoints))
    if last := _shown_events(state)[-_NUM_EVENTS:]:
        print()
        print_table(("age", "event", ""), [(age(each.timestamp), each.kind, _say(each)) for each in last])
    return SUCCEEDED


def _facts(state: RunState, checkpoints: list[str]) -> list[tuple[str, Any]]:
    from raysgd.callbacks.values import duration, metrics_text
    from raysgd.goodput.ledger import Ledger

    is_over = state.state in ENDED
    goodput = Ledger.of(state.events).goodput() if is_over else None  # of a live run the samples are missing here
    length_s = (state.ended_s if is_over else time.time()) - state.started_s
    facts: list[tuple[str, Any]] = [
        ("run", state.name),
        ("folder", state.run_dir),
        ("state", f"{state.state}: {state.message.splitlines()[0]}" if state.message else state.state),
        ("started", f"{age(state.started_s)} ago"),
        ("took" if is_over else "age", duration(length_s)),
        ("iteration", state.iteration),
        ("metrics", metrics_text(state.own_metrics) or None),
        ("workers", f"{state.world_size} x {state.description.get('backend', '?')}"),
        ("goodput", None if goodput is None else f"{goodput:.0%}: raysgd why {state.name}"),
        ("failures", state.num_failures),
        ("checkpoints", f"{len(checkpoints)}, newest {checkpoints[-1]}" if checkpoints else 0),
    ]
    if state.alias is not None:
        facts.append(("attach", f"raysgd attach {state.alias}"))
    if state.state in ("live", "silent"):
        facts.append(("", "it has no end and is not live in a cluster that was asked: live in another one, or lost"))
    return facts


def _checkpoints(folder: Any) -> list[str]:
    from raysgd.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder.child("checkpoints"))
    return [store.directory(manifest.number).path_of("") for manifest in store.list()]


def _shown_events(state: RunState) -> list[Event]:
    return [event for event in state.events if event.kind in _SHOWN_EVENTS]


def _say(event: Event) -> str:
    from raysgd.callbacks.values import clip, in_one_line
    from raysgd.viewer.timeline import describe

    return clip(in_one_line(describe(event.kind, event.data)), 120)


# -- compare -----------------------------------------------------------------------------------------------------------


@click.command("compare")
@run_argument("a")
@run_argument("b")
@click.option("--rel-tol", type=number(0), default=0.0, help="Relative difference that counts as equal.")
@click.option("--ignore", multiple=True, metavar="METRIC", help="Leave a metric out; may be repeated.")
@storage_flag
@json_flag
def compare_command(a: str, b: str, rel_tol: float, ignore: tuple[str, ...], storage_path: str, as_json: bool) -> int:
    """Compare the metrics of the runs A and B, rank by rank, and find where they first differ.

    Exit status 1 if they differ. Times are left out.
    """
    first, second = (find_run(each, storage_path).uri for each in (a, b))
    from raysgd.runs.comparing import compare_runs

    found = compare_runs(first, second, rel_tol=rel_tol, ignore=ignore)
    if as_json:
        print_json({**vars(found), "is_different": bool(found)})
    else:
        _show_difference(found, a, b)
    return FAILED if found else SUCCEEDED


def _show_difference(found: Difference, a: str, b: str) -> None:
    print(str(found).partition(": ")[0] if found.iteration is not None else str(found).partition("; ")[0])
    rows = [
        (what, name, *map(repr, values))
        for what, entries in (("metric", found.metrics), ("config", found.config), ("version", found.versions))
        for key, both in entries.items()
        for name, values in _leaves(key, *both)
    ]
    if rows:
        print_table(("", "name", a, b), rows)


def _leaves(name: str, a: Any, b: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what differs in two values: in mappings, entry by entry, with dots in the names."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        yield name, (a, b)
        return
    for key in {**a, **b}:
        if a.get(key) != b.get(key) or (key in a) != (key in b):
            yield from _leaves(f"{name}.{key}", a.get(key), b.get(key))

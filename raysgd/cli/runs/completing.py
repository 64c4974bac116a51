"""Arguments that name runs and Trainers, which the shell completes by the files in the storage path. Without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from raysgd.config.run import DEFAULT_STORAGE_PATH
from raysgd.errors import RaySGDError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from raysgd.checkpoint.storage.storage import Storage


def run_argument(name: str = "run", **settings: Any) -> Callable[[Any], Any]:
    """Return the decorator of a command that takes a run: its folder, or a name in the storage path."""
    return click.argument(name, shell_complete=_complete_runs, **settings)


def trainer_argument(name: str = "name") -> Callable[[Any], Any]:
    """Return the decorator of a command that takes a detached Trainer by its name."""
    return click.argument(name, shell_complete=_complete_trainers)


def _complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from raysgd.runs.finding import run_name

    if incomplete.startswith(("/", ".", "~")):
        return [CompletionItem(incomplete, type="dir")]
    names = [run_name(run) for run in _local_runs(ctx)]
    trainers = dict.fromkeys(name.rpartition("/")[0] for name in names)
    return _starting_with(incomplete, [*trainers, *names])


def _complete_trainers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the detached Trainers whose newest run is live by its files: asking the cluster takes seconds."""
    newest = {run.parent().uri: run for run in _local_runs(ctx)}
    return _starting_with(incomplete, [name for run in newest.values() if (name := _detached_name(run))])


def _detached_name(run: Storage) -> str:
    from raysgd.controller.journal.journal import is_live, read_description

    try:
        config = read_description(run).get("run_config") or {}
        return str(config["name"]) if config.get("detached") and is_live(run) else ""
    except RaySGDError:  # damaged files
        return ""


def _local_runs(ctx: click.Context) -> Iterator[Storage]:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.runs.finding import find_runs

    path = ctx.params.get("storage_path") or DEFAULT_STORAGE_PATH
    folder = Storage.from_uri(path) if "://" not in path else None
    return iter(()) if folder is None else find_runs(folder)


def _starting_with(incomplete: str, names: list[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names if name.startswith(incomplete) and " " not in name]

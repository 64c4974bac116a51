"""``raysgd annotate`` and ``rm``: give a run a title, tags and notes, and delete runs. Driver side; no Ray is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from raysgd.cli import cluster
from raysgd.cli.console import SUCCEEDED, address_flag, json_flag, print_json, print_table, storage_flag
from raysgd.cli.runs.completing import run_argument
from raysgd.cli.runs.finding import find_run, with_live
from raysgd.errors import ConfigError, UsageError
from raysgd.runs.annotations import annotate, read_annotations
from raysgd.runs.deleting import check_can_be_deleted, delete_run
from raysgd.runs.finding import run_name
from raysgd.runs.state import RunState

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.storage import Storage


@click.command("annotate")
@run_argument()
@click.option("--title", metavar="TEXT", help="The name that lists show; the folder keeps its own. Empty: none.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Add a tag; may be repeated.")
@click.option("--untag", multiple=True, metavar="TAG", help="Remove a tag; may be repeated.")
@click.option("--notes", metavar="TEXT", help="Text about the run, in place of that which it has.")
@storage_flag
@json_flag
def annotate_command(
    run: str,
    title: str | None,
    tags: tuple[str, ...],
    untag: tuple[str, ...],
    notes: str | None,
    storage_path: str,
    as_json: bool,
) -> int:
    """Change the title, tags and notes of RUN, and show them; without flags, show them."""
    folder = find_run(run, storage_path)
    found = read_annotations(folder)
    if title is not None or notes is not None or tags or untag:
        found = annotate(folder, title=title, tags=[t for t in (*found.tags, *tags) if t not in untag], notes=notes)
    if as_json:
        print_json({"run_dir": folder.path_of(""), **vars(found)})
    else:
        shown = [
            ("title", found.title or None),
            ("tags", ", ".join(found.tags) or None),
            ("notes", found.notes or None),
        ]
        print_table(("", ""), [("run", run_name(folder)), *shown])
    return SUCCEEDED


@click.command("rm")
@run_argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--force", is_flag=True, help="Also delete a run that its files call live or paused, if no cluster has it."
)
@storage_flag
@address_flag
@json_flag
def rm_command(runs: tuple[str, ...], force: bool, storage_path: str, address: str | None, as_json: bool) -> int:
    """Delete runs with their checkpoints. A live run is not deleted; nothing is, if one of several cannot be."""
    folders = {folder.uri: folder for folder in (_find_named(run, storage_path, address) for run in runs)}.values()
    if cluster.connect(address) is not None:
        states = [RunState(run_name(folder), folder.path_of(""), "") for folder in folders]
        for state in with_live(states, cluster.live_trainers())[-len(states) :]:
            if state.is_live:
                stop = "end its program" if state.alias is None else f"`raysgd stop {state.alias} --shutdown` ends it"
                raise UsageError(f"{state.name} is {state.state} in the cluster, and cannot be deleted; {stop}.")
    for folder in folders:
        if not force:
            check_can_be_deleted(folder)
    for folder in folders:
        delete_run(folder, is_lost=force)
        if not as_json:
            print(f"deleted {folder.path_of('')}")
    if as_json:
        print_json({"deleted": [folder.path_of("") for folder in folders]})
    return SUCCEEDED


def _find_named(given: str, storage_path: str, address: str | None) -> Storage:
    """Return the run of this name; the name of a Trainer does not mean its newest run here."""
    found = find_run(given, storage_path, address)
    if found.name != given.partition("?")[0].rstrip("/").rpartition("/")[2]:
        raise ConfigError(f"{given} is a Trainer; give the run to delete, such as {found.path_of('')}.")
    return found

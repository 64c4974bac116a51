"""``raysgd why``: what a run's time was used for, and what made it slow. Driver side; no Ray is started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from textwrap import fill
from typing import Any

import click

from raysgd.cli.console import SUCCEEDED, address_flag, json_flag, print_json, storage_flag
from raysgd.cli.runs.finding import find_run
from raysgd.goodput.ledger import PAUSED, WORDS, now_event


@click.command("why")
@click.argument("run")
@storage_flag
@address_flag
@json_flag
def command(run: str, storage_path: str, address: str | None, as_json: bool) -> int:
    """Say what the time of RUN was used for, and what made it slow: a folder, a name in the storage path, or a detached Trainer.

    The run may be live.
    """
    from raysgd.goodput.evidence import Evidence
    from raysgd.goodput.summary import summarize
    from raysgd.runs.reading import outcome_of, read_events
    from raysgd.runs.state import is_paused, state_by_files

    events = read_events(find_run(run, storage_path, address))
    last_s = max((event.timestamp for event in events), default=0.0)
    if state_by_files(outcome_of(events), is_paused=is_paused(events), last_s=last_s) in ("live", "paused"):
        events.append(now_event())
    summary = summarize(Evidence.of(events))
    if as_json:
        print_json(summary)
        return SUCCEEDED
    causes = summary["causes"]
    print("no worker has trained so far" if summary["goodput"] is None else _describe(summary))
    width = max((len(each["cause"]) for each in causes), default=0)
    for number, each in enumerate(causes, 1):
        gain = "" if each["gain"] is None else f" Expected: {each['gain']:.2f}x."
        indent = " " * (width + 11)
        print(folded(f"{number}  {each['cause']:<{width}}  {each['share']:>4.0%}  {each['text']}", indent))
        print(folded(f"{indent}{each['remedy'][:1].upper()}{each['remedy'][1:]}{gain}", indent))
    if summary["goodput"] is not None and not causes:
        print("no cause of slowness was found.")
    for line in summary["unseen"]:
        print(f"{line}.")
    return SUCCEEDED


def folded(line: str, indent: str) -> str:
    """Return a line in parts as long as the terminal is wide, if there is one that is wide enough for that."""
    width = shutil.get_terminal_size().columns
    return fill(line, width, subsequent_indent=indent) if sys.stdout.isatty() and width > 2 * len(indent) else line


def _describe(summary: Mapping[str, Any]) -> str:
    from raysgd.callbacks.values import duration

    workers = len(summary["ranks"])
    parts = sorted(((share, use) for use, share in summary["shares"].items()), reverse=True)
    uses = ", ".join(f"{WORDS[use]} {share:.0%}" for share, use in parts if share >= 0.005)
    paused_s = summary["seconds"].get(PAUSED, 0.0) / max(1, workers)
    pause = f" (and {duration(paused_s)} paused)" if paused_s else ""
    length = duration(summary["length_s"] - paused_s)
    plural = "s" * (workers > 1)
    return f"goodput {summary['goodput']:.0%} of {length} x {workers} worker{plural}{pause}: {uses}"

"""``raysgd why``: what a run's time was used for, and what made it slow. Driver side; no Ray is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from raysgd.cli.console import SUCCEEDED, address_flag, json_flag, print_json, storage_flag
from raysgd.cli.runs.finding import find_run
from raysgd.goodput.ledger import PAUSED, WORDS, goodput_of

if TYPE_CHECKING:
    from raysgd.goodput.evidence import Evidence


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
    from raysgd.goodput.findings import find_causes, list_unseen
    from raysgd.goodput.rules import RULES
    from raysgd.runs.reading import read_events

    evidence = Evidence.of(read_events(find_run(run, storage_path, address)))
    goodput, findings, unseen = goodput_of(evidence.totals), find_causes(evidence, RULES), list_unseen(evidence)
    if as_json:
        found = [vars(finding) for finding in findings]
        ranks = {str(rank): uses for rank, uses in evidence.ledger.by_rank().items()}
        print_json({"goodput": goodput, "seconds": evidence.totals, "ranks": ranks, "causes": found, "unseen": unseen})
        return SUCCEEDED
    print("no worker has trained so far" if goodput is None else _summary(evidence, goodput))
    width = max((len(finding.cause) for finding in findings), default=0)
    for number, finding in enumerate(findings, 1):
        gain = "" if finding.gain is None else f" Expected: {finding.gain:.2f}x."
        print(f"{number}  {finding.cause:<{width}}  {finding.share:>4.0%}  {finding.text}")
        print(f"{'':{width + 10}} {finding.remedy[:1].upper()}{finding.remedy[1:]}{gain}")
    if goodput is not None and not findings:
        print("no cause of slowness was found.")
    for line in unseen:
        print(f"{line}.")
    return SUCCEEDED


def _summary(evidence: Evidence, goodput: float) -> str:
    from raysgd.callbacks.values import duration

    workers = len(evidence.ledger.by_rank())
    length_s = evidence.ledger.length_s
    held_s = evidence.held_s
    parts = sorted(((seconds / held_s, use) for use, seconds in evidence.totals.items() if use != PAUSED), reverse=True)
    uses = ", ".join(f"{WORDS[use]} {share:.0%}" for share, use in parts if share >= 0.005)
    paused_s = evidence.totals.get(PAUSED, 0.0) / max(1, workers)
    pause = f" (and {duration(paused_s)} paused)" if paused_s else ""
    return f"goodput {goodput:.0%} of {duration(length_s - paused_s)} x {workers} workers{pause}: {uses}"

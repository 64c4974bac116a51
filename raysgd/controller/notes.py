"""What the run's machine tells about its steps, in the commands for it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.failure_policy import Failure
from raysgd.controller.shelf import Start
from raysgd.controller.states import CALLBACK_NODE, Outcome, Running
from raysgd.session import events as e


def attempt_begins(attempt: int, world_size: int, start: Start, first_number: int) -> list[c.Command]:
    """Told to the readers and the journal, and to the ranks, who enter."""
    data = {"attempt": attempt, "world_size": world_size, **start.counters()}
    return [
        c.Say(frames.ATTEMPT, attempt, data=data),
        c.Note("attempt_start", {**data, **start.place()}),
        c.Enter(attempt, start.uri, first_number, start.iteration, start.time_total_s, start.held),
    ]


def failure_of(given: c.GroupFailed) -> Failure:
    """A group that did not come up, as a failure of the run."""
    return Failure(given.ranks, given.message, is_announced=given.is_announced)


def reports(running: Running, rank: int, event: e.Reports) -> c.Say:
    """A rank's reports, as it encoded them."""
    return c.Say(frames.REPORTS, running.attempt, rank, {"first": event.first, "count": event.count}, event.rows)


def said(rank: int, event: e.Sample | e.Warned) -> c.Note:
    """What a worker tells besides."""
    if isinstance(event, e.Sample):
        return c.Note("sample", event.values)
    return c.Note("warning", {"rank": rank, "message": event.message})


def entered(running: Running, rank: int, event: e.Entered) -> c.Note:
    """A rank has entered train_func."""
    return c.Note("entered", {"rank": rank, "attempt": running.attempt, "timestamp": event.timestamp})


def hang(given: c.WorkerHung) -> c.Note:
    """With the stacks of all ranks, and their last collectives, as far as these are known."""
    stacks = {str(rank): stack for rank, stack in given.stacks.items()}
    data = {"rank": given.rank, "kind": given.kind, "why": given.why, "stacks": stacks}
    collectives = {str(rank): [each.shown() for each in last] for rank, last in given.collectives.items() if last}
    return c.Note("hang", {**data, "collectives": collectives} if collectives else data)


def group_broke(rank: int, timestamp: float) -> e.Failed:
    """A rank has left its group, which it takes for broken."""
    summary = f"an operation of the group failed on rank {rank}, and no worker had died"
    return e.Failed(None, "", summary, "", timestamp, in_collective=True)


def killed_for_staying(ranks: Collection[int]) -> c.Note:
    """A warning."""
    return c.Note("warning", {"message": f"killed ranks {list(ranks)}: they did not leave their attempt in time"})


def outcome_of_stop(given: c.StopAsked) -> Outcome:
    """What becomes of a run that was asked to end."""
    if given.failed is not None:
        return Outcome("error", failed=given.failed, node=CALLBACK_NODE)
    return Outcome("cancelled" if given.cancel else "stopped", message=given.why)

"""The promises that a run's journal and checkpoints must keep.

Each rule is a pure function: it takes a `History` and yields violations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from raysgd._util.json import decode
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.rounds import RoundMerger
from raysgd.controller.run_plan import SEQ_GAP
from raysgd.result import Result
from raysgd.testing.record import History, Span, committed, events, spans

_SUCCESSES = ("done", "stopped")
_GIVE_UP = "give up"
_RETRY = re.compile(r"retry (\d+)")
_PROCESS_FAILURE = "the worker process"  # the prefix of the error text of a death or a hang
_SKIPPED = re.compile(r"checkpoint (\d+) skipped: ")


def journal_is_complete(history: History) -> Iterator[str]:
    """Each frame exists once; the last frames of a lost run may be missing."""
    for before, frame in pairwise(history.frames):
        if frame.seq == before.seq:
            yield f"frame {frame.seq} is in the journal twice"
        elif frame.seq - before.seq >= SEQ_GAP:
            continue  # written by a restarted TrainerActor
        elif frame.seq > before.seq + 1 and history.is_closed:
            yield f"frames {before.seq + 1} to {frame.seq - 1} are missing in the journal"
    # A TrainerActor may die before it has written anything.
    if history.frames and history.frames[0].seq not in (0, SEQ_GAP - 1):
        yield f"the journal begins with frame {history.frames[0].seq}"


def run_ends_once(history: History) -> Iterator[str]:
    """The run has one outcome and is closed once, at the end; it succeeds only if all ranks have returned."""
    kinds = [frame.kind for frame in history.frames]
    if kinds.count(frames.RUN_CLOSED) != 1:
        num_closed = kinds.count(frames.RUN_CLOSED)
        yield "the run has no end" if not num_closed else f"the run was closed {num_closed} times"
        return
    late = history.frames[kinds.index(frames.RUN_CLOSED) + 1 :]
    # The driver's callbacks end after the run is closed, and may warn then.
    if any(frame.kind != frames.EVENT or frame.data["kind"] != "warning" for frame in late):
        yield f"the run continued after it was closed, with {late[-1].kind}"
    ends = [frame.data["kind"] for frame in history.frames if frame.kind == frames.RUN_END]
    # A callback that runs in the controller may fail at the end of a successful run.
    if len(ends) != 1 and not (len(ends) == 2 and ends[0] in _SUCCESSES and ends[1] == "error"):
        yield f"the run has {len(ends)} outcomes: {', '.join(ends) or 'none'}"
    last = spans(history.frames)[-1]
    returned = {frame.rank for frame in last.frames if frame.kind == frames.RANK_DONE}
    missing = sorted(set(range(last.world_size)) - returned)
    if ends[:1] == ["done"] and (missing or last.start is None):
        yield f"the run is done, and ranks {missing} have not returned"


def attempts_follow_each_other(history: History) -> Iterator[str]:
    """Attempts are numbered from 1 without gaps, and begin after the previous one has ended.

    An attempt that no rank entered passes its number on to the next one.
    """
    found = spans(history.frames)
    for before, span in pairwise(found):
        if span.attempt != before.next_attempt:
            yield f"attempt {span.attempt} began where attempt {before.next_attempt} should have"
        if before.start is not None and not before.is_ended:
            yield f"attempt {span.attempt} began before attempt {before.attempt} had ended"
    for span in found[1:]:
        if span.num_ends > 1:
            yield f"attempt {span.attempt} ended {span.num_ends} times"
    if history.is_closed and found[-1].start is not None and not found[-1].is_ended:
        yield f"attempt {found[-1].attempt} never ended"


def only_one_group_lives(history: History) -> Iterator[str]:
    """Nothing of an older attempt counts; each rank is one process; dead or preempted processes do not come back."""
    found = spans(history.frames)
    yield from _processes(found)
    for span in found:
        for frame in span.frames:
            may_be_late = frame.kind == frames.CHECKPOINT and frame.data.get("from_memory")
            is_counted = frame.kind in (frames.REPORTS, frames.RANK_DONE, frames.CHECKPOINT)
            if is_counted and frame.attempt != span.attempt and not may_be_late:
                yield f"frame {frame.seq}, {frame.kind} of attempt {frame.attempt}, came during attempt {span.attempt}"
        entered = Counter((data["attempt"], data["rank"]) for data in events(span.frames, "entered"))
        for (attempt, rank), count in entered.items():
            if attempt != span.attempt:
                yield f"rank {rank} entered attempt {attempt} during attempt {span.attempt}"
            elif count > 1:
                yield f"rank {rank} entered attempt {attempt} {count} times"


def _processes(found: list[Span]) -> Iterator[str]:
    """Check the processes of each attempt, which are reported before it begins."""
    last: dict[int, tuple[str, int]] = {}
    for before, span in pairwise(found):
        up = {data["rank"]: (data["node"], data["pid"]) for data in events(before.frames, "worker_up")}
        if missing := sorted(set(range(span.world_size)) - set(up)):
            yield f"attempt {span.attempt} began without the workers of ranks {missing}"
        for (node, pid), count in Counter(up.values()).items():
            if count > 1:
                yield f"in attempt {span.attempt} process {pid} on {node} is {count} ranks"
        for rank, how in sorted(_lost_ranks(before).items()):
            process = last.get(rank)
            if process is not None and process in up.values():
                yield f"process {process[1]}, which {how} as rank {rank}, is in attempt {span.attempt}"
        last = up


def _lost_ranks(span: Span) -> dict[int, str]:
    """Return the ranks whose processes must not be in the next attempt, and what happened to them."""
    lost = {data["rank"]: "was preempted" for data in events(span.inside, "preemption")}
    for data in events(span.inside, "failure"):
        if data["error"].startswith(_PROCESS_FAILURE):
            lost |= dict.fromkeys(data["ranks"], "had died")
    return lost


def reports_are_complete(history: History) -> Iterator[str]:
    """Each report of each rank exists once, in order."""
    for span in spans(history.frames):
        counts: Counter[int] = Counter()
        for frame in span.frames:
            if frame.kind != frames.REPORTS or frame.attempt != span.attempt:
                continue
            first, count = frame.data["first"], frame.data["count"]
            where = f"rank {frame.rank} of attempt {span.attempt}"
            if not 0 <= frame.rank < span.world_size:
                yield f"{where}, which has {span.world_size} ranks, reported"
            if first != counts[frame.rank]:
                yield f"{where} made {counts[frame.rank]} reports, and then number {first + 1}"
            if len(decode(frame.rows)) != count:
                yield f"{where}: frame {frame.seq} has {len(decode(frame.rows))} of {count} reports"
            counts[frame.rank] = first + count


def rounds_are_complete(history: History) -> Iterator[str]:
    """Iterations have no gaps, repeated ones have a higher attempt, and none up to a committed checkpoint is lost."""
    found = spans(history.frames)
    if len(found) == 1 or found[1].start is None:
        return
    last = start = int(found[1].start.data["iterations_before"])
    made_by: dict[int, int] = {}
    for result in _rounds(history):
        iteration, attempt = result["training_iteration"], result["attempt"]
        if iteration > last + 1:
            yield f"iterations {last + 1} to {iteration - 1} are missing before attempt {attempt} made {iteration}"
        if made_by.get(iteration, 0) >= attempt:
            yield f"iteration {iteration} of attempt {made_by[iteration]} was made again by attempt {attempt}"
        last = max(last, iteration)
        made_by[iteration] = attempt
    # A checkpoint that was being written when its attempt ended may be committed later; its reports may be too late.
    ended: set[int] = set()
    in_time = []
    for frame in history.frames:
        if frame.kind == frames.ATTEMPT_END:
            ended.add(frame.attempt)
        elif frame.attempt not in ended:
            in_time.append(frame)
    needed = max([start, *(data["iteration"] for data in committed(in_time).values())])
    if history.is_closed and needed > last:
        yield f"a checkpoint is of iteration {needed}, and the last one that was emitted is {last}"


def _rounds(history: History) -> Iterator[Result]:
    merger, world_size = RoundMerger(), 0
    for frame in history.frames:
        world_size = frame.data["world_size"] if frame.kind == frames.ATTEMPT else world_size
        if frame.rank < world_size:
            yield from merger.feed(frame)


def attempts_start_from_newest_checkpoint(history: History) -> Iterator[str]:
    """Each attempt resumes from the newest checkpoint committed before it, or from a newer one in memory.

    Without a checkpoint it starts where the run began.
    """
    began: tuple[str | None, int] | None = None
    skipped: set[int] = set()
    for place, frame in enumerate(history.frames):
        if frame.kind != frames.EVENT:
            continue
        if match := _SKIPPED.match(frame.data["data"].get("message", "")):
            skipped.add(int(match[1]))
        if frame.data["kind"] != "attempt_start":
            continue
        data = frame.data["data"]
        start = data["checkpoint"], data["iterations_before"]
        began = start if began is None else began
        checkpoints = committed(history.frames[:place])
        known = {number: data for number, data in checkpoints.items() if number not in skipped}
        newest = known[max(known)] if known else None
        expected = began if newest is None else (newest["uri"], newest["iteration"])
        held = data.get("memory")
        newest_number = max(known, default=0)
        # An older checkpoint may have a higher iteration, where ranks report at different saves: a later round scored it.
        if held is not None and (held > newest_number or (held == newest_number and start[1] >= expected[1])):
            continue
        if start != expected:
            yield (
                f"attempt {data['attempt']} started from {start[0]} (iteration {start[1]}); "
                f"the newest checkpoint was {expected[0]} (iteration {expected[1]})"
            )


def retries_are_counted(history: History) -> Iterator[str]:
    """Retries are numbered and within the limit; each one is a re-entry, and each re-entry is one or a change of the group."""
    found = spans(history.frames)
    yield from _numbers(history)
    for span in found[1:]:
        if (count := len(list(events(span.inside, "failure")))) > 1:
            yield f"attempt {span.attempt} was counted as {count} failures"
    for before, span in pairwise(found[1:]):
        actions = [data["action"] for data in events(before.frames, "failure")]
        if not actions and not any(events(before.frames, "regroup")):
            yield f"attempt {span.attempt} was entered after attempt {before.attempt}, which had not failed"
        if actions and not _RETRY.fullmatch(actions[-1]):
            yield f"attempt {span.attempt} was entered though it was decided to {actions[-1]}"
    last = [data["action"] for data in events(found[-1].frames, "failure")]
    if last and history.outcome.get("kind") == "done":
        yield f"the run is done, though a failure of its last attempt was to be followed by {last[-1]}"


def _numbers(history: History) -> Iterator[str]:
    actions = [data["action"] for data in events(history.frames, "failure")]
    retries = [int(match[1]) for match in map(_RETRY.fullmatch, actions) if match]
    if retries != list(range(1, len(retries) + 1)):
        yield f"retries are numbered {retries}"
    limit = history.max_failures
    if limit is not None and 0 <= limit < len(retries):
        yield f"there were {len(retries)} retries, and max_failures is {limit}"
    if _GIVE_UP in actions and len(retries) != limit and limit is not None:
        yield f"the run gave up after {len(retries)} retries, and max_failures is {limit}"
    # An exception that was retried before is raised as itself, with the number of failures.
    has_given_up = history.outcome.get("error_type") == "WorkerDiedError" or bool(history.outcome.get("failures"))
    if has_given_up != (_GIVE_UP in actions) and history.is_closed:
        yield f"the actions were {actions}, and the outcome is {history.outcome.get('error_type')}"


def error_names_the_cause(history: History) -> Iterator[str]:
    """The error of a failed run names the rank and exception that came first, or the failure beyond the limit."""
    outcome = history.outcome
    if outcome.get("kind") != "error":
        return
    messages = [data["message"] for data in events(history.frames, "run_end")]
    message = messages[-1] if messages else ""
    if "summary" in outcome:
        needed = [outcome["summary"]] if outcome["rank"] is None else [f"rank {outcome['rank']}", outcome["summary"]]
        if any(rank == outcome["rank"] for rank, _ in outcome["followed"]):
            yield f"rank {outcome['rank']} is the cause of the error and its consequence"
    elif outcome.get("error_type") == "WorkerDiedError":
        failures = list(events(history.frames, "failure"))
        raised = [data["raised"] for data in failures if data.get("raised")]
        needed = [*(data["error"] for data in failures[-1:]), *raised[-1:]]
    else:
        needed = [outcome.get("message", "")]
    if not any(needed):
        yield "the run failed without a message"
    for text in needed:
        if text not in message:
            yield f"the error does not name {text!r}: {message!r}"


def run_never_stalls(history: History) -> Iterator[str]:
    """The run has an event or a report within each period of ``within_s`` seconds."""
    if history.within_s is None:
        return
    signs = sorted(sign for frame in history.frames for sign in _signs(frame))
    for (before, what), (after, then) in pairwise(signs):
        if after - before > history.within_s:
            yield f"nothing happened for {after - before:.1f} s, between {what} and {then}"


def _signs(frame: Frame) -> Iterator[tuple[float, str]]:
    """Yield when something happened, and what; a sample of a worker's load is not progress."""
    if frame.kind == frames.EVENT and frame.data["kind"] != "sample":
        yield frame.data["timestamp"], frame.data["kind"]
    elif frame.kind == frames.REPORTS:
        for row in decode(frame.rows):
            yield row[0], f"a report of rank {frame.rank}"


# -- checkpoints on storage ---------------------------------------------------------------------------------------------


def committed_checkpoints_can_be_loaded(history: History) -> Iterator[str]:
    """A committed checkpoint that was not deleted is on storage as the journal describes it, complete, and loads."""
    for number, described in sorted(committed(history.frames).items()):
        found = history.stored.get(number)
        if found is None:
            yield f"checkpoint {number} was committed, and is not on storage"
        elif found.problem:
            yield f"checkpoint {number} was committed, and cannot be loaded: {found.problem}"
        elif found.manifest is None:
            yield f"checkpoint {number} was committed, and has no manifest"
        else:
            yield from _differences(number, described, found.manifest)


def _differences(number: int, described: dict[str, Any], manifest: Manifest) -> Iterator[str]:
    for name in ("iteration", "attempt"):
        if described[name] != getattr(manifest, name):
            yield f"checkpoint {number} has {name} {described[name]} in the journal, {getattr(manifest, name)} in its manifest"
    if manifest.is_files:  # the user may save an empty folder
        return
    needed = set(range(manifest.world_size)) if manifest.all_ranks else set()
    with_part = {rank for rank, entries in manifest.parts.items() if entries}
    if missing := sorted(needed - with_part):
        yield f"checkpoint {number} of {manifest.world_size} ranks has no part of ranks {missing}"
    if not with_part:
        yield f"checkpoint {number} holds no state"


def no_other_files_exist(history: History) -> Iterator[str]:
    """A closed run has left no deleted checkpoint, no incomplete one, and no other file."""
    reported = {frame.data["number"] for frame in history.frames if frame.kind == frames.CHECKPOINT}
    kept = committed(history.frames)
    for number, found in sorted(history.stored.items()):
        if number in kept:
            if found.unlisted and history.is_closed:
                yield f"checkpoint {number} has files that are not its own: {', '.join(found.unlisted)}"
        elif not history.is_closed:  # the end of its journal may be lost
            continue
        elif number in reported:
            yield f"checkpoint {number} was deleted, and is still there"
        elif found.manifest is not None or found.problem:
            yield f"checkpoint {number} is on storage, but not in the journal"
        else:
            yield f"parts of checkpoint {number}, which was never committed, are left: {', '.join(found.unlisted)}"

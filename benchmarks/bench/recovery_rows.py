"""The rows and the page of the measures of recovery. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.rows import Limit, Row, fill_rows
from bench.systems import VARIANTS
from bench.table import comparison, machine_line, missed, number, spread

_SPARE, _NEW, _ELASTIC = VARIANTS
_KILLED, _STOPPED = "worker killed to next step", "worker stopped to next step, heartbeat timeout 10 s"
_NODE_KILLED = "node killed to next step, heartbeat timeout 10 s"
_NODE_FROZEN = "node frozen to next step, heartbeat timeout 10 s"
_AGAIN = "one of 5 ranks killed, again and again"
ROWS = (
    Row("kill_spare", f"{_KILLED}, with a spare", "kill", "seconds", "s", (Limit(0.5),), ours=_SPARE),
    Row("kill_elastic", f"{_KILLED}, elastic", "kill", "seconds", "s", (Limit(0.5),), ours=_ELASTIC),
    Row("kill_replace", f"{_KILLED}, in a new process", "kill", "seconds", "s", (Limit(1.3, "bare"),), ours=_NEW),
    Row("stop_spare", f"{_STOPPED}, with a spare", "stop", "seconds", "s", (Limit(11),), ours=_SPARE),
    Row("stop_elastic", f"{_STOPPED}, elastic", "stop", "seconds", "s", (Limit(11),), ours=_ELASTIC),
    Row("shrink", "elastic group of 3 loses a worker, to next step", "resize", "shrink_s", "s", (Limit(0.5),), ours=_ELASTIC),
    Row("grow", "room for a third worker, to first step of three", "resize", "grow_s", "s", (), ours=_ELASTIC),
    Row("grow_look", "of it: until the room is taken", "resize", "grow_look_s", "s", (), ours=_ELASTIC),
    Row("grow_start", "of it: starting a process, while two train on", "resize", "grow_start_s", "s", (), ours=_ELASTIC),
    Row("grow_pause", "of it: pause from last step of two to first of three", "resize", "grow_pause_s", "s", (), ours=_ELASTIC),
    Row("node_killed", f"{_NODE_KILLED}, in a new process", "node", "killed_s", "s", (Limit(12),), ours=_NEW),
    Row("node_frozen", f"{_NODE_FROZEN}, in a new process", "node", "frozen_s", "s", (Limit(12),), ours=_NEW),
    Row("node_killed_spare", f"{_NODE_KILLED}, with a spare on another", "node", "killed_s", "s", (Limit(12),), ours=_SPARE),
    Row("node_frozen_spare", f"{_NODE_FROZEN}, with a spare on another", "node", "frozen_s", "s", (Limit(12),), ours=_SPARE),
    Row("again", f"{_AGAIN}: went on", "reliability", "recovered_percent", "%", (Limit(100),), better="more", ours=_NEW),
    Row("again_s", f"{_AGAIN}: to next step", "reliability", "seconds", "s", (), ours=_NEW),
    Row("again_max", f"{_AGAIN}: the slowest", "reliability", "seconds", "s", (), share=1.0, ours=_NEW),
    Row("steady", "cost of readiness in a 10 ms step", "steady", "percent", "%", (Limit(1),), ours=_SPARE),
    Row("steady_idle", "a spare that does nothing, of a core", "steady", "idle_percent", "%", (), ours=_SPARE),
)  # fmt: skip

_HEAD = """\
# Recovery

<!-- Written by benchmarks/recovery.py from recovery.json; changes made here are lost. -->

How long training stands still when something fails, and what it costs to be ready for it: raysgd beside Ray Train on the
same machine, in one run. Write these figures anew with:

```console
$ python benchmarks/recovery.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. A DistributedDataParallel loop over gloo with steps of about 15 ms, in processes with
`OMP_NUM_THREADS=1`, on logical CPUs: workers, spares and Ray share the cores. Every process writes down when it had done a
step; a time begins when the signal is sent, at no particular moment of a step, and ends when the slowest rank of the next
group has done its first step, with the checkpoint loaded. What is told are medians; every sample is in
[recovery.json](recovery.json).

- **Killed** is SIGKILL; *bare actors* is the mechanism alone, in plain Ray: wait for the death, start an actor, import torch,
  form a new group of the survivor and the new one. Ray Train starts its whole group anew.
- **Stopped** is SIGSTOP, which closes no connection: only silence tells. raysgd has its default, `heartbeat_timeout_s=10`; Ray
  Train was given `RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=10`. By its default, 600 s, it would take ten minutes longer,
  which was not measured.
- **Growing** begins when a job gives back the CPU that the third worker needs. raysgd looks for room every 2 s, starts the
  process and waits 1 s for others that may come, all while the two train on, and lets them go out of a checkpoint. Ray
  Train's elastic group (which looks for room once in 60 s by default) was only shrunk: beside a job that holds a CPU it had
  not begun within 90 s when it was tried, so that there was nothing that could grow.
- **Nodes** are raylets with their processes on this one machine, killed with SIGKILL, or stopped with SIGSTOP, as a machine
  that hangs.
- **Again and again**: {tries} kills. A try that did not go on within its limit would be a failure, and is counted as one.
- **Readiness**: heartbeats, the search for hangs and a spare, beside a Trainer with heartbeats once in weeks and no spare,
  in turns, in blocks of equal work.
"""


#: Why a target is missed, by the row's key.
_WHY_MISSED = {
    "node_frozen": (
        "Silence is certain 10 s after the last heartbeat. In a run that was looked into, a process with torch was up on another "
        "node 2.2 s after that, and train_func took 1.2 s to its first step, in which it builds its DDP model, as when it began."
    ),
}


def render_page(document: Mapping[str, Any]) -> str:
    """The Markdown of the page."""
    rows = fill_rows(document, ROWS)
    parts = [_HEAD]
    if any(measure["quick"] for measure in document["measures"].values()):
        parts.append("**A quick run: few repetitions. These figures say that it works and no more.**\n")
    parts += [comparison(rows), "![The figures of the table](recovery.svg)\n", missed(rows, _WHY_MISSED)]
    parts.append(_METHOD.format(machine=machine_line(document["machine"]), tries=num_tries(document)))
    if failed := list_failures(document):
        parts.append("## What failed\n\n" + "\n".join(f"- {line}" for line in failed) + "\n")
    parts.append(spread(rows))
    return "\n".join(parts)


def num_tries(document: Mapping[str, Any]) -> int:
    """How often the measure of reliability killed."""
    entry = document["measures"].get("reliability", {}).get("systems", {}).get("raysgd_replace")
    if entry is None:
        return 0
    return entry["series"].get("seconds", {}).get("n", 0) + len(entry["errors"])


def list_failures(document: Mapping[str, Any]) -> list[str]:
    """Each kind of failed repetition in a line, with how often it was seen."""
    counts: dict[str, int] = {}
    for measure in document["measures"].values():
        for system, entry in measure["systems"].items():
            for error in entry["errors"]:
                line = f"{measure['title']}, {system}: {error}"
                counts[line] = counts.get(line, 0) + 1
    return [f"{line} ({number(count)} times)" if count > 1 else line for line, count in counts.items()]

"""The rows and the page of the measures of recovery. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.systems import VARIANTS
from bench.table import (
    Limit,
    Page,
    Row,
    comparison,
)

_SPARE, _NEW, _ELASTIC = VARIANTS
_KILLED, _STOPPED = "worker killed to next step", "worker stopped to next step, heartbeat timeout 10 s"
_NODE_KILLED = "node killed to next step, heartbeat timeout 10 s"
_NODE_FROZEN = "node frozen to next step, heartbeat timeout 10 s"
_CUT_OFF = "cable of the controller out for 15 s: plugged in to a step"
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
    Row("node_frozen", f"{_NODE_FROZEN}, without a spare", "node", "frozen_s", "s", (Limit(12),), ours=_NEW),
    Row("node_killed_spare", f"{_NODE_KILLED}, with a spare on another", "node", "killed_s", "s", (Limit(12),), ours=_SPARE),
    Row("node_frozen_spare", f"{_NODE_FROZEN}, with a spare on another", "node", "frozen_s", "s", (Limit(12),), ours=_SPARE),
    Row("cut_grow", "cable out for 25 s: plugged in to full size", "cut", "grow_s", "s", (Limit(15),), ours=_ELASTIC),
    Row("cut_control", _CUT_OFF, "cut", "controller_s", "s", (Limit(5),), ours=_ELASTIC),
    Row("again", f"{_AGAIN}: recovered", "reliability", "recovered_percent", "%", (Limit(100),), better="more", ours=_NEW),
    Row("again_s", f"{_AGAIN}: to next step", "reliability", "seconds", "s", (), ours=_NEW),
    Row("again_max", f"{_AGAIN}: the slowest", "reliability", "seconds", "s", (), share=1.0, ours=_NEW),
    Row("steady", "cost of readiness in a 10 ms step", "steady", "percent", "%", (Limit(1),), ours=_SPARE),
    Row("steady_idle", "a spare that does nothing, of a core", "steady", "idle_percent", "%", (), ours=_SPARE),
)  # fmt: skip

_HEAD = """\
# Recovery

<!-- Written by benchmarks/recovery.py from recovery.json; changes made here are lost. -->

How long training is interrupted by a failure, and what readiness for failures costs: raysgd and Ray Train on the same
machine, in one run. To measure again:

```console
$ python benchmarks/recovery.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. A DistributedDataParallel loop over gloo with steps of about 15 ms, `OMP_NUM_THREADS=1`, on
logical CPUs: workers, spares and Ray share the cores. A time begins when the signal is sent, at a random moment of a
step, and ends when the slowest rank of the next group has finished its first step, with the checkpoint loaded. Values
are medians; every sample is in [recovery.json](recovery.json).

- **Killed** is SIGKILL. *Bare actors* is the mechanism alone, in plain Ray: wait for the death, start an actor,
  import torch, form a new group of survivor and new actor. Ray Train restarts its whole group.
- **Stopped** is SIGSTOP, which closes no connection, so only silence shows it. raysgd has `heartbeat_timeout_s=10`,
  Ray Train `RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=10`; its default of 600 s was not measured.
- **Growing** begins when a job releases the CPU for the third worker. raysgd looks for room every 2 s and waits 1 s for
  further workers. Ray Train's elastic group was only shrunk: with a job that holds a CPU it had not started within
  90 s, so nothing could grow.
- **Nodes** are raylets with their processes on this machine, killed with SIGKILL or frozen with SIGSTOP.
- **Cables** are those of three machines with two CPUs each, which are namespaces of this machine, joined by a bridge. A
  cable that is out drops all packets and closes no connection. Six workers train, or four where the controller is cut off.
  The published times are of another machine, with 2 cores of an AMD EPYC and Linux 6.18, which can limit TCP's pauses.
- **Repeated kills**: {tries} kills. A try without recovery within its limit counts as a failure.
- **Readiness**: heartbeats, the search for hangs and a spare, compared with a Trainer without a spare and almost
  without heartbeats, in alternating blocks of equal work.
"""


def num_tries(document: Mapping[str, Any]) -> int:
    """Return the number of kills in the measure of reliability."""
    entry = document["measures"].get("reliability", {}).get("systems", {}).get("raysgd_replace")
    if entry is None:
        return 0
    return entry["series"].get("seconds", {}).get("n", 0) + len(entry["errors"])


PAGE = Page(
    rows=ROWS,
    stem="recovery",
    head=_HEAD,
    method=_METHOD,
    reasons={
        "node_frozen": (
            "Silence is certain 10 s after the last heartbeat. In an examined run, a process with torch was ready on "
            "another node 2.2 s later, and train_func took 1.2 s to its first step."
        )
    },
    quick="few repetitions",
    compare=comparison,
    fields=lambda document: {"tries": num_tries(document)},
)

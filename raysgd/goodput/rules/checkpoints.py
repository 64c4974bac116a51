"""Steps wait in ``save_checkpoint``, or for the processors that write: it is called too often, or storage is slower."""

from __future__ import annotations

from raysgd._util.text import in_time
from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding
from raysgd.goodput.rules import machines
from raysgd.goodput.rules.restarts import best_interval_s, saving_interval_s


def find(evidence: Evidence) -> Finding | None:
    number = len(evidence.savings)
    if not number:
        return None
    best_s, interval_s = best_interval_s(evidence), saving_interval_s(evidence)
    share, gain = evidence.cost_of("checkpoint")
    taken = evidence.stepping_share * evidence.processor_wait
    if machines.is_from_writing(evidence) and taken > share:
        return Finding(
            "checkpoints",
            taken,
            f"checkpoints were being written for {evidence.writing_share:.0%} of the time, {number} of them, and each rank had "
            f"no processor for {evidence.processor_wait:.0%} of it.",
            "save less often, or write only each n-th save to storage (CheckpointConfig(storage_interval=n)).",
            1 / (1 - evidence.processor_wait),
        )
    if gain is not None and machines.is_writing_alone(evidence):
        gain = gain_of(evidence.step_s, _saved_s(evidence))
    every = "less often"
    if best_s is not None and interval_s is not None and gain is not None:
        if best_s <= interval_s:
            every, gain = "to memory in between (CheckpointConfig(keep_in_memory=True))", None
        else:
            every = f"every {in_time(best_s)}, which costs least for this rate of failures,"
            stalled_s = evidence.step_s * (1 - 1 / gain)
            gain = gain_of(evidence.step_s, stalled_s * (1 - interval_s / best_s))
    return Finding(
        "checkpoints",
        share,
        f"train_func stood {share:.0%} of the time in save_checkpoint, {number} times.",
        f"save {every} or to faster storage.",
        gain,
    )


def _saved_s(evidence: Evidence) -> float:
    """Return the seconds per step that a rank loses by saving, and by waiting for a processor on which its save is written.

    Part of that waiting is within the save. Without saving, it takes as long as a rank that does not save, at least.
    """
    stalled_s, rank = max((pace.uses.get("checkpoint", 0.0), rank) for rank, pace in evidence.paces.items())
    least_s = min(pace.own_s - pace.uses.get("checkpoint", 0.0) for pace in evidence.paces.values())
    return max(stalled_s, min(stalled_s + evidence.paces[rank].cpu_wait_s, evidence.step_s - least_s))

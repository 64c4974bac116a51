"""Machines on which ranks cannot run: processors that others use, memory that is short."""

from __future__ import annotations

from raysgd.goodput.evidence import Evidence
from raysgd.goodput.findings import Finding

#: Below these parts of a step, waiting for a processor or for memory is what any machine does.
CPU_SHARE, MEMORY_SHARE = 0.1, 0.05
#: Writing checkpoints is worth a word about processors if it takes this part of the time.
WRITING_SHARE = 0.5


def find_processors(evidence: Evidence) -> Finding | None:
    """All ranks wait for processors; that one waits alone is the straggler's rule."""
    share = evidence.processor_wait
    if share < CPU_SHARE or is_from_writing(evidence):
        return None
    busy = next(iter(evidence.busy.values()), None)
    return Finding(
        "processors",
        evidence.stepping_share * share,
        f"each rank was ready to run, and had no processor, for {share:.0%} of the time"
        f"{'' if busy is None else f'; most used by {busy}'}.",
        "start fewer workers on a node, give each fewer threads (torch.set_num_threads), or end what else runs there.",
        1 / (1 - share),
    )


def is_from_writing(evidence: Evidence) -> bool:
    """Whether all ranks wait for processors because checkpoints are being written."""
    return evidence.processor_wait >= CPU_SHARE and is_writing_alone(evidence)


def is_writing_alone(evidence: Evidence) -> bool:
    """Whether checkpoints are being written, and nobody else uses many processors."""
    return not evidence.busy and evidence.writing_share >= WRITING_SHARE


def find_memory(evidence: Evidence) -> Finding | None:
    waits = {rank: pace.memory_wait_s / pace.step_s for rank, pace in evidence.paces.items() if pace.step_s}
    if not waits or (share := max(waits.values())) < MEMORY_SHARE:
        return None
    rank = max(waits, key=lambda each: waits[each])
    return Finding(
        "memory",
        evidence.stepping_share * share,
        f"the node of rank {rank}, {evidence.nodes.get(rank, '?')}, waited {share:.0%} of the time for memory.",
        "start fewer workers there, keep less in memory (smaller batches, fewer batches ahead), or take a larger node.",
        rank=rank,
    )

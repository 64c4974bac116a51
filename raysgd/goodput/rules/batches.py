"""Batches that differ between the ranks, so that these wait for each other, and batches that are too small for a step."""

from __future__ import annotations

from statistics import fmean, median

from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding
from raysgd.goodput.rules.stragglers import EXCESS, Slowest, find_slowest

#: A step that depends on its batch for less than the rest of this is for larger batches: two of them cost 1.7 times one.
FIXED_SHARE = 0.3
#: An exchange that would take less than half of its time at this rate waits for messages, not for their bytes: 1 Gbit/s.
SLOW_BYTES_PER_S = 125e6
#: Seconds that a message between two ranks takes at most on a network that is not slow, and the bytes of gradients that
#: DistributedDataParallel exchanges at once.
MESSAGE_S, BUCKET_BYTES = 2e-3, 25e6


def find_uneven(evidence: Evidence) -> Finding | None:
    """One rank has larger batches than the others, or the batches of each rank differ from step to step."""
    slowest = find_slowest(evidence)
    if slowest is not None and slowest.has_larger_batches and not slowest.has_larger_batches_by_chance:
        return _of_one(evidence, slowest)
    uneven_s, step_s = evidence.uneven_s, evidence.step_s
    if not step_s or uneven_s < EXCESS * step_s:
        return None
    spread = fmean(each.batches.spread / each.batches.values for each in evidence.paces.values() if each.batches)
    return Finding(
        "uneven batches",
        evidence.stepping_share * uneven_s / step_s,
        f"batches differ in size by {spread:.0%} from step to step, and in each step the ranks wait for the largest one: "
        f"{uneven_s / step_s:.0%} of the time.",
        "put rows of equal length into a step (sort them by length in blocks, or fill batches up to a number of tokens).",
        gain_of(step_s, uneven_s),
    )


def _of_one(evidence: Evidence, slowest: Slowest) -> Finding:
    own, others = slowest.pace.batches, [each.batches for each in slowest.others.values() if each.batches is not None]
    assert own is not None
    rows, values = (
        getattr(own, name) / max(median(getattr(each, name) for each in others), 1e-9) for name in ("rows", "values")
    )
    # All rows stay, and each rank gets as many: the mean of the computing times.
    saved_s = slowest.excess_s * len(slowest.others) / (1 + len(slowest.others))
    what = (
        f"{rows:.2f}x as many rows in a batch as"
        if rows >= 1 + (values - 1) / 2
        else f"batches {values:.2f}x as large as"
    )
    return Finding(
        "uneven batches",
        evidence.stepping_share * slowest.excess_s / slowest.pace.step_s,
        f"{evidence.place_of(slowest.rank)} gets {what} the others, and computes "
        f"{1 + slowest.excess_s / max(slowest.others_s, 1e-9):.2f}x as long.",
        "give each rank as many rows of the same lengths: a dataset of raysgd and prepare_data_loader divide them evenly.",
        gain_of(slowest.pace.step_s, saved_s),
        slowest.rank,
    )


def is_latency(evidence: Evidence) -> bool:
    """Return whether exchanging takes as long as it does because of its messages: its bytes alone would take less than half."""
    sent_bytes, num_ranks = median(pace.sent_bytes for pace in evidence.paces.values()), len(evidence.paces)
    messages_s = MESSAGE_S * 2 * (num_ranks - 1) * (1 + sent_bytes / BUCKET_BYTES)
    return 0 < traffic(sent_bytes, num_ranks) / SLOW_BYTES_PER_S < evidence.exchange_s / 2 <= messages_s / 2


def traffic(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that a rank sends when a ring of ranks averages so many (Patarasuk and Yuan, 2009)."""
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


def find_small(evidence: Evidence) -> Finding | None:
    """Much of a step would take as long with a larger batch: computing that does not depend on its size, and messages."""
    step_s = evidence.step_s
    if not step_s:
        return None
    # A wait for a processor lasts as long for any batch, and is another cause.
    fixed_s = median(
        0.0 if pace.batches is None else max(0.0, pace.batches.fixed_s - pace.cpu_wait_s)
        for pace in evidence.paces.values()
    )
    gpu = [pace.gpu_share for pace in evidence.paces.values() if pace.gpu_share is not None]
    if gpu:  # it computes while Python continues, so its idle time is that of Python
        busy_s = median(gpu) * step_s
        fixed_s = max(0.0, median(pace.computing_s for pace in evidence.paces.values()) - busy_s)
    messages_s = evidence.exchange_s - evidence.uneven_s if is_latency(evidence) else 0.0
    share = (fixed_s + messages_s) / step_s
    if share < FIXED_SHARE:
        return None
    parts = [
        f"{seconds * 1e3:.1f} ms {what}"
        for seconds, what in (
            (fixed_s, "in which the GPU has nothing to do" if gpu else "of computing"),
            (messages_s, "of messages between ranks"),
        )
        if seconds >= 0.05 * step_s
    ]
    saved_s = (fixed_s + messages_s) / 2
    return Finding(
        "small batches",
        evidence.stepping_share * saved_s / step_s,
        f"{share:.0%} of a step does not depend on its batch: {' and '.join(parts)}.",
        "make batches twice as large; the gain is in rows.",
        gain_of(step_s, saved_s),
    )

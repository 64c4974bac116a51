"""All ranks wait as long for each other: what they exchange takes long, and no rank is the cause."""

from __future__ import annotations

from statistics import median

from raysgd._util.text import in_bytes
from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding
from raysgd.goodput.rules.batches import SLOW_BYTES_PER_S, find_small, is_latency, traffic

#: Below this part of a step, exchanging is what data parallelism costs.
SHARE = 0.2


def find(evidence: Evidence) -> Finding | None:
    step_s = evidence.step_s
    exchange_s = max(0.0, evidence.exchange_s - evidence.uneven_s)
    if not step_s or (share := exchange_s / step_s) < SHARE:
        return None
    if is_latency(evidence) and find_small(evidence) is not None:
        return None
    sent = traffic(median(pace.sent_bytes for pace in evidence.paces.values()), len(evidence.paces))
    rate = sent / exchange_s
    nodes = {evidence.nodes.get(rank) for rank in evidence.paces}
    cause, what = (
        "collectives",
        f"exchanging gradients and states takes {share:.0%} of a step on every rank, {exchange_s * 1e3:.0f} ms",
    )
    remedy = "accumulate gradients over two batches, or make larger ones"
    if sent and not is_latency(evidence):
        what += f" for {in_bytes(sent)}"
    if len(nodes) > 1 and not is_latency(evidence) and 0 < rate < SLOW_BYTES_PER_S:
        cause, what = "slow link", f"{what}: {in_bytes(rate)}/s, less than 1 Gbit/s between {len(nodes)} nodes"
        remedy = f"find the node with the slow link by `raysgd doctor --cluster`, and avoid it; or {remedy}"
    return Finding(
        cause,
        evidence.stepping_share * share,
        f"{what}.",
        f"{remedy}.",
        gain_of(step_s, exchange_s / 2),  # two batches exchange once
    )

"""Deaths by memory are recognised and described."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.workers.liveness.memory_use import ADVICE, MemoryEvidence, MemoryPool, Size, describe_growth, judge

GIB = 1 << 30
FULL_NODE = MemoryPool("the node", int(23.4 * GIB), int(23.1 * GIB))
ROOMY_NODE = MemoryPool("the node", int(23.4 * GIB), 4 * GIB)
FULL_CGROUP = MemoryPool("its cgroup", 2 * GIB, 2 * GIB)


def sizes(*gib: float, every_s: float = 1.0) -> tuple[Size, ...]:
    return tuple(Size(every_s * i, int(size * GIB)) for i, size in enumerate(gib))


GROWING = sizes(1.2, 1.2, 8.0, 15.0, 21.8, every_s=10)
FLAT = sizes(1.2, 1.2, 1.2)


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (
            MemoryEvidence(GROWING, FULL_NODE, 1, "on the node"),
            "out of memory: its resident size grew from 1.2 GiB to 21.8 GiB in 30 s; the node has 23.4 GiB, 23.1 GiB of it "
            f"in use; the kernel's count of memory kills on the node went up. {ADVICE}",
        ),
        (
            MemoryEvidence(FLAT, FULL_CGROUP, 2, "in its cgroup"),
            "out of memory: its resident size was 1.2 GiB; its cgroup has 2.0 GiB, 2.0 GiB of it in use; the kernel's "
            f"count of memory kills in its cgroup went up. {ADVICE}",
        ),
        (
            MemoryEvidence(FLAT, None, 1, "in its cgroup"),
            "out of memory: its resident size was 1.2 GiB; the kernel's count of memory kills in its cgroup went up. "
            f"{ADVICE}",
        ),
        (
            MemoryEvidence(GROWING, FULL_NODE),
            "probably out of memory: it was killed, or crashed; its resident size grew from 1.2 GiB to 21.8 GiB in 30 s; the "
            f"node has 23.4 GiB, 23.1 GiB of it in use. {ADVICE}",
        ),
    ],
    ids=["counted on the node", "counted in its cgroup", "counted where nothing is limited", "not counted"],
)
def test_death_by_memory_is_described(evidence: MemoryEvidence, message: str) -> None:
    assert judge(evidence) == message


@pytest.mark.parametrize(
    "evidence",
    [
        MemoryEvidence(FLAT, ROOMY_NODE),
        MemoryEvidence(FLAT, FULL_NODE),
        MemoryEvidence(GROWING, ROOMY_NODE),
        MemoryEvidence(GROWING, None),
        MemoryEvidence(FLAT, ROOMY_NODE, 3, "on the node"),
        MemoryEvidence(sizes(20.0, 1.0), FULL_NODE),
        MemoryEvidence((Size(0.0, GIB), Size(3600.0, 20 * GIB), Size(3601.0, 20 * GIB)), FULL_NODE),
    ],
    ids=[
        "nothing",
        "a full node and a small worker",
        "growth and enough free memory",
        "growth on an unknown node",
        "another container's process was killed",
        "it had freed its memory",
        "it grew an hour ago",
    ],
)
def test_other_deaths_are_not_attributed_to_memory(evidence: MemoryEvidence) -> None:
    assert judge(evidence) is None


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (sizes(1.0), "was 1.0 GiB"),
        (sizes(0.25, 0.26), "was 266 MiB"),
        (sizes(0.5, 1.0), "grew from 512 MiB to 1.0 GiB in 1 s"),
        (sizes(1.0, 1.0, 1.0, 5.0), "grew from 1.0 GiB to 5.0 GiB in 1 s"),
        (sizes(9.0, 1.0, 5.0), "grew from 1.0 GiB to 5.0 GiB in 1 s"),
        ((Size(0.0, GIB), *sizes(9.0, 9.1, every_s=600)), "grew from 1.0 GiB to 9.1 GiB in 10 min"),
        ((Size(-9000.0, GIB), *sizes(9.0, 9.0)), "grew from 1.0 GiB to 9.0 GiB in 2.5 h"),
    ],
    ids=["one sample", "noise", "growth", "late growth", "after a peak", "minutes", "a leak of hours"],
)
def test_growth_is_described(samples: tuple[Size, ...], words: str) -> None:
    assert describe_growth(samples) == f"its resident size {words}"


any_sizes = st.lists(st.integers(1, 64 * GIB), min_size=1, max_size=20).map(
    lambda found: tuple(Size(0.5 * i, size) for i, size in enumerate(found))
)
pools = st.one_of(
    st.none(), st.builds(MemoryPool, st.just("the node"), st.integers(0, 64 * GIB), st.integers(0, 64 * GIB))
)


@given(samples=any_sizes, pool=pools, kills=st.integers(0, 3))
def test_death_is_certain_only_with_a_counted_kill(
    samples: tuple[Size, ...], pool: MemoryPool | None, kills: int
) -> None:
    message = judge(MemoryEvidence(samples, pool, kills, "in its cgroup")) or ""
    assert message.startswith("out of memory: ") == (kills > 0)
    assert message == "" or message.endswith(ADVICE)


@given(pool=pools, size=st.integers(1, 64 * GIB), num=st.integers(1, 20))
def test_kill_on_the_node_is_not_attributed_to_a_worker_that_does_not_grow(
    pool: MemoryPool | None, size: int, num: int
) -> None:
    is_full = pool is not None and pool.used_fraction >= 0.85
    evidence = MemoryEvidence(tuple(Size(i, size) for i in range(num)), pool, 1, "on the node")
    assert (judge(evidence) is not None) == is_full
    assert judge(MemoryEvidence(evidence.sizes, pool)) is None

"""When a death is put down to memory, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.workers.out_of_memory import ADVICE, MemoryEvidence, Room, Size, grown, judge

GIB = 1 << 30
FULL_NODE = Room("the node", int(23.4 * GIB), int(23.1 * GIB))
ROOMY_NODE = Room("the node", int(23.4 * GIB), 4 * GIB)
FULL_CGROUP = Room("its cgroup", 2 * GIB, 2 * GIB)


def sizes(*gib: float, every_s: float = 1.0) -> tuple[Size, ...]:
    return tuple(Size(every_s * i, int(size * GIB)) for i, size in enumerate(gib))


GROWING = sizes(1.2, 1.2, 8.0, 15.0, 21.8, every_s=10)
FLAT = sizes(1.2, 1.2, 1.2)


@pytest.mark.parametrize(
    ("evidence", "said"),
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
def test_what_is_said(evidence: MemoryEvidence, said: str) -> None:
    assert judge(evidence) == said


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
        "growth and room enough",
        "growth and nothing known of the node",
        "another container's process was killed",
        "it had given its memory back",
        "it grew an hour ago",
    ],
)
def test_what_is_not_put_down_to_memory(evidence: MemoryEvidence) -> None:
    assert judge(evidence) is None


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (sizes(1.0), "was 1.0 GiB"),
        (sizes(0.25, 0.26), "was 266 MiB"),
        (sizes(0.5, 1.0), "grew from 512 MiB to 1.0 GiB in 1 s"),
        (sizes(1.0, 1.0, 1.0, 5.0), "grew from 1.0 GiB to 5.0 GiB in 1 s"),
        (sizes(9.0, 1.0, 5.0), "grew from 1.0 GiB to 5.0 GiB in 1 s"),
        ((Size(0.0, GIB), *sizes(9.0, 9.1, every_s=600)), "grew from 1.0 GiB to 9.1 GiB in 10 min"),
        ((Size(-9000.0, GIB), *sizes(9.0, 9.0)), "grew from 1.0 GiB to 9.0 GiB in 2.5 h"),
    ],
    ids=["one look", "noise", "growth", "late growth", "after a peak", "minutes", "a leak of hours"],
)
def test_how_growth_is_told(seen: tuple[Size, ...], words: str) -> None:
    assert grown(seen) == f"its resident size {words}"


any_sizes = st.lists(st.integers(1, 64 * GIB), min_size=1, max_size=20).map(
    lambda found: tuple(Size(0.5 * i, size) for i, size in enumerate(found))
)
rooms = st.one_of(st.none(), st.builds(Room, st.just("the node"), st.integers(0, 64 * GIB), st.integers(0, 64 * GIB)))


@given(seen=any_sizes, room=rooms, kills=st.integers(0, 3))
def test_only_a_count_makes_it_certain(seen: tuple[Size, ...], room: Room | None, kills: int) -> None:
    said = judge(MemoryEvidence(seen, room, kills, "in its cgroup")) or ""
    assert said.startswith("out of memory: ") == (kills > 0)
    assert said == "" or said.endswith(ADVICE)


@given(room=rooms, size=st.integers(1, 64 * GIB), num=st.integers(1, 20))
def test_a_worker_that_does_not_grow_is_not_put_down_to_memory_by_the_nodes_count(
    room: Room | None, size: int, num: int
) -> None:
    is_full = room is not None and room.share >= 0.85
    evidence = MemoryEvidence(tuple(Size(i, size) for i in range(num)), room, 1, "on the node")
    assert (judge(evidence) is not None) == is_full
    assert judge(MemoryEvidence(evidence.sizes, room)) is None

"""What a node's agent knows of the memory of a process that is gone: from files as kernels write them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.workers.agent import NodeAgent
from raysgd.workers.memory_files import MemoryFiles
from raysgd.workers.memory_watch import MemoryWatch
from raysgd.workers.out_of_memory import MemoryEvidence, Room, Size
from support.poll import until

MIB = 1 << 20
GIB = 1 << 30
PID = 4711
NODE = Room("the node", 16 * GIB, 4 * GIB)


class Node:
    """A node's files below a folder, which a test writes as the kernel would, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        self.watch = MemoryWatch(MemoryFiles(root), lambda: self.now_s)
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n")
        self.kills_on_it(0)

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def kills_on_it(self, kills: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 12\noom_kill {kills}\nballoon_inflate 0\n")

    def process(self, size_bytes: int, cgroups: str = "0::/\n") -> None:
        self.write(f"proc/{PID}/statm", f"999999 {size_bytes // mmap.PAGESIZE} 300 1 0 200 0\n")
        self.write(f"proc/{PID}/cgroup", cgroups)

    def process_ends(self) -> None:
        """As a zombie: its memory is gone, and where it was is not told any more."""
        self.write(f"proc/{PID}/statm", "0 0 0 0 0 0 0\n")

    def looks(self, *sizes: int, cgroups: str = "0::/\n") -> None:
        """One look a second."""
        for size in sizes:
            self.process(size, cgroups)
            self.watch.look()
            self.now_s += 1

    def evidence(self) -> MemoryEvidence:
        found = self.watch.evidence(PID)
        assert found is not None
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# -------------------------------------------------------------------------------------------- cgroups


def version_2(node: Node, kills: int, used_bytes: int = 512 * MIB, cached_bytes: int = 0, limit: str = f"{GIB}") -> str:
    """A service of systemd's; returns what its processes belong to."""
    node.write(
        "proc/self/mountinfo",
        "24 1 0:22 / /sys rw,nosuid - sysfs sysfs rw\n"
        "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    )
    node.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    node.write("sys/fs/cgroup/system.slice/memory.events", "low 0\noom_kill 55\n")
    node.write("sys/fs/cgroup/system.slice/memory.max", "max\n")
    service = "sys/fs/cgroup/system.slice/ray.service"
    node.write(f"{service}/memory.events", f"low 0\nhigh 0\nmax 9\noom {kills}\noom_kill {kills}\noom_group_kill 0\n")
    node.write(f"{service}/memory.max", f"{limit}\n")
    node.write(f"{service}/memory.current", f"{used_bytes}\n")
    node.write(f"{service}/memory.stat", f"anon 1\nfile 7\nactive_file 3\ninactive_file {cached_bytes}\n")
    return "0::/system.slice/ray.service\n"


def own_namespace(node: Node, kills: int) -> str:
    """A container of version 2, which sees its own cgroup as the root."""
    node.write("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n")
    node.write("sys/fs/cgroup/memory.events", f"oom {kills}\noom_kill {kills}\n")
    node.write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    node.write("sys/fs/cgroup/memory.current", f"{512 * MIB}\n")
    node.write("sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    return "0::/\n"


def without_controller(node: Node, kills: int) -> str:
    """A cgroup of version 2 whose memory is counted by the one above it."""
    version_2(node, kills)
    node.write("sys/fs/cgroup/system.slice/ray.service/workers/cgroup.procs", f"{PID}\n")
    return "0::/system.slice/ray.service/workers\n"


def version_1(node: Node, kills: int, *, seen_from: str = "/") -> str:
    """As Docker makes it; the container itself sees its own part of the tree and the path of all of it."""
    node.write(
        "proc/self/mountinfo",
        f"40 30 0:28 {seen_from} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"41 30 0:29 {seen_from} /sys/fs/cgroup/memory ro,nosuid master:12 - cgroup cgroup rw,memory\n"
        "42 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    top = "sys/fs/cgroup/memory"
    place = top + ("/docker/ab" if seen_from == "/" else "")
    node.write(f"{top}/memory.limit_in_bytes", "9223372036854771712\n")
    node.write(f"{place}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    node.write(f"{place}/memory.limit_in_bytes", f"{GIB}\n")
    node.write(f"{place}/memory.usage_in_bytes", f"{768 * MIB}\n")
    node.write(f"{place}/memory.stat", f"inactive_file 5\ntotal_inactive_file {256 * MIB}\n")
    return "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n"


def version_1_inside(node: Node, kills: int) -> str:
    return version_1(node, kills, seen_from="/docker/ab")


@pytest.mark.parametrize("layout", [version_2, own_namespace, without_controller, version_1, version_1_inside])
def test_a_kill_in_its_cgroup(node: Node, layout: object) -> None:
    assert callable(layout)
    cgroups = layout(node, 3)
    node.process(100 * MIB, cgroups)
    node.watch.watch([PID])
    node.looks(100 * MIB, 400 * MIB, cgroups=cgroups)
    node.process_ends()
    node.kills_on_it(9)
    assert node.evidence().kills == 0, "the node's count was taken for its cgroup's"
    layout(node, 4)
    sizes = (Size(100.0, 100 * MIB), Size(101.0, 400 * MIB))
    assert node.evidence() == MemoryEvidence(sizes, Room("its cgroup", GIB, 512 * MIB), 1, "in its cgroup")


def test_files_that_the_kernel_would_let_go_are_not_in_use(node: Node) -> None:
    cgroups = version_2(node, 0, used_bytes=GIB, cached_bytes=GIB - 512 * MIB)
    node.process(MIB, cgroups)
    node.watch.watch([PID])
    assert node.evidence().room == Room("its cgroup", GIB, 512 * MIB)


@pytest.mark.parametrize("limit", ["max", f"{64 * GIB}"], ids=["no limit", "a limit beyond the node"])
def test_a_cgroup_that_is_not_limited_has_the_nodes_room(node: Node, limit: str) -> None:
    node.process(MIB, version_2(node, 0, limit=limit))
    node.watch.watch([PID])
    assert node.evidence().room == NODE


def test_the_fullest_room_counts(node: Node) -> None:
    node.process(MIB, version_2(node, 0, used_bytes=GIB // 8))
    node.watch.watch([PID])
    assert node.evidence().room == NODE


@pytest.mark.parametrize("cgroups", ["0::/../../elsewhere\n", "0::/\n", "4:memory:/a\n", ""])
def test_where_its_cgroup_cannot_be_seen_the_nodes_count_is_taken(node: Node, cgroups: str) -> None:
    node.write("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    node.process(MIB, cgroups)
    node.watch.watch([PID])
    node.kills_on_it(1)
    assert node.evidence() == MemoryEvidence((Size(100.0, MIB),), NODE, 1, "on the node")


# -------------------------------------------------------------------------------------------- from look to look


def test_a_kill_that_was_counted_while_the_process_was_still_seen_is_its_own(node: Node) -> None:
    node.process(MIB)
    node.watch.watch([PID])
    node.looks(MIB, MIB, MIB)
    node.kills_on_it(1)
    node.looks(MIB)
    node.process_ends()
    assert node.evidence().kills == 1


def test_a_kill_that_the_process_has_survived_by_seconds_is_not_its_own(node: Node) -> None:
    node.process(MIB)
    node.watch.watch([PID])
    node.looks(MIB)
    node.kills_on_it(1)
    node.looks(MIB, MIB, MIB)
    node.process_ends()
    assert node.evidence().kills == 0


def test_a_process_that_was_moved_is_counted_where_it_is(node: Node) -> None:
    cgroups = version_2(node, 3)
    node.process(MIB, "0::/\n")
    node.watch.watch([PID])
    node.kills_on_it(7)
    node.looks(MIB, MIB, cgroups=cgroups)
    version_2(node, 5)
    evidence = node.evidence()
    assert (evidence.kills, evidence.counted) == (2, "in its cgroup")


def test_a_process_that_is_about_to_end_is_counted_where_it_was(node: Node) -> None:
    cgroups = version_1(node, 3)
    node.process(MIB, cgroups)
    node.watch.watch([PID])
    version_1(node, 4)
    node.looks(MIB, cgroups="9:cpu,cpuacct:/\n4:memory:/\n0::/\n")  # as the kernel lists one that is exiting
    node.process_ends()
    node.watch.look()
    evidence = node.evidence()
    assert (evidence.kills, evidence.counted) == (1, "in its cgroup")


def test_a_cgroup_that_went_with_its_process_tells_nothing(node: Node) -> None:
    node.process(MIB, version_2(node, 3))
    node.watch.watch([PID])
    for file in (node.root / "sys/fs/cgroup/system.slice").rglob("memory.events"):
        file.unlink()
    node.kills_on_it(4)
    assert node.evidence().kills == 0


def test_the_first_look_and_the_last_ones_are_kept(node: Node) -> None:
    node.process(7 * MIB)
    node.watch.watch([PID])
    node.looks(*[i * MIB for i in range(10, 510)])
    sizes = node.evidence().sizes
    assert [size.size_bytes // MIB for size in sizes] == [7, *range(450, 510)]


def test_what_was_seen_last_outlives_the_process(node: Node) -> None:
    node.process(MIB)
    node.watch.watch([PID])
    node.looks(2 * MIB)
    node.process_ends()
    node.write("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 1 kB\n")
    node.watch.look()
    assert node.evidence() == MemoryEvidence((Size(100.0, MIB), Size(100.0, 2 * MIB)), NODE)


def test_only_those_that_are_asked_for_are_watched(node: Node) -> None:
    node.process(MIB)
    assert node.watch.evidence(PID) is None
    node.watch.watch([PID, 1234])
    assert node.watch.evidence(1234) is None, "there is no such process"
    node.looks(2 * MIB)
    node.watch.watch([PID])
    assert len(node.evidence().sizes) == 3, "what was known of it was forgotten"
    node.process_ends()
    node.watch.look()
    node.process(5 * MIB)
    node.watch.watch([PID])
    assert node.evidence().sizes == (Size(101.0, 5 * MIB),), "another process with its id was taken for it"
    node.watch.watch([])
    assert node.watch.evidence(PID) is None


@pytest.mark.parametrize(
    "text", ["", "\n", "abc\n", ":::\n", "0::\n", "a - b\n", "1 2 3 4 5 - cgroup2\n", "oom_kill x\n"]
)
def test_files_of_another_form_than_any_so_far_do_no_harm(node: Node, text: str) -> None:
    cgroups = version_2(node, 1)
    node.process(MIB, cgroups)
    for file in [path for path in node.root.rglob("*") if path.is_file()]:
        kept = file.read_text()
        file.write_text(text)
        watch = MemoryWatch(MemoryFiles(node.root))
        watch.watch([PID])
        evidence = watch.evidence(PID)
        assert evidence is None or evidence.kills == 0
        file.write_text(kept)


def test_a_system_without_these_files_knows_nothing(tmp_path: Path) -> None:
    watch = MemoryWatch(MemoryFiles(tmp_path))
    watch.watch([os.getpid()])
    assert watch.evidence(os.getpid()) is None


# -------------------------------------------------------------------------------------------- a real process


def test_an_agent_looks_by_itself_at_a_real_process() -> None:
    grows = "import sys; sys.stdin.readline(); held = b'x' * (200 << 20); sys.stdin.readline()"
    agent = NodeAgent()
    with subprocess.Popen([sys.executable, "-c", grows], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        agent.watch_memory([process.pid])
        process.stdin.write("\n")
        process.stdin.flush()
        assert until(lambda: _last_size(agent, process.pid) > 200 * MIB, timeout_s=60)
        process.kill()
    evidence = agent.memory(process.pid)
    agent.close()
    assert evidence is not None
    assert evidence.sizes[0].size_bytes < 100 * MIB, "the first look was late"
    assert evidence.sizes[-1].size_bytes > 200 * MIB
    assert evidence.room is not None and evidence.room.used_bytes > 200 * MIB


def _last_size(agent: NodeAgent, pid: int) -> int:
    evidence = agent.memory(pid)
    return 0 if evidence is None else evidence.sizes[-1].size_bytes

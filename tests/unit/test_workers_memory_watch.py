"""The memory evidence on a dead process comes from files as kernels write them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.workers.liveness.memory_use import NUM_SAMPLES, MemoryEvidence, MemoryFiles, MemoryPool, MemoryWatch, Size
from raysgd.workers.liveness.node_agent import NodeAgent
from support.poll import until

MIB = 1 << 20
GIB = 1 << 30
PID = 4711
NODE = MemoryPool("the node", 16 * GIB, 4 * GIB)


class Node:
    """A folder with a node's files, which a test writes in the kernel's place, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        self.watch = MemoryWatch(MemoryFiles(root), lambda: self.now_s)
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n")
        self.write_node_kills(0)

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_node_kills(self, kills: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 12\noom_kill {kills}\nballoon_inflate 0\n")

    def write_process(self, size_bytes: int, cgroups: str = "0::/\n") -> None:
        self.write(f"proc/{PID}/statm", f"999999 {size_bytes // mmap.PAGESIZE} 300 1 0 200 0\n")
        self.write(f"proc/{PID}/cgroup", cgroups)

    def end_process(self) -> None:
        """Make the process a zombie: its memory and its cgroups are gone."""
        self.write(f"proc/{PID}/statm", "0 0 0 0 0 0 0\n")

    def sample(self, *sizes: int, cgroups: str = "0::/\n") -> None:
        """Take one sample per second with these sizes."""
        for size in sizes:
            self.write_process(size, cgroups)
            self.watch.sample()
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
    """Write the cgroup of a systemd service; return the kernel's list of its processes' cgroups."""
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
    """Write a container of version 2, which sees its own cgroup as the root."""
    node.write("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n")
    node.write("sys/fs/cgroup/memory.events", f"oom {kills}\noom_kill {kills}\n")
    node.write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    node.write("sys/fs/cgroup/memory.current", f"{512 * MIB}\n")
    node.write("sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    return "0::/\n"


def without_controller(node: Node, kills: int) -> str:
    """Write a cgroup of version 2 whose parent counts the memory."""
    version_2(node, kills)
    node.write("sys/fs/cgroup/system.slice/ray.service/workers/cgroup.procs", f"{PID}\n")
    return "0::/system.slice/ray.service/workers\n"


def version_1(node: Node, kills: int, *, mounted: str = "/") -> str:
    """Write a Docker container's cgroup; the container sees only its own part of the tree, but the whole path."""
    node.write(
        "proc/self/mountinfo",
        f"40 30 0:28 {mounted} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"41 30 0:29 {mounted} /sys/fs/cgroup/memory ro,nosuid master:12 - cgroup cgroup rw,memory\n"
        "42 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    top = "sys/fs/cgroup/memory"
    folder = top + ("/docker/ab" if mounted == "/" else "")
    node.write(f"{top}/memory.limit_in_bytes", "9223372036854771712\n")
    node.write(f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    node.write(f"{folder}/memory.limit_in_bytes", f"{GIB}\n")
    node.write(f"{folder}/memory.usage_in_bytes", f"{768 * MIB}\n")
    node.write(f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {256 * MIB}\n")
    return "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n"


def version_1_inside(node: Node, kills: int) -> str:
    return version_1(node, kills, mounted="/docker/ab")


@pytest.mark.parametrize("layout", [version_2, own_namespace, without_controller, version_1, version_1_inside])
def test_kill_in_the_processes_cgroup_is_counted(node: Node, layout: object) -> None:
    assert callable(layout)
    cgroups = layout(node, 3)
    node.write_process(100 * MIB, cgroups)
    node.watch.watch([PID])
    node.sample(100 * MIB, 400 * MIB, cgroups=cgroups)
    node.end_process()
    node.write_node_kills(9)
    assert node.evidence().kills == 0, "the node's count was taken for its cgroup's"
    layout(node, 4)
    sizes = (Size(100.0, 100 * MIB), Size(101.0, 400 * MIB))
    assert node.evidence() == MemoryEvidence(sizes, MemoryPool("its cgroup", GIB, 512 * MIB), 1, "in its cgroup")


def test_reclaimable_memory_is_not_in_use(node: Node) -> None:
    cgroups = version_2(node, 0, used_bytes=GIB, cached_bytes=GIB - 512 * MIB)
    node.write_process(MIB, cgroups)
    node.watch.watch([PID])
    assert node.evidence().pool == MemoryPool("its cgroup", GIB, 512 * MIB)


@pytest.mark.parametrize("limit", ["max", f"{64 * GIB}"], ids=["no limit", "a limit beyond the node"])
def test_cgroup_without_an_effective_limit_has_the_nodes_memory(node: Node, limit: str) -> None:
    node.write_process(MIB, version_2(node, 0, limit=limit))
    node.watch.watch([PID])
    assert node.evidence().pool == NODE


def test_fullest_memory_pool_counts(node: Node) -> None:
    node.write_process(MIB, version_2(node, 0, used_bytes=GIB // 8))
    node.watch.watch([PID])
    assert node.evidence().pool == NODE


@pytest.mark.parametrize("cgroups", ["0::/../../elsewhere\n", "0::/\n", "4:memory:/a\n", ""])
def test_kills_on_the_node_count_if_the_cgroup_is_not_visible(node: Node, cgroups: str) -> None:
    node.write("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    node.write_process(MIB, cgroups)
    node.watch.watch([PID])
    node.write_node_kills(1)
    assert node.evidence() == MemoryEvidence((Size(100.0, MIB),), NODE, 1, "on the node")


# -------------------------------------------------------------------------------------------- sampling


def test_kill_counted_while_the_process_was_still_visible_is_its_own(node: Node) -> None:
    node.write_process(MIB)
    node.watch.watch([PID])
    node.sample(MIB, MIB, MIB)
    node.write_node_kills(1)
    node.sample(MIB)
    node.end_process()
    assert node.evidence().kills == 1


def test_kill_that_the_process_survived_by_seconds_is_not_its_own(node: Node) -> None:
    node.write_process(MIB)
    node.watch.watch([PID])
    node.sample(MIB)
    node.write_node_kills(1)
    node.sample(MIB, MIB, MIB)
    node.end_process()
    assert node.evidence().kills == 0


def test_kills_of_a_moved_process_count_in_its_new_cgroup(node: Node) -> None:
    cgroups = version_2(node, 3)
    node.write_process(MIB, "0::/\n")
    node.watch.watch([PID])
    node.write_node_kills(7)
    node.sample(MIB, MIB, cgroups=cgroups)
    version_2(node, 5)
    evidence = node.evidence()
    assert (evidence.kills, evidence.counted) == (2, "in its cgroup")


def test_kills_of_an_exiting_process_count_in_its_last_cgroup(node: Node) -> None:
    cgroups = version_1(node, 3)
    node.write_process(MIB, cgroups)
    node.watch.watch([PID])
    version_1(node, 4)
    node.sample(MIB, cgroups="9:cpu,cpuacct:/\n4:memory:/\n0::/\n")  # as the kernel lists one that is exiting
    node.end_process()
    node.watch.sample()
    evidence = node.evidence()
    assert (evidence.kills, evidence.counted) == (1, "in its cgroup")


def test_removed_cgroup_gives_no_evidence(node: Node) -> None:
    node.write_process(MIB, version_2(node, 3))
    node.watch.watch([PID])
    for file in (node.root / "sys/fs/cgroup/system.slice").rglob("memory.events"):
        file.unlink()
    node.write_node_kills(4)
    assert node.evidence().kills == 0


def test_first_sample_and_last_samples_are_kept(node: Node) -> None:
    node.write_process(7 * MIB)
    node.watch.watch([PID])
    node.sample(*[i * MIB for i in range(10, 30 + NUM_SAMPLES)])
    sizes = node.evidence().sizes
    assert [size.size_bytes // MIB for size in sizes] == [7, *range(30, 30 + NUM_SAMPLES)]


def test_last_sample_is_kept_after_the_process_has_gone(node: Node) -> None:
    node.write_process(MIB)
    node.watch.watch([PID])
    node.sample(2 * MIB)
    node.end_process()
    node.write("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 1 kB\n")
    node.watch.sample()
    assert node.evidence() == MemoryEvidence((Size(100.0, MIB), Size(100.0, 2 * MIB)), NODE)


def test_only_the_given_processes_are_watched(node: Node) -> None:
    node.write_process(MIB)
    assert node.watch.evidence(PID) is None
    node.watch.watch([PID, 1234])
    assert node.watch.evidence(1234) is None, "there is no such process"
    node.sample(2 * MIB)
    node.watch.watch([PID])
    assert len(node.evidence().sizes) == 3, "earlier samples were forgotten"
    node.end_process()
    node.watch.sample()
    node.write_process(5 * MIB)
    node.watch.watch([PID])
    assert node.evidence().sizes == (Size(101.0, 5 * MIB),), "a new process with the same id was mistaken for it"
    node.watch.watch([])
    assert node.watch.evidence(PID) is None


@pytest.mark.parametrize(
    "text", ["", "\n", "abc\n", ":::\n", "0::\n", "a - b\n", "1 2 3 4 5 - cgroup2\n", "oom_kill x\n"]
)
def test_files_of_an_unknown_form_are_ignored(node: Node, text: str) -> None:
    cgroups = version_2(node, 1)
    node.write_process(MIB, cgroups)
    for file in [path for path in node.root.rglob("*") if path.is_file()]:
        kept = file.read_text()
        file.write_text(text)
        watch = MemoryWatch(MemoryFiles(node.root))
        watch.watch([PID])
        evidence = watch.evidence(PID)
        assert evidence is None or evidence.kills == 0
        file.write_text(kept)


def test_system_without_these_files_gives_no_evidence(tmp_path: Path) -> None:
    watch = MemoryWatch(MemoryFiles(tmp_path))
    watch.watch([os.getpid()])
    assert watch.evidence(os.getpid()) is None


# -------------------------------------------------------------------------------------------- a real process


def test_agent_samples_a_real_process_by_itself() -> None:
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
    assert evidence.sizes[0].size_bytes < 100 * MIB, "the first sample was late"
    assert evidence.sizes[-1].size_bytes > 200 * MIB
    assert evidence.pool is not None and evidence.pool.used_bytes > 200 * MIB


def _last_size(agent: NodeAgent, pid: int) -> int:
    evidence = agent.memory(pid)
    return 0 if evidence is None else evidence.sizes[-1].size_bytes

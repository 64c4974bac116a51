"""``raysgd doctor``: what it finds on this machine, and what it makes of the answers of nodes."""

from __future__ import annotations

import json
import platform
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cli.doctor import checks, links, nodes, probe
from raysgd.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["doctor", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def states(found: list[dict[str, Any]], check: str) -> list[str]:
    return [one["state"] for one in found if one["check"] == check]


def test_doctor_finds_nothing_wrong_here(run: Run, tmp_path: Path) -> None:
    _, out, _ = run("--storage-path", "runs", "--json")
    found = json.loads(out)
    for check in ("versions", "ports", "cluster", "GPUs"):
        assert "wrong" not in states(found, check)
    assert states(found, "storage")[0] == "ok"
    assert list((tmp_path / "runs").iterdir()) == [], "the doctor left a file"
    assert "none runs here" in out
    table = run("--storage-path", "runs")[1]
    assert table.split()[:2] == ["check", "found"] and "can be written" in table
    limits = {one["check"] for one in found}
    assert {"shared memory", "open files", "processes", "locked memory"} <= limits


def test_storage_that_cannot_be_written_is_wrong(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, out, _ = run("--storage-path", "file/runs")
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("storage")]
    assert "wrong" in line and "cannot be written" in line and "give --storage-path a folder" in line
    assert out.splitlines()[2] == line, "problems come first"


def test_cluster_that_does_not_answer_is_wrong(run: Run) -> None:
    status, out, _ = run("--storage-path", "runs", "--address", "127.0.0.1:1", "--json")
    assert status == 1 and states(json.loads(out), "cluster") == ["wrong"]


def test_cluster_is_needed_to_examine_its_nodes(run: Run) -> None:
    status, out, err = run("--cluster")
    assert (status, out) == (2, "") and "there is no Ray cluster to ask; give --address HOST:PORT" in err


def test_little_disk_and_a_folder_in_memory_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = checks.shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(checks, "_MIN_FREE_BYTES", free + (1 << 40))
    assert [one.state for one in checks.check_storage(str(tmp_path))] == ["ok", "wrong"]
    if checks.file_system("/dev/shm") == "tmpfs":
        assert "is in memory (tmpfs)" in [one.what for one in checks.check_storage("/dev/shm")][1]


def test_port_that_nobody_listens_at_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert checks.try_port("127.0.0.1", port) is None
    assert checks.try_port("127.0.0.1", port) is not None


def test_limits_below_what_ray_needs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda limit: (1024, 1 << 20))
    found = {one.check: one for one in checks.check_limits()}
    assert found["open files"].state == found["processes"].state == "warning"
    assert found["open files"].advice.startswith("run `ulimit -n 65536`")
    assert found["processes"].advice.startswith("run `ulimit -u 65536`")


NOW = 1_700_000_000.0
PATCHED = ".".join([*platform.python_version_tuple()[:2], "99"])


def judge(gpus: int = 0, versions: dict[str, str] | None = None, ahead_s: float = 0, **changes: Any) -> list[Any]:
    there = checks.installed_versions() if versions is None else versions
    node = nodes.Node(0, "node a", gpus, None, versions=there)
    answer = {"findings": [], "gpus": 0, "sees_file": True, **changes}
    asked = (NOW - 0.1, NOW + 0.1, NOW + ahead_s)
    return [(one.state, one.what) for one in nodes.judge_node(answer, node, asked, "/runs")]


def test_node_that_is_right_has_no_findings() -> None:
    assert judge() == judge(findings=[("GPUs", "ok", "no GPU", "")]) == []


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({"ahead_s": 3600}, "warning", "its clock is 3599.9 s ahead"),
        ({"ahead_s": -3600}, "warning", "its clock is 3599.9 s behind"),
        ({"sees_file": False}, "wrong", "it does not see the files in /runs"),
        ({"versions": {**checks.installed_versions(), "ray": "2.9.0"}}, "wrong", "ray is 2.9.0 there and "),
        ({"versions": {**checks.installed_versions(), "python": "3.9.1"}}, "wrong", "python is 3.9.1 there and "),
        (
            {"versions": {**checks.installed_versions(), "python": PATCHED}},
            "warning",
            f"python is {PATCHED} there and ",
        ),
        ({"versions": {**checks.installed_versions(), "numpy": "1.0"}}, "warning", "numpy is 1.0 there and "),
        ({"findings": [("open files", "warning", "12 files", "")]}, "warning", "12 files"),
    ],
)
def test_node_that_differs_is_found(changes: dict[str, Any], state: str, text: str) -> None:
    ((found, what),) = judge(**changes)
    assert found == state and what.startswith(text)


def test_node_without_raysgd_is_wrong() -> None:
    there = {name: version for name, version in checks.installed_versions().items() if name != "raysgd"}
    ((state, what),) = judge(versions=there)
    assert state == "wrong" and what.startswith("raysgd is missing there")


def test_gpus_that_ray_counts_and_the_node_has_not_are_found() -> None:
    assert judge(gpus=8) == [("wrong", "Ray counts 8 GPUs, and nvidia-smi 0")]


# -- clocks and pairs --------------------------------------------------------------------------------------------------


@given(st.floats(-1e4, 1e4), st.floats(0, 10), st.floats(0, 1))
def test_clock_difference_is_never_larger_than_it_is(ahead_s: float, took_s: float, part: float) -> None:
    """The other clock is read at some time between question and answer: only what that cannot explain counts."""
    there_s = NOW + part * took_s + ahead_s
    found_s = links.clock_difference(NOW, NOW + took_s, there_s)
    assert abs(found_s) <= abs(ahead_s) + 1e-5 and abs(found_s - ahead_s) <= took_s + 1e-5


@given(st.integers(0, 40))
def test_every_pair_meets_once_and_no_node_twice_in_a_round(count: int) -> None:
    rounds = links.pair_rounds(count)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in rounds)
    assert len(rounds) == max(0, count - 1 + count % 2), "as few rounds as possible"


def of_pairs(count: int, seconds: Callable[[int, int], float]) -> dict[links.Pair, float]:
    return {(a, b): seconds(a, b) for a in range(count) for b in range(a + 1, count)}


@given(st.integers(2, 12), st.data())
def test_network_whose_pairs_are_about_as_fast_has_no_slow_ones(count: int, data: st.DataObject) -> None:
    seconds = of_pairs(count, lambda a, b: data.draw(st.floats(1.0, 2.9)))
    assert links.find_slow(seconds) == (set(), set())


@given(st.integers(3, 12), st.data())
def test_slow_nodes_are_distinguished_from_slow_pairs(count: int, data: st.DataObject) -> None:
    """Fewer than half of the nodes are slow, of three one; and a pair of others, each of which has a fast one."""
    num_slow = data.draw(st.integers(0, (count - 1) // 2))
    slow = set(data.draw(st.permutations(range(count)))[:num_slow])
    others = [node for node in range(count) if node not in slow]
    pair = (others[0], others[1]) if len(others) > 3 and data.draw(st.booleans()) else None
    seconds = of_pairs(count, lambda a, b: 5.0 if {a, b} & slow or (a, b) == pair else data.draw(st.floats(1.0, 1.5)))
    assert links.find_slow(seconds) == (slow, {pair} if pair else set())


@given(st.integers(3, 12), st.data())
def test_node_that_no_other_reaches_is_named_and_not_its_pairs(count: int, data: st.DataObject) -> None:
    tried = list(of_pairs(count, lambda a, b: 0.0))
    cut = data.draw(st.integers(0, count - 1))
    failed = {pair for pair in tried if cut in pair}
    assert links.find_cut(failed, tried) == ({cut}, set())
    single = data.draw(st.sampled_from(tried))
    assert links.find_cut({single}, tried) == (set(), {single})


def test_many_pairs_are_a_few_rows() -> None:
    names = {node: f"node {node}" for node in range(16)}
    seconds = of_pairs(16, lambda a, b: 0.1 if a // 8 == b // 8 else 2.0)
    rows = list(nodes.describe_links(seconds, set(), names))
    assert len(rows) == 8 and {row.state for row in rows} == {"warning"}
    assert rows[0].what == "node 0 and node 8: 2.0 s; 64 MiB both ways usually takes 0.10 s"
    assert rows[-1].what == "and 57 more"
    stuck = list(nodes.describe_links({}, {(0, 1)}, names))
    assert [(row.state, row.what) for row in stuck] == [
        ("wrong", "node 0 and node 1: nothing came through in the time")
    ]


def swap_both(size: int, limit_s: float, size_there: int | None = None) -> list[tuple[int, float]]:
    first, second = socket.socketpair()
    found: list[tuple[int, float]] = []
    size_there = size if size_there is None else size_there
    other = threading.Thread(target=lambda: found.append(probe.swap(second, size_there, limit_s)))
    with first, second:
        other.start()
        here = probe.swap(first, size, limit_s)
        other.join()
    return [here, *found]


def test_exchange_counts_what_comes_and_ends_in_time() -> None:
    assert [received for received, _ in swap_both(3 << 20, 10)] == [3 << 20] * 2
    (received, took_s), _ = swap_both(64 << 20, 0.3, size_there=0)  # the other side sends nothing, and takes nothing
    assert received == 0 and took_s < 5


def test_connection_of_a_stranger_is_closed_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(probe, "CONNECT_S", 0.5)
    first, second = probe.Probe(b"t" * 16), probe.Probe(b"t" * 16)
    address = first.open()["address"]
    strangers = [socket.create_connection(address) for _ in range(20)]  # which say nothing
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 20):
        with socket.create_connection(address) as link:
            link.sendall(greeting)
            assert link.recv(1) == b""
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(first.exchange(7, None, 1 << 20, 5)))
    other.start()
    assert second.exchange(7, address, 1 << 20, 5)[0] == 1 << 20
    other.join()
    assert found[0][0] == 1 << 20
    for link in strangers:
        link.close()

"""``raysgd doctor --cluster`` on a cluster of three nodes, and ``raysgd logs`` when one of them is lost. In this order."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raysgd.cli.main import main
from raysgd.cli.runs import logs
from raysgd.workers.placement.cluster import check_node_here
from support.poll import until
from support.run_folders import RunFolder
from support.runs import PATIENCE_S

NODES = (1, 1, 1)
Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, list[dict[str, Any]]]:
        status = main(["doctor", "--cluster", *words, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return call


def of_nodes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in found if one["check"].startswith("node ")]


def test_each_node_and_the_network_between_them_are_examined(run: Run, tmp_path: Path) -> None:
    begin = time.monotonic()
    status, found = run("--storage-path", "runs")
    assert time.monotonic() - begin < 30
    assert (status, [one["state"] for one in of_nodes(found)]) == (0, ["ok"] * 3), found
    assert len({one["check"] for one in of_nodes(found)}) == 3, "nodes of one machine have names of their own"
    by_check = {one["check"]: one for one in found}
    assert by_check["cluster"]["what"].endswith("has 3 nodes and 3 CPUs")
    assert by_check["ports"]["what"] == "3 nodes reach each other, both ways"
    measured = [one for one in found if "64 MiB both ways usually takes" in one["what"]]
    assert measured, "a node that shares two cores with the others may be slow"
    assert by_check["all-reduce"]["what"].startswith("64 MiB of 3 nodes, by gloo: ")
    assert list((tmp_path / "runs").iterdir()) == [], "the doctor left a file"


def test_storage_that_nodes_cannot_write_is_named_for_each(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, found = run("--storage-path", "file/runs")
    assert status == 1
    wrong = [one for one in of_nodes(found) if one["state"] == "wrong"]
    assert len([one for one in wrong if "cannot be written" in one["what"]]) == 3
    assert found[: len(wrong)] == wrong, "problems come first"


def test_machine_that_is_no_node_is_refused_soon(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_node_here(cluster.address)
    for name in ("find_node_ids", "_find_address_from_flag"):  # no process of a node runs here
        monkeypatch.setattr(f"ray._private.services.{name}", lambda *_: [])
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=f"no node of the cluster at {cluster.address} runs on this machine"):
        check_node_here(cluster.address)
    assert time.monotonic() - begin < 10


def test_node_that_does_not_answer_is_named_and_the_others_are_examined(run: Run, cluster: Any) -> None:
    lost = max(cluster.worker_nodes, key=lambda node: node.node_id)
    raylet = lost.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        status, found = run("--storage-path", "runs")
        assert time.monotonic() - begin < 30
    finally:
        os.kill(raylet, signal.SIGCONT)
    (wrong,) = [one for one in found if one["state"] == "wrong"]
    assert status == 1 and lost.node_id[:6] in wrong["check"]
    assert "does not answer" in wrong["what"] or "runs no task" in wrong["what"]
    assert sorted(one["state"] for one in of_nodes(found)[1:]) == ["ok", "ok"]
    assert "2 nodes reach each other, both ways" in [one["what"] for one in found]


def test_logs_of_a_lost_node_say_so_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lost = max(cluster.worker_nodes, key=lambda node: node.node_id)
    cluster.remove_node(lost, allow_graceful=False)
    alive = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != lost.node_id and node["Alive"])
    assert until(lambda: lost.node_id not in [node["NodeID"] for node in ray.nodes() if node["Alive"]], PATIENCE_S)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr(logs.socket, "gethostname", lambda: "elsewhere")
    folder = RunFolder(tmp_path / "runs" / "far" / "run_001")
    for rank, (node, node_id) in enumerate([("left (10.0.0.1)", alive), *[("lost (10.0.0.2)", lost.node_id)] * 2]):
        (tmp_path / f"{rank}.out").write_text(f"of {rank}\n")
        (tmp_path / f"{rank}.err").touch()
        folder.event("worker_up", rank=rank, node=node, node_id=node_id, pid=rank)
        output = [[str(tmp_path / f"{rank}.out"), 0], [str(tmp_path / f"{rank}.err"), 0]]
        folder.event("entered", rank=rank, attempt=1, output=output)
    status = main(["logs", str(folder.path)])
    shown = capsys.readouterr()
    # Ray may report the raylet's death in this process at the same time.
    assert (status, [line for line in shown.out.splitlines() if line.startswith("(rank ")]) == (1, ["(rank 0) of 0"])
    assert shown.err.count("\n") == shown.err.count("lost (10.0.0.2) is lost: it is not in the cluster any more") == 1

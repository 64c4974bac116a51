"""The commands on runs that are live in a cluster. One detached Trainer serves all tests but the last ones, in their order."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.cli.main import main
from raysgd.runs import output
from support import command
from support.poll import until
from support.runs import PATIENCE_S

pytestmark = pytest.mark.shared_trainer

NAME = "of_commands"
#: Reports and saves until its folder has the file ``go``; prints a line of each rank, and what a next attempt finds.
TRAIN = """
import os, sys, time
import raysgd

state = raysgd.load_checkpoint()
step = 0 if state is None else state["step"]
print("rank", raysgd.world_rank(), "starts at", "the begin" if state is None else "a checkpoint", flush=True)
print("on stderr", file=sys.stderr, flush=True)
while not raysgd.broadcast(os.path.exists("go")):
    step += 1
    raysgd.report(step=step, loss=1 / step)
    raysgd.save_checkpoint({"step": step})
    time.sleep(0.02)
print("ends after", sys.argv[1:], flush=True)
"""


#: These are run in processes of their own: some commands of each kind, and those that start Ray or are interrupted.
OWN_PROCESS = ("restore", "ls", "pause")


class Commands:
    """Runs ``raysgd`` in a folder, on the cluster of the tests."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.folder = folder
        self._cluster = cluster

    def start(self, *words: str) -> subprocess.Popen[str]:
        return command.start(self._cluster, self.folder, *words)

    def __call__(self, *words: str, status: int = 0) -> str:
        """Run a command to its end; return its output."""
        if words[0] in OWN_PROCESS:
            done = command.run(self._cluster, self.folder, *words)
            found, out, err = done.returncode, done.stdout, done.stderr
        else:
            found, out, err = self._run_here(words)
        assert found == status, f"{words}: {found}\n{out}\n{err}"
        return out if status == 0 else out + err

    def logs(self, text: str, *words: str) -> str:
        """Wait until the logs of a live run have a text; return them. Its events are on storage within a second."""
        return until(lambda: out if text in (out := self._run_here(["logs", *words])[1]) else "", PATIENCE_S, 0.2)

    def _run_here(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in this process, which saves the import of Ray and the connection to the cluster."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            patch.setenv("RAY_ADDRESS", str(self._cluster["gcs_address"]))
            return main(words), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def commands(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(ray_cluster, tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def detached(commands: Commands) -> Iterator[raysgd.Trainer]:
    """A detached Trainer whose run was started by the command, which has been killed since."""
    (commands.folder / "train.py").write_text(TRAIN)
    flags = ["--num-workers", "2", "--backend", "none", "--storage-path", "runs"]
    flags += ["--num-to-keep", "2", "--detached", "--name", NAME, "--progress", "lines"]
    process = commands.start("run", *flags, "train.py", "--lr", "0.1")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step=1" in line:
                break
        assert process.poll() is None, process.communicate()
    finally:
        process.kill()
        process.communicate()
    trainer = raysgd.Trainer.attach(NAME)
    yield trainer
    trainer.shutdown()


def test_ls_and_status_show_a_live_run(commands: Commands, detached: raysgd.Trainer) -> None:
    (found,) = [one for one in json.loads(commands("ls", "--live", "--json")) if one["alias"] == NAME]
    address = str(commands._cluster["gcs_address"])
    alone = command.run(None, commands.folder, "ls", "--live", "--json", "--address", address)
    assert [one["alias"] for one in json.loads(alone.stdout)] == [NAME], alone.stderr
    assert found["state"] == "running" and found["name"] == f"{NAME}/run_001" and found["world_size"] == 2
    assert found["run_dir"] == str(commands.folder / "runs" / NAME / "run_001")
    shown = json.loads(
        commands("status", NAME, "--json")
    )  # found by the cluster: the default storage path has no such run
    assert shown["state"] == "running" and shown["run_dir"] == found["run_dir"]
    assert shown["command_line"][0] == "run" and shown["command_line"][-3:] == ["train.py", "--lr", "0.1"]


def test_logs_of_a_live_run(commands: Commands, detached: raysgd.Trainer) -> None:
    for rank in range(2):
        commands.logs(f"(rank {rank}) rank {rank} starts at the begin\n", NAME)
    lines = commands.logs("(rank 1, stderr)", NAME).splitlines()
    assert lines.count("(rank 1, stderr) on stderr") == 1
    assert "rank 1" not in commands("logs", NAME, "--rank", "0")


def test_attach_shows_results_until_ctrl_c(commands: Commands, detached: raysgd.Trainer) -> None:
    process = commands.start("attach", NAME, "--json", "--from-iteration", "3")
    try:
        assert process.stdout is not None
        first, second = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert [(one["training_iteration"], one["step"]) for one in (first, second)] == [(3, 3), (4, 4)]
    assert process.returncode == 130
    assert "left the run, which continues" in err and "Traceback" not in err
    assert detached.status().state == "running"


def test_name_that_is_not_a_trainer_is_refused_with_the_nearest(commands: Commands, detached: raysgd.Trainer) -> None:
    text = commands("pause", "of_command", status=2)
    assert "there is no detached Trainer 'of_command' (did you mean 'of_commands'?)" in text
    assert "Traceback" not in text


def test_run_is_paused_and_resumed(commands: Commands, detached: raysgd.Trainer) -> None:
    assert json.loads(commands("pause", NAME, "--json"))["state"] == "paused"
    assert "paused" in commands("ls", "runs")
    assert f"raysgd attach {NAME}" in commands("status", NAME)
    assert f"{NAME}: paused before; run_001 is paused" in commands("pause", NAME)
    assert f"{NAME}: resumed; run_001 is" in commands("resume", NAME)
    assert f"{NAME}: not resumed, because it was not paused; run_001 is" in commands("resume", NAME)
    assert until(lambda: detached.status().state == "running", PATIENCE_S)
    assert "starts at a checkpoint" in commands.logs("starts", NAME, "--rank", "1", "--attempt", "2")


def test_attach_shows_lines_to_the_end_and_logs_follow(commands: Commands, detached: raysgd.Trainer) -> None:
    attached, logs = commands.start("attach", NAME), commands.start("logs", NAME, "-f", "--stream", "stdout")
    try:
        assert attached.stdout is not None and logs.stdout is not None
        seen = [attached.stdout.readline(), logs.stdout.readline()]
        (commands.folder / "go").touch()
        out = seen[0] + attached.communicate(timeout=PATIENCE_S)[0]
        lines = seen[1] + logs.communicate(timeout=PATIENCE_S)[0]
    finally:
        attached.kill()
        logs.kill()
    assert (attached.returncode, logs.returncode) == (0, 0)
    assert "step=" in out and "finished after" in out
    assert lines.count("ends after ['--lr', '0.1']") == 2
    assert json.loads(commands("status", NAME, "--json"))["state"] == "done"


def test_finished_run_has_checkpoints_that_are_whole(commands: Commands, detached: raysgd.Trainer) -> None:
    found = json.loads(commands("ckpt", "verify", f"runs/{NAME}", "--json"))
    assert len(found["whole"]) == 2 and found["damaged"] == {}


def test_run_is_restored_by_its_command_line(commands: Commands, detached: raysgd.Trainer) -> None:
    """From another folder, from its newest checkpoint, and with other flags; and the restored run, again."""
    storage = commands.folder / "runs"
    before = json.loads(commands("status", f"runs/{NAME}", "--json"))
    elsewhere = Commands(commands._cluster, commands.folder.parent)
    changes = ["--detached", "false", "--num-workers", "1", "--name", "again", "--progress", "off"]
    out = elsewhere("restore", str(storage / NAME), *changes)
    assert "rank 0 starts at a checkpoint" in out and "ends after ['--lr', '0.1']" in out and "(rank 1" not in out
    restored = json.loads(commands("status", f"runs/{NAME}/run_002", "--json"))
    assert restored["state"] == "done" and restored["world_size"] == 1
    assert restored["iteration"] == before["iteration"]
    words = restored["command_line"]
    assert words[-3:] == ["train.py", "--lr", "0.1"] and words.count("--num-workers") == 1
    assert words[words.index("--num-workers") + 1] == "1"


def test_stop_ends_a_run_and_its_trainer(commands: Commands, detached: raysgd.Trainer) -> None:
    """A second run of the same Trainer: its workers, and their files, are those of the first one.

    Its folder is next to that of the first one, though this process has another working directory.
    """
    os.remove(commands.folder / "go")
    folder = str(commands.folder)

    def train(config: dict[str, Any]) -> None:
        import time

        print("the second run", flush=True)
        while not raysgd.should_stop():
            raysgd.report(step=1)
            time.sleep(0.02)

    from support.runs import quiet

    stream = detached.run_generator(train, callbacks=quiet())
    next(stream)
    assert "the second run" not in commands("logs", f"runs/{NAME}/run_001"), "output of another run"
    lines = commands.logs("(rank 1) the", f"runs/{NAME}/run_003", "--stream", "stdout").splitlines()
    assert lines == ["(rank 0) the second run", "(rank 1) the second run"]
    assert f"{NAME}: ended; run_003 is cancelled" in commands("stop", NAME, "--shutdown")
    assert "there is no detached Trainer" in commands("stop", NAME, status=2)
    assert folder in commands("status", f"runs/{NAME}/run_003")


def test_doctor_examines_the_nodes_of_the_cluster(commands: Commands) -> None:
    _, out, _ = commands._run_here(["doctor", "--cluster", "--storage-path", "runs", "--json"])
    found = json.loads(out)
    assert [one["state"] for one in found if one["check"] == "cluster"] == ["ok"]
    assert [one["state"] for one in found if one["check"].startswith("node ")] != []
    assert not [one for one in found if one["check"].startswith("node ") and one["state"] == "wrong"]
    assert not list((commands.folder / "runs").glob(".raysgd-doctor*"))


def test_output_on_another_node_is_read_through_the_cluster(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine takes another name, so the command takes the files for those of another node."""
    run = str(commands.folder / "runs" / NAME / "run_001")
    here = commands("logs", run)
    monkeypatch.setattr(output.socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(output, "_CHUNK_BYTES", 10)  # it is read in many chunks
    assert commands("logs", run) == here

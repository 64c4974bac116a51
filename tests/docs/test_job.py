"""``examples/job_script.py`` is submitted to a cluster as its docstring says, with ``ray job submit``.

The cluster is one of its own, with the dashboard, which takes the jobs; it is started as a child and ended by its pid.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysgd
from support.poll import until
from support.ports import free_ports
from support.project import ROOT

BIN = Path(sys.executable).parent
# A local ``ray.init`` leaves a token in the home folder, and ``ray start`` asks for it where it finds one.
ENVIRONMENT = {
    **os.environ, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "150"
}  # fmt: skip


@pytest.fixture(scope="module")
def jobs_address() -> Iterator[str]:
    """A cluster of one node, by the address that takes jobs."""
    names = ("--port", "--dashboard-port", "--ray-client-server-port", "--dashboard-agent-listen-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    # Asked for by name, a dashboard that does not start ends `ray start`.
    options = [*(f"{option}={port}" for option, port in ports.items()), "--num-cpus=4", "--include-dashboard=true"]
    options.append("--disable-usage-stats")
    environment = {**ENVIRONMENT, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    # Not below tmp_path: the path of a socket has at most 107 bytes, of which Ray needs 66. In the tenth folder of
    # pytest-xdist the socket of MetricsHead had 108, and the dashboard ended with "Received EOF from pipe".
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "ray_start.log"
        with open(log, "wb") as output:
            command = [BIN / "ray", "start", "--head", "--block", f"--temp-dir={folder}", *options]
            head = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        try:
            has_started = until(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None, 180)
            logs = [log, *folder.glob("session_2*/logs/dashboard*.log")]  # the dashboard's parts have logs of their own
            assert has_started and head.poll() is None, "\n".join(path.read_text()[-2000:] for path in logs)
            yield f"http://127.0.0.1:{ports['--dashboard-port']}"
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait(30)


def _submit(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Submit the script. The dashboard and the node's job agent are ready some time after ``ray start`` says so."""
    command = [str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", "examples", "--", "python"]
    done: list[subprocess.CompletedProcess[str]] = []

    def was_taken() -> bool:
        done[:] = [
            subprocess.run(
                [*command, "job_script.py", *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
            )
        ]
        return not any(text in done[0].stderr for text in ("No available agent", "Failed to connect to Ray"))

    until(was_taken, 120)
    return done[0]


@pytest.mark.timeout(360)
def test_job_script_runs_as_a_job(jobs_address: str, tmp_path: Path) -> None:
    done = _submit(jobs_address, "--epochs", "2", "--storage", str(tmp_path))
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (run_dir,) = re.findall(r"run directory: (\S+)", done.stdout)
    assert run_dir.startswith(str(tmp_path))
    assert raysgd.load_run(run_dir).metrics["epoch"].tolist() == [0, 1]


@pytest.mark.timeout(360)
def test_a_job_whose_train_func_fails_has_failed(jobs_address: str) -> None:
    done = _submit(jobs_address, "--epochs", "2", "--resume", "/nowhere")
    assert done.returncode != 0
    assert "there is no checkpoint at /nowhere" in done.stdout + done.stderr

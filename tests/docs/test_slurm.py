"""``examples/cluster/slurm.sbatch`` runs as Slurm runs it, with stand-ins for `srun` and `scontrol`.

The two Ray nodes of the job are processes of this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import raysgd
from support.poll import until
from support.project import ROOT

SCRIPT = ROOT / "examples" / "cluster" / "slurm.sbatch"
EPOCHS = 25  # each of them takes a tenth of a second or more, so that the signal arrives within the training

#: Runs the tasks as processes of this machine, and passes SIGTERM on to them, as Slurm's own does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in
    --ntasks=*) tasks=${1#*=} ;;
    --nodes=1 | --exclude=node-a | --cpus-per-task=2) ;;
    *) echo "srun: unexpected option $1" >&2; exit 2 ;;
    esac
    shift
done
trap 'kill $(jobs -p)' TERM
for ((task = 0; task < tasks; task++)); do "$@" & done
wait
wait
"""
SCONTROL = '#!/bin/bash\necho "$@" >>"$SCONTROL_LOG"\n'


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


@pytest.fixture
def job_id() -> Iterator[int]:
    """A job whose ports are free, see the script."""
    (found, *_) = [
        number
        for number in range(os.getpid(), os.getpid() + 100)
        if all(_is_free(20_000 + 2 * (number % 6000) + more) for more in (0, 1))
    ]
    yield found
    shutil.rmtree(f"/tmp/ray-{found}", ignore_errors=True)


def _start(job_id: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start the batch script as `sbatch slurm.sbatch digits.yaml ...` does on the job's first node."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "127.0.0.1:1",  # another cluster: not that of the job
        "SCONTROL_LOG": str(folder / "scontrol.log"),
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "node-a",
    }
    words = ["digits.yaml", "--max_epochs", str(EPOCHS), "--checkpoint.save_dir", str(folder / "runs")]
    with open(folder / "slurm.out", "ab") as output:  # as with --open-mode=append
        return subprocess.Popen(
            ["bash", str(SCRIPT), *words],
            cwd=ROOT / "examples" / "declarative",
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


def _processes_of_ray(job_id: int) -> list[str]:
    """Return the command lines of the job's Ray processes."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if f"/tmp/ray-{job_id}" in line]


def _num_raylets(job_id: int) -> int:
    return len([line for line in _processes_of_ray(job_id) if "/raylet/raylet " in line])


@pytest.mark.timeout(400)
def test_job_that_runs_out_of_time_is_queued_again_and_continues(job_id: int, tmp_path: Path) -> None:
    requeued, output = tmp_path / "scontrol.log", tmp_path / "slurm.out"
    job = _start(job_id, tmp_path)
    try:
        assert until(lambda: _num_raylets(job_id) == 2 or job.poll() is not None, 100, interval_s=0.5)
        has_saved = until(lambda: (tmp_path / "runs" / "last").exists() or job.poll() is not None, 100)
        assert has_saved and job.poll() is None, output.read_text()[-6000:]
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 143, output.read_text()[-6000:]
        assert requeued.read_text() == f"requeue {job_id}\n"
        assert until(lambda: not _processes_of_ray(job_id), 60, interval_s=0.5)

        job = _start(job_id, tmp_path)
        assert job.wait(150) == 0, output.read_text()[-6000:]
    finally:
        job.terminate()
        job.wait(60)
    assert requeued.read_text() == f"requeue {job_id}\n"
    assert until(lambda: not _processes_of_ray(job_id), 60, interval_s=0.5)
    first, second = (raysgd.load_run(folder) for folder in sorted((tmp_path / "runs").glob("run_*")))
    steps = second.metrics["step"].dropna()
    assert 12 < steps.iloc[0] <= first.metrics["step"].max() + 1, "the second job started from the beginning"
    assert steps.iloc[-1] == 12 * EPOCHS

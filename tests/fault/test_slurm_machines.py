"""``examples/cluster/slurm.sbatch`` on two machines with stand-ins for `srun` and `scontrol`: queued again, and done."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import raysgd
from support.machines import Machines
from support.pace import slowness
from support.poll import until
from support.project import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

EPOCHS = 25
#: Asks the test to run the task on the other machine, in this environment, and passes SIGTERM on, as Slurm's own does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export -p >"$SLURM_TASKS/environment"
printf "%q " "$@" >"$SLURM_TASKS/new" && mv "$SLURM_TASKS/new" "$SLURM_TASKS/command"
trap 'touch "$SLURM_TASKS/terminated"' TERM
until [[ -e $SLURM_TASKS/ended ]]; do sleep 0.2; done
"""
SCONTROL = '#!/bin/bash\necho "$@" >>"$SLURM_TASKS/../scontrol.log"\n'


class Job:
    """One start of the job: the batch script on machine 0, and its task on machine 1."""

    def __init__(self, machines: Machines, shared: Path, number: int) -> None:
        self._machines = machines
        self._tasks = shared / f"tasks-{number}"
        self._tasks.mkdir()
        self.output = shared / f"slurm-{number}.out"
        commands = shared / "bin"
        commands.mkdir(exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        environment = {
            "PATH": f"{commands}:{sys.prefix}/bin:/usr/bin:/bin",
            "HEAD_IP": machines.address(0),
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURMD_NODENAME": "machine-0",
            "SLURM_TASKS": str(self._tasks),
        }
        script, folder = ROOT / "examples" / "cluster" / "slurm.sbatch", ROOT / "examples" / "declarative"
        words = f"digits.yaml --max_epochs {EPOCHS} --checkpoint.save_dir {shared}/runs"
        command = ["bash", "-c", f"cd {folder} && exec bash {script} {words}"]
        self.script = machines.start(0, *command, output=self.output, environment=environment)
        assert until((self._tasks / "command").exists, 60 * slowness(), 0.2), self.output.read_text()
        task = f". {self._tasks}/environment; cd /tmp; exec {(self._tasks / 'command').read_text()}"
        self._task = machines.start(1, "bash", "-c", task, output=self._tasks / "output")

    def wait(self) -> int:
        """Wait for the end of the script, and end its task as Slurm does; return the script's status."""
        assert until((self._tasks / "terminated").exists, 180 * slowness(), 0.2), self.output.read_text()[-6000:]
        self._machines.signal(1, "ray start", signal.SIGTERM)
        self._task.wait(60 * slowness())
        (self._tasks / "ended").touch()
        return self.script.wait(60 * slowness())


def test_job_on_two_machines_is_queued_again_and_continues(machines_of_module: Machines) -> None:
    machines = machines_of_module
    shared = machines.folder / "slurm"
    shared.mkdir()
    for machine in (0, 1):
        machines.boot(machine)
    job = Job(machines, shared, 1)
    assert until((shared / "runs" / "last").exists, 120 * slowness(), 0.1), job.output.read_text()[-6000:]
    machines.signal(0, "slurm.sbatch", signal.SIGUSR1)
    assert job.wait() == 143, job.output.read_text()[-6000:]
    assert (shared / "scontrol.log").read_text() == "requeue 7\n"
    for machine in (0, 1):
        assert "raylet" not in machines.run(machine, "ps", "ax", "-o", "args"), "Ray still runs"
    again = Job(machines, shared, 2)
    assert again.wait() == 0, again.output.read_text()[-6000:]
    assert (shared / "scontrol.log").read_text() == "requeue 7\n"
    first, second = (raysgd.load_run(folder) for folder in sorted((shared / "runs").glob("run_*")))
    steps = second.metrics["step"].dropna()
    assert 12 < steps.iloc[0] <= first.metrics["step"].max() + 1, "the second job started from the beginning"
    assert steps.iloc[-1] == 12 * EPOCHS

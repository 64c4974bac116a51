"""Which Ray cluster a Trainer uses, and what happens to it when the driver leaves that cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ray

from support.project import ROOT

#: What both programs begin with.
HEAD = """
import os
import time

import ray

import raysgd
from raysgd.callbacks import ProgressCallback
from raysgd.errors import TrainerClosedError, UsageError, WorkerError

quiet = [ProgressCallback(mode="off")]


def settings(**more):
    return {"backend": "none", "run_config": raysgd.RunConfig(storage_path="runs", **more)}

"""

RESTART = """
ray.init(address="local", num_cpus=2, include_dashboard=False)
old, busy = raysgd.Trainer(1, **settings()), raysgd.Trainer(1, **settings())
assert old.run(os.getpid, callbacks=quiet) > 0
stream = busy.run_generator(lambda: time.sleep(600), callbacks=quiet)
while stream.run_dir is None:
    time.sleep(0.05)
ray.shutdown()
for is_connected in (False, True):
    if is_connected:
        ray.init(address="local", num_cpus=2, include_dashboard=False)
    for call in (lambda: old.run(os.getpid), old.start, lambda: old.execute(os.getpid), old.status, old.cancel):
        try:
            call()
        except TrainerClosedError as error:
            print(f"refused: {error}")
    print(repr(old).splitlines()[0], old.get_last_checkpoint())
for wait in (stream.get_returns, lambda: list(stream)):
    try:
        wait()
    except TrainerClosedError as error:
        print(f"lost: {error}")
    except WorkerError as error:  # Ray took the worker before it took the TrainerActor
        assert "could not start" in str(error) or "died" in str(error)
        print("lost: its worker")
old.shutdown()
busy.shutdown()
with raysgd.Trainer(2, **settings()) as new:
    print("new:", len(new.run(os.getpid, callbacks=quiet, returns="all")))
"""

JOIN = """
def says(config):
    print(f"value {raysgd.world_rank()} of a rank", flush=True)
    time.sleep(1.5)  # Ray collects the lines of all workers twice a second

with raysgd.Trainer(2, **settings(ray_address=os.environ.get("TO"))) as trainer:
    trainer.run(says, callbacks=quiet)
    for address in ("local", "10.0.0.9:1", os.environ["HERE"], "auto"):
        try:
            with raysgd.Trainer(2, **settings(ray_address=address)) as other:
                print("used", address)
        except UsageError as error:
            print(f"refused: {error}")
"""


def run_program(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(HEAD + text)
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_trainer_of_a_cluster_that_is_gone_says_so_and_a_new_one_works(tmp_path: Path) -> None:
    lines = run_program(tmp_path, RESTART).stdout.splitlines()
    sentence = "the Ray cluster of this Trainer is gone: ray.shutdown() was called since; make a new Trainer."
    assert lines.count(f"refused: {sentence}") == 10
    assert lines.count("Trainer: 1 x none worker (1 CPU) None") == 2
    assert lines.count(f"lost: {sentence}") + lines.count("lost: its worker") == 2
    assert lines[-1] == "new: 2"


def test_program_says_that_it_joins_a_running_cluster(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    """Without a RAY_ADDRESS, Ray joins the cluster that it finds on this machine: here it is given."""
    address = ray_cluster["gcs_address"]
    done = run_program(tmp_path, JOIN, RAY_ADDRESS=address, HERE=address)
    own = [line for line in done.stderr.splitlines() if line.startswith("[raysgd]")]
    assert own[0].startswith(f"[raysgd] joined the Ray cluster at {address} (8 CPUs on 1 node); RAY_ADDRESS=local, or ")
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("refused: ")]
    for line, other in zip(refused, ["local", "10.0.0.9:1"], strict=True):
        assert f"connected to the Ray cluster at {address}, not to RunConfig(ray_address={other!r}); call " in line
    assert [line for line in lines if line.startswith("used ")] == [f"used {address}", "used auto"]
    assert [sum(f"value {rank} of a rank" in line for line in lines) for rank in (0, 1)] == [1, 1]


def test_run_config_chooses_the_cluster(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    """The environment would have the program start a cluster."""
    address = ray_cluster["gcs_address"]
    done = run_program(tmp_path, JOIN, RAY_ADDRESS="local", TO=address, HERE=address)
    assert f"joined the Ray cluster at {address}" in done.stderr
    assert ray.is_initialized()

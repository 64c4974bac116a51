"""A driver in a process of its own, which begins a detached run and is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

#: The arguments: storage path, name, the file that training waits for, the heartbeat timeout.
_PROGRAM = """
    import os, sys, time
    import ray
    import raysgd

    def train_func(config):
        state = raysgd.load_checkpoint()
        step = 0 if state is None else state["step"] + 1
        while not raysgd.broadcast(os.path.exists(config["file"])):
            raysgd.report(step=step)
            raysgd.save_checkpoint({"step": step})
            step += 1
            time.sleep(0.02)
        return step

    storage, name, file, heartbeat_s = sys.argv[1:]
    ray.init(address="auto", log_to_driver=False)
    run = raysgd.RunConfig(name=name, storage_path=storage, detached=True)
    failure = raysgd.FailureConfig(heartbeat_timeout_s=float(heartbeat_s))
    trainer = raysgd.Trainer(2, backend="none", run_config=run, failure_config=failure)
    stream = trainer.run_generator(train_func, {"file": file})
    for _ in range(5):
        next(stream)
    print("began", flush=True)
    time.sleep(1000)
"""


def leave_detached_run(folder: Path, name: str, address: str, heartbeat_s: float) -> Path:
    """Begin a detached run of two workers in another driver, and kill that driver; return the file that training waits for."""
    script, go = folder / "program.py", folder / "go"
    script.write_text(textwrap.dedent(_PROGRAM))
    arguments = [sys.executable, str(script), str(folder / "runs"), name, str(go), str(heartbeat_s)]
    env = {**os.environ, "RAY_ADDRESS": address}
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        began = "began\n" in iter(driver.stdout.readline, "")
        driver.kill()
    assert began, "the program ended"
    return go

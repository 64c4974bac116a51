"""Train on handwritten digits while workers are killed: the accuracy is that of an undisturbed training.

    python examples/04_chaos.py [--kills 5] [--seconds 5] [--epochs 60]

Two to four workers train the network of 01_digits.py. Every few seconds a thread of this process kills a random worker with
SIGKILL. The others continue at once from the newest checkpoint, and a new process joins them a little later. Each printed line is
an event of the run.
"""

# test: tests/docs/test_chaos.py

import argparse
import importlib
import os
import random
import signal
import threading
import time

import ray
import torch
from torch import nn
from torch.utils.data import DataLoader

import raysgd

digits = importlib.import_module("01_digits")  # the file next to this one; its name is not an identifier


def train_func(config: dict) -> nn.Module:
    train_set, test_set = digits.make_data()
    model = digits.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    start = 0
    if state := raysgd.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    model = raysgd.torch.prepare_model(model)
    # The global batch is the same for two and for four workers, so the number of workers does not affect the training.
    loader = DataLoader(train_set, batch_size=48, shuffle=True)
    loader = raysgd.torch.prepare_data_loader(loader, global_batch_size=config["batch_size"])
    loader.set_epoch(start)

    for epoch in range(start, config["epochs"]):
        began = time.monotonic()
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        raysgd.report(epoch=epoch, accuracy=digits.accuracy(model, test_set))
        raysgd.save_checkpoint({"epoch": epoch, "model": model, "optimizer": optimizer})
        # Make an epoch as long as that of a larger network, so that workers die during the training.
        time.sleep(max(0.0, began + config["epoch_s"] - time.monotonic()))
    return model


class RunLog(raysgd.Callback):
    """Prints the events of the run, and collects the process ids of its workers."""

    critical = True  # an exception here ends the run instead of being a warning

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}  # by rank
        self.num_deaths = self.num_repeated = self.epochs = 0
        self.began = time.time()
        self.is_training = threading.Event()
        self._died_at: float | None = None
        self._attempt = 1

    def write(self, what: str, when: float | None = None) -> None:
        print(f"{(when or time.time()) - self.began:6.1f} s  {what}", flush=True)

    def on_event(self, event: raysgd.Event) -> None:
        data = event.data
        if event.kind == "worker_up":
            self.pids[data["rank"]] = data["pid"]
        elif event.kind == "failure":
            dead = [f"rank {rank} on pid {self.pids.pop(rank)}" for rank in data["ranks"] if rank in self.pids]
            self.write(f"death of {', '.join(dead) or 'a process that was starting'}", event.timestamp)
            self.num_deaths += 1
            self._died_at = event.timestamp
        elif event.kind == "resize" and data["new"] > data["old"]:
            self.write(f"grew from {data['old']} to {data['new']} workers", event.timestamp)
        elif event.kind == "attempt_start":
            self.pids = {rank: self.pids[rank] for rank in range(data["world_size"])}
            if self._died_at is not None:
                self._log_retry(data["iterations_before"], event.timestamp)

    def _log_retry(self, epochs: int, when: float) -> None:
        where = f"checkpoint of epoch {epochs}" if epochs else "the beginning, without a checkpoint,"
        self.write(f"{where} resumed, {self.epochs - epochs} epochs to be repeated", when)
        self.num_repeated += self.epochs - epochs

    def on_result(self, result: raysgd.Result) -> None:
        self.is_training.set()
        if result["attempt"] > self._attempt and self._died_at is not None:
            took = result["timestamp"] - self._died_at
            self.write(f"continued with {result['world_size']} workers: an epoch done {took:.1f} s after the death")
            self._died_at = None
        self._attempt = result["attempt"]
        self.epochs = max(self.epochs, result["training_iteration"])


class Killer(threading.Thread):
    """Kills random workers of the run, from the first epoch until shortly before the end."""

    def __init__(self, run_log: RunLog, kills: int, seconds: float, last_epoch: float) -> None:
        super().__init__(daemon=True)
        self._run_log = run_log
        self._kills = kills
        self._seconds = seconds
        self._last_epoch = last_epoch
        self.killed: list[int] = []

    def run(self) -> None:
        self._run_log.is_training.wait()
        while len(self.killed) < self._kills:
            time.sleep(random.uniform(0.5, 1.5) * self._seconds)
            if self._run_log.epochs > self._last_epoch:
                break
            if alive := [(rank, pid) for rank, pid in self._run_log.pids.copy().items() if pid not in self.killed]:
                self._kill(*random.choice(alive))

    def _kill(self, rank: int, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # raysgd has just killed it, because it did not leave its attempt in time
            return
        self._run_log.write(f"killed rank {rank} on pid {pid}")
        self.killed.append(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="how many workers are killed")
    parser.add_argument("--seconds", type=float, default=5, help="average seconds between two kills")
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()

    # Ray counts logical CPUs, so four workers fit on any number of cores.
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = {"lr": 4e-3, "batch_size": 96, "epochs": args.epochs, "epoch_s": 0.5}
    run_log = RunLog()
    killer = Killer(run_log, args.kills, args.seconds, last_epoch=0.9 * args.epochs)
    failure = raysgd.FailureConfig(max_failures=-1)
    keep = raysgd.CheckpointConfig(num_to_keep=2)
    with raysgd.Trainer((2, 4), "torch", seed=0, failure_config=failure, checkpoint_config=keep) as trainer:
        print(trainer)
        killer.start()
        model = trainer.run(train_func, config, callbacks=[run_log, raysgd.callbacks.ProgressCallback(mode="off")])
        run_dir = trainer.run_dir
    print(f"test accuracy of the returned model: {digits.accuracy(model, digits.make_data()[1]):.4f}")
    print(
        f"{len(killer.killed)} workers killed, {run_log.num_deaths} failures survived, {args.epochs} epochs trained and "
        f"{run_log.num_repeated} repeated, in {time.time() - run_log.began:.0f} s"
    )
    print(f"run directory: {run_dir}")


if __name__ == "__main__":
    main()

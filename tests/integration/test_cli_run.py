"""``raysgd run``: scripts on the workers of a cluster, their output, exit status, recovery, and scripts for torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.cli.script import Script
from raysgd.testing import check_history
from support import command
from support.poll import until
from support.runs import PATIENCE_S, are_gone, make_trainer, quiet, travels_by_value

travels_by_value(__name__)

#: A script that runs with ``python`` and with ``raysgd run``. Its first argument is a folder, in which rank 1 is killed once.
TRAIN = """
import os
import signal
import sys

import raysgd

folder, steps = sys.argv[1], int(sys.argv[2])
rank = raysgd.world_rank()
state = raysgd.load_checkpoint()
start = 0 if state is None else state["step"] + 1
print("starts at", start, "of", raysgd.world_size(), flush=True)
for step in range(start, steps):
    raysgd.report(step=step, rank=rank)
    raysgd.save_checkpoint({"step": step})
    raysgd.barrier()
    if (rank, step) == (1, 2) and not os.path.exists(f"{folder}/killed"):
        open(f"{folder}/killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("done", flush=True)
"""

#: A script for torchrun, with nothing of raysgd. It resumes from a snapshot of its own, as torch's tutorial does.
TORCHRUN = """
import argparse
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--folder")
parser.add_argument("--epochs", type=int)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--wait-for-size", type=int, default=0)
args = parser.parse_args()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    assert (rank, int(os.environ["WORLD_SIZE"])) == (dist.get_rank(), dist.get_world_size())
    snapshot = f"{args.folder}/snapshot.pt"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    start = 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        start = state["epoch"] + 1
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT",
             "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
    facts = {name: os.environ[name] for name in names}
    facts |= {"start": start, "pid": os.getpid(), "is_elastic": dist.is_torchelastic_launched()}
    with open(f"{args.folder}/entered-{facts['TORCHELASTIC_RESTART_COUNT']}-{rank}.json", "w") as file:
        json.dump(facts, file)
    x = torch.ones(8, 4) * (rank + 1)
    for epoch in range(start, args.epochs):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, snapshot + ".new")
            os.replace(snapshot + ".new", snapshot)
        dist.barrier()
        if (rank, epoch) == (1, args.kill_at) and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    while dist.get_world_size() < args.wait_for_size:
        dist.barrier()
        time.sleep(0.01)
    if rank == 0:
        print("epochs", epoch + 1 if start < args.epochs else start, "weights", model.module.weight.tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@ray.remote(num_cpus=1)
class Held:
    """Holds a CPU of the cluster."""

    def ready(self) -> bool:
        return True


def write(folder: Path, name: str, source: str) -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return name


def lines_of(output: str) -> list[tuple[int, str]]:
    """Return what each rank printed, as (rank, text), sorted."""
    return sorted(
        (int(rank), text) for rank, text in re.findall(r"^\(rank (\d+) pid=\d+\) (.*)$", output, re.MULTILINE)
    )


def entered(folder: Path, restart: int) -> list[dict[str, Any]]:
    """Return what the ranks of an attempt of `TORCHRUN` wrote, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"entered-{restart}-*.json"))]


def latest_run(folder: Path) -> Any:
    (run_dir,) = (folder / "runs").glob("*/run_001")
    return raysgd.load_run(run_dir)


# -- scripts that use raysgd -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["none", "torch"])
def test_script_runs_with_python_and_with_the_command(ray_cluster: Any, tmp_path: Path, backend: str) -> None:
    """A killed worker is replaced, the other one is kept, and both resume from the script's last checkpoint."""
    write(tmp_path, "train.py", TRAIN)
    alone = subprocess.run(
        [sys.executable, "train.py", str(tmp_path), "4"],
        cwd=tmp_path,
        env=command.environment(ray_cluster),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (alone.returncode, alone.stdout) == (0, "starts at 0 of 1\ndone\n"), alone.stderr

    flags = ["--num-workers", "2", "--backend", backend, "--storage-path", "runs", "--reduce", "rank=sum"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, "train.py", str(tmp_path), "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    printed = [text for _, text in lines_of(done.stdout)]
    assert printed.count("starts at 0 of 2") == 2 and printed.count("done") == 2
    (resumed,) = set(printed) - {"starts at 0 of 2", "done"}
    assert re.fullmatch(r"starts at [23] of 2", resumed) and printed.count(resumed) == 2
    pids = [set(re.findall(rf"^\(rank {rank} pid=(\d+)\)", done.stdout, re.MULTILINE)) for rank in range(2)]
    assert [len(each) for each in pids] == [1, 2]
    run = latest_run(tmp_path)
    assert run.metrics["step"].tolist() == [0, 1, 2, 3, 4] and set(run.metrics["rank"]) == {1}
    assert run.checkpoints[-1].load() == {"step": 4}
    check_history(run.run_dir, max_failures=1)


def test_settings_of_the_command_reach_the_engine_of_a_script(ray_cluster: Any, tmp_path: Path) -> None:
    """They also replace what the script gives. It puts other files in the place of its streams, as many do."""
    source = """
    import os, sys, torch, raysgd
    engine = raysgd.Engine(zero_stage=3, precision="bf16")
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        engine.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        raysgd.report(step=step)
    print(isinstance(model, torch.nn.parallel.DistributedDataParallel), engine.config.given(), flush=True)
    with open(f"log{raysgd.world_rank()}", "w") as sys.stderr:
        print("logged", file=sys.stderr)
    sys.stdout = open(os.devnull, "w")
    """
    write(tmp_path, "train.py", source)
    flags = ["--num-workers", "2", "--storage-path", "runs"]
    settings = ["--engine.zero-stage", "0", "--engine.precision", "fp32", "--engine.accumulation-steps", "2"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, *settings, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "True {'accumulation_steps': 2}"
    assert lines_of(done.stdout) == [(0, expected), (1, expected)]
    assert [(tmp_path / f"log{rank}").read_text() for rank in range(2)] == ["logged\n"] * 2
    assert "had no effect" not in done.stdout + done.stderr


def test_run_of_a_name_resumes_from_its_earlier_runs(ray_cluster: Any, tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN)
    flags = ["--backend", "none", "--name", "exp", "--storage-path", "runs", "--resume-from", "last", "--json"]
    for number, (steps, start) in enumerate((("2", 0), ("4", 2)), 1):
        done = command.run(ray_cluster, tmp_path, "run", *flags, "train.py", str(tmp_path), steps)
        assert done.returncode == 0, done.stderr
        assert lines_of(done.stdout) == [(0, "done"), (0, f"starts at {start} of 1")]
        summary = json.loads(done.stdout.splitlines()[-1])
        run_dir, checkpoint = Path(summary["run_dir"]), Path(summary["checkpoint"])
        assert (run_dir.name, checkpoint.parent.parent) == (f"run_{number:03d}", run_dir)
        assert summary["result"]["training_iteration"] == int(steps)


def test_script_finds_what_a_program_finds(ray_cluster: Any, tmp_path: Path) -> None:
    """It also finds the engine's config, the variables of the flags, and modules next to it."""
    (tmp_path / "code").mkdir()
    write(tmp_path / "code", "next_to_the_script.py", "VALUE = 'imported'\n")
    write(
        tmp_path / "code",
        "facts.py",
        """
        import json, os, sys
        import next_to_the_script
        from raysgd.engine.config import current_engine_config

        config = current_engine_config()
        print(json.dumps([
            __name__, sys.argv, __file__, os.getcwd(), next_to_the_script.VALUE, os.environ["GIVEN"],
            config.precision, config.zero_stage, sys.stdout is not None,
        ]))
        """,
    )
    (tmp_path / "engine.yaml").write_text("precision: bf16\nzero_stage: 1\n")
    flags = ["--backend", "none", "--storage-path", "runs", "--env", "GIVEN=by a flag"]
    engine = ["--engine-config", "engine.yaml", "--engine.zero-stage", "2"]
    words = ["code/facts.py", "--num-workers", "7", "a b"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, *engine, *words)
    assert done.returncode == 0, done.stderr
    ((_, line),) = lines_of(done.stdout)
    path = str(tmp_path / "code" / "facts.py")
    expected = ["__main__", [path, "--num-workers", "7", "a b"], path, str(tmp_path)]
    assert json.loads(line) == [*expected, "imported", "by a flag", "bf16", 2, True]


def test_engine_chooses_its_strategies_by_a_flag(ray_cluster: Any, tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        import torch
        import raysgd

        engine = raysgd.Engine(precision="bf16")
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
        rows = torch.utils.data.TensorDataset(torch.ones(16, 256))
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, _, loader, _ = engine.compose(model=model, optimizer=optimizer, train_dataloader=loader)
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        print(f"stage {engine.config.zero_stage} in {engine.config.precision}")
        """,
    )
    flags = ["--num-workers", "2", "--storage-path", "runs", "--engine.plan", "auto"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, "--engine.memory-per-device", "12e6", "train.py")
    assert done.returncode == 0, done.stderr
    assert (0, "stage 3 in bf16") in lines_of(done.stdout)
    assert 'plan="auto": chosen: data x2' in done.stdout + done.stderr


def test_working_dir_is_copied_to_the_workers(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "code" / "jobs").mkdir(parents=True)
    (tmp_path / "code" / "data.txt").write_text("shipped")
    write(tmp_path / "code" / "jobs", "train.py", "import os\nprint(open('data.txt').read(), __file__, flush=True)\n")
    flags = ["--backend", "none", "--storage-path", str(tmp_path / "runs"), "--working-dir", "code"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, "code/jobs/train.py")
    assert done.returncode == 0, done.stderr
    ((_, line),) = lines_of(done.stdout)
    data, path = line.split()
    assert data == "shipped" and path.endswith("/jobs/train.py") and not path.startswith(str(tmp_path))


def test_script_of_another_machine_runs_from_its_source(ray_cluster: Any, tmp_path: Path) -> None:
    """Its traceback has lines, though the script is on no disk of the workers."""
    source = (
        b"import raysgd\nprint('begins', flush=True)\nraise LookupError(f'rank {raysgd.world_rank()}')  # the line\n"
    )
    script = Script("/of/another/machine/train.py", source, folder="/of/another/machine")
    with make_trainer(tmp_path, 1) as trainer, pytest.raises(LookupError, match="rank 0") as caught:
        trainer.run(script, callbacks=quiet())
    assert '/train.py", line 3, in <module>\n    raise LookupError' in str(caught.value.__cause__)


# -- the end of a script -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "status", "text"),
    [
        ("sys.exit(7 if rank == 1 else 0)", 7, r"rank 1 on \S+ \(\S+\) called sys.exit\(7\)"),
        ("sys.exit('no data')", 1, r"rank \d on \S+ \(\S+\) called sys.exit\(1\)"),
        (
            "def fail():\n    raise LookupError(f'bad row of rank {rank}')\nif rank == 1:\n    fail()",
            1,
            r'in the worker of rank 1 on [^\n]+:\nTraceback [^\n]+\n  File "[^\n]*/fails.py", line 7, in <module>'
            r".*LookupError: bad row of rank 1",
        ),
    ],
)
def test_exit_status_is_that_of_the_script(
    ray_cluster: Any, tmp_path: Path, source: str, status: int, text: str
) -> None:
    begin = "import sys\nimport raysgd\nrank = raysgd.world_rank()\n"
    (tmp_path / "fails.py").write_text(begin + source + "\n")
    flags = ["--num-workers", "2", "--backend", "none", "--storage-path", "runs"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, "fails.py")
    assert done.returncode == status, done.stderr
    assert re.search(text, done.stderr, re.DOTALL), done.stderr
    assert "raysgd/cli" not in done.stderr, "frames of the command are shown"


def test_exception_is_retried_with_max_restarts(ray_cluster: Any, tmp_path: Path) -> None:
    source = """
    import os, pathlib
    tries = pathlib.Path("tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    raise ValueError(f"try {len(tries.read_text())}")
    """
    write(tmp_path, "fails.py", source)
    flags = ["--backend", "none", "--storage-path", "runs", "--max-restarts", "2", "--json"]
    done = command.run(ray_cluster, tmp_path, "run", *flags, "fails.py")
    assert done.returncode == 1
    printed = json.loads(done.stdout.splitlines()[-1])
    assert Path(printed["run_dir"]).is_dir() and (printed["result"], printed["checkpoint"]) == (None, None)
    assert "ValueError: try 3" in done.stderr and "max_failures=2" in done.stderr


def test_workers_that_the_cluster_cannot_hold_are_refused(ray_cluster: Any, tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN)
    done = command.run(ray_cluster, tmp_path, "run", "--num-workers", "500", "--storage-path", "runs", "train.py")
    assert done.returncode == 2
    assert "raysgd run: " in done.stderr and "500" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [
        (
            signal.SIGINT,
            130,
            "stopping: the run saves a checkpoint and ends, within 20 s; Ctrl-C again stops it at once",
        ),
        (
            signal.SIGTERM,
            143,
            "stopping: the run saves a checkpoint and ends, within 20 s; a second signal stops it at once",
        ),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_signal_makes_the_run_save_and_end(
    ray_cluster: Any, tmp_path: Path, number: int, status: int, text: str
) -> None:
    source = """
    import os, time, raysgd
    for step in range(10**9):
        raysgd.report(step=step)
        if step == 5:
            open(f"training-{os.getpid()}", "w").close()
        if raysgd.should_stop():
            raysgd.save_checkpoint({"step": step})
            break
        time.sleep(0.01)
    """
    write(tmp_path, "train.py", source)
    flags = ["--num-workers", "2", "--backend", "none", "--storage-path", "runs", "--grace", "20"]
    process = command.start(ray_cluster, tmp_path, "run", *flags, "train.py")
    try:
        assert until(lambda: len(list(tmp_path.glob("training-*"))) == 2 or process.poll() is not None, PATIENCE_S)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == status
    assert text in err and "Traceback" not in err
    assert are_gone([int(path.name.rpartition("-")[2]) for path in tmp_path.glob("training-*")])
    run = latest_run(tmp_path)
    assert run.outcome == "stopped"
    assert [each.load()["step"] for each in run.checkpoints] == [len(run.metrics) - 1]


def test_ending_after_sigterm_may_take_longer_than_ray_allows(ray_cluster: Any, tmp_path: Path) -> None:
    """Ray's core aborts a driver three seconds after SIGTERM, while it still ends its run."""
    source = """
    import time, raysgd
    with raysgd.Trainer(1, backend="none") as trainer:
        trainer.run(lambda config: None)
        try:
            print("ready", flush=True)
            time.sleep(60)
        except SystemExit:
            time.sleep(3.5)
            print("ended", flush=True)
            raise
    """
    write(tmp_path, "driver.py", source)
    process = subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env=command.environment(ray_cluster),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and any(line == "ready\n" for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (signal.SIGTERM, "ended\n"), err


def test_detached_run_continues_without_the_command(ray_cluster: Any, tmp_path: Path) -> None:
    source = """
    import os, time, raysgd
    step = 0
    while not os.path.exists("go"):
        step += 1
        raysgd.report(step=step)
        time.sleep(0.02)
    """
    write(tmp_path, "train.py", source)
    flags = ["--backend", "none", "--storage-path", "runs", "--detached", "--name", "of_a_command"]
    process = command.start(ray_cluster, tmp_path, "run", *flags, "--progress", "lines", "train.py")
    try:
        assert process.stdout is not None
        assert any("step=1" in line for line in process.stdout)
    finally:
        process.kill()
        process.communicate()
    trainer = raysgd.Trainer.attach("of_a_command")
    try:
        assert trainer.status().state == "running"
        (tmp_path / "go").touch()
        steps = [result["step"] for result in trainer.stream()]
        assert steps == list(range(1, len(steps) + 1))
        assert trainer.status().state == "done"
    finally:
        trainer.shutdown()


def test_command_starts_a_cluster_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import raysgd\nprint('rank', raysgd.world_rank(), 'of', raysgd.world_size())\n")
    flags = ["--num-workers", "2", "--cpus-per-worker", "0.5", "--backend", "none", "--storage-path", "runs"]
    done = command.run(None, tmp_path, "run", *flags, "train.py")
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == [(0, "rank 0 of 2"), (1, "rank 1 of 2")]


# -- scripts for torchrun ----------------------------------------------------------------------------------------------


def run_torchrun_script(cluster: Any, folder: Path, flags: list[str], *arguments: str) -> str:
    write(folder, "train.py", TORCHRUN)
    words = ["run", "--backend", "env", "--storage-path", "runs", *flags, "train.py", "--folder", str(folder)]
    done = command.run(cluster, folder, *words, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_script_for_torchrun_runs_unmodified_and_restarts_after_a_kill(ray_cluster: Any, tmp_path: Path) -> None:
    """It ends with the weights that it has under torchrun without a kill."""
    flags = ["--num-workers", "2", "--name", "exp"]
    out = run_torchrun_script(ray_cluster, tmp_path, flags, "--epochs", "4", "--kill-at", "1")
    first, second = entered(tmp_path, 0), entered(tmp_path, 1)
    for facts in (first, second):
        assert [(one["RANK"], one["LOCAL_RANK"]) for one in facts] == [("0", "0"), ("1", "1")]
        shared = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
        assert all([one[name] for name in shared] == ["2", "2", "0", "3", "exp"] for one in facts)
        assert all(one["is_elastic"] for one in facts)
    assert [one["start"] for one in first] == [0, 0] and [one["start"] for one in second] == [2, 2]
    assert not {one["pid"] for one in first} & {one["pid"] for one in second}, "an attempt had a used process"
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    assert not entered(tmp_path, 2)

    (plain := tmp_path / "plain").mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    under_torchrun = subprocess.run(
        [*launcher, "train.py", "--folder", str(plain), "--epochs", "4"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert under_torchrun.returncode == 0, under_torchrun.stderr
    ((_, line),) = [each for each in lines_of(out) if each[1].startswith("epochs")]
    assert line == under_torchrun.stdout.strip()


def test_script_for_torchrun_restarts_with_more_workers_when_there_is_room(ray_cluster: Any, tmp_path: Path) -> None:
    """It saves nothing with raysgd, so it is restarted at once, as by torchrun."""
    held = [Held.remote() for _ in range(7)]  # type: ignore[attr-defined]
    ray.get([one.ready.remote() for one in held])
    write(tmp_path, "train.py", TORCHRUN)
    words = ["run", "--backend", "env", "--storage-path", "runs", "--num-workers", "1:2", "train.py"]
    arguments = ["--folder", str(tmp_path), "--epochs", "2", "--wait-for-size", "2"]
    process = command.start(ray_cluster, tmp_path, *words, *arguments)
    try:
        assert until(lambda: entered(tmp_path, 0) or process.poll() is not None, PATIENCE_S)
        for one in held:
            ray.kill(one)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    assert [one["WORLD_SIZE"] for one in entered(tmp_path, 0)] == ["1"]
    assert [one["WORLD_SIZE"] for one in entered(tmp_path, 1)] == ["2", "2"]
    events = latest_run(tmp_path).events
    assert list(events["kind"]).count("failure") == 0 and list(events["kind"]).count("regroup") == 1

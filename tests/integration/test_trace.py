"""`raysgd trace` on real runs: all ranks on one clock, in agreement with the ledger, also of a run that failed."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli.main import main
from raysgd.goodput.ledger import Ledger
from raysgd.runs.reading import read_events
from support.runs import once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.timeout(240)]
travels_by_value(__name__)

TRAINER: dict[str, Any] = {
    "num_workers": 2,
    "backend": "torch",
    "failure_config": raysgd.FailureConfig(max_failures=1, abort_grace_s=20),
}
NUM_STEPS = 60


def trace(trainer: raysgd.Trainer, path: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``raysgd trace --json`` prints of the newest run, and the file that it writes."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(["trace", str(trainer.run_dir), "-o", str(path), "--json", *words]) == 0
    return json.loads(out.getvalue()), json.loads(path.read_text())


def spans_of(written: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    return [each for each in written["traceEvents"] if each["ph"] == "X" and each["pid"] == rank + 1]


def train(config: dict[str, Any]) -> None:
    import torch
    from torch.utils.data import DataLoader

    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    rows: Any = [torch.full((4,), float(number)) for number in range(2 * NUM_STEPS)]
    for step, batch in enumerate(raysgd.torch.prepare_data_loader(DataLoader(rows, batch_size=1))):
        time.sleep(0.01 + 0.04 * raysgd.world_rank())
        model(batch).sum().backward()
        if step % 20 == 19:
            raysgd.save_checkpoint({"step": step})
        raysgd.report({"step": step})


def test_spans_of_all_ranks_add_up_to_the_ledger_and_show_who_waits_for_whom(
    trainer: raysgd.Trainer, tmp_path: Path
) -> None:
    trainer.run(train, {}, callbacks=quiet())
    found, written = trace(trainer, tmp_path / "all.json", "--steps", f"0-{NUM_STEPS}")
    assert found["ranks"] == [0, 1] and found["steps"] == list(range(NUM_STEPS + 1))
    ledger = Ledger.of(read_events(Storage.from_uri(str(trainer.run_dir)))).by_rank()
    for rank in range(2):
        sums: Counter[str] = Counter()
        for each in spans_of(written, rank):
            if each["cat"] != "step":
                sums[each["cat"]] += each["dur"]
        expected: Any = Counter(
            {use: seconds for use, seconds in ledger[rank].items() if use not in ("skew", "transfer")}
        )
        expected["waiting"] += ledger[rank].get("skew", 0.0) + ledger[rank].get("transfer", 0.0)
        total_s = sum(expected.values())
        for use in {*sums, *expected}:
            # When a rank entered is by a clock that is read later, on a busy machine much later.
            allowed = 0.05 if use in ("starting", "ending") else 0.01
            assert sums[use] / 1e6 == pytest.approx(expected[use], abs=allowed * total_s), use
    # In each step rank 0 begins to wait before rank 1 does, and both end together: by one clock.
    _, part = trace(trainer, tmp_path / "part.json", "--steps", "30-40")
    waits = [[each for each in spans_of(part, rank) if each["cat"] == "waiting"] for rank in range(2)]
    begins = [[each["ts"] for each in waits[rank] if each["dur"] > 10] for rank in range(2)]
    assert len(begins[0]) >= 11
    assert sum(first < second for first, second in zip(*begins, strict=False)) > 6
    saved = [each["name"] for each in written["traceEvents"] if each["ph"] == "b"]
    assert saved == ["checkpoint 1", "checkpoint 2", "checkpoint 3"]


def run_script(config: dict[str, Any]) -> None:
    """What a script for torchrun does: it makes no calls of raysgd."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for _ in range(NUM_STEPS):
        model(torch.ones(1, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()


def test_steps_of_a_script_are_those_of_its_optimizers(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    trainer.run(run_script, {}, callbacks=quiet())
    found, written = trace(trainer, tmp_path / "trace.json")
    assert found["steps"] == list(range(NUM_STEPS + 1))
    assert {each["name"] for rank in range(2) for each in spans_of(written, rank)} >= {"set-up", "training", "step 60"}
    assert trainer.run_info is not None and (trainer.run_info.goodput or 0) > 0


def fail_once(config: dict[str, Any]) -> None:
    first = 0 if (state := raysgd.load_checkpoint()) is None else state["step"] + 1
    for step in range(first, NUM_STEPS):
        raysgd.report({"step": step})
        raysgd.barrier()
        if step == 20:
            raysgd.save_checkpoint({"step": step})
        if step == 40 and raysgd.world_rank() == 1 and once(config["folder"], "failed"):
            if config["how"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a loss that is not finite")


def test_last_steps_before_a_death_and_the_steps_after_it(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    trainer.run(fail_once, {"folder": str(tmp_path), "how": "killed"}, callbacks=quiet())
    found, written = trace(trainer, tmp_path / "after.json")
    assert (found["attempt"], found["ranks"]) == (2, [0, 1])
    assert found["steps"] == list(range(21, NUM_STEPS + 1)), "counted on from the checkpoint of the 21st step"
    found, written = trace(trainer, tmp_path / "before.json", "--attempt", "1")
    assert found["ranks"] == [0], "who was not killed has its steps"
    assert found["steps"][-1] in (41, 42), "it reports the step in which rank 1 dies, and perhaps another one"
    events = [each["name"] for each in written["traceEvents"] if each["ph"] == "i"]
    assert "failure" in events
    last = spans_of(written, 0)[-1]
    assert last["name"] == "recovering"


def test_steps_of_a_run_that_raises_are_there_when_the_driver_has_the_error(
    trainer: raysgd.Trainer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="a loss that is not finite"):
        trainer.run(fail_once, {"folder": str(tmp_path), "how": "raises"}, callbacks=quiet())
    found, written = trace(trainer, tmp_path / "trace.json")
    assert 1 in found["ranks"]
    assert [each["name"] for each in spans_of(written, 1) if each["cat"] == "step"][-1] == "step 41"
    (end,) = [each["args"]["text"] for each in written["traceEvents"] if each["name"] == "run end"]
    assert "a loss that is not finite" in end

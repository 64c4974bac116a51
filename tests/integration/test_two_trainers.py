"""Two torch Trainers at the same time: each has its own group, address and settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raysgd.backends.torch import TorchConfig
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)


def reduce_until_both_trainers_reduce(config: dict[str, Any]) -> dict[str, Any]:
    """All-reduce, and continue for some steps after the other Trainer's workers all-reduce too."""
    import torch
    import torch.distributed as dist

    left, steps, sums = 100, 0, set()
    while left:
        total = torch.tensor([config["value"], float(all(map(os.path.exists, config["marks"])))])
        dist.all_reduce(total)
        sums.add(total[0].item())
        left -= int(total[1] == dist.get_world_size())  # all ranks leave after the same step
        steps += 1
        if dist.get_rank() == 0:
            Path(config["mark"]).touch()
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    return {"sums": sums, "timeout_s": timeout.total_seconds(), "port": os.environ["MASTER_PORT"]}


def test_two_trainers_all_reduce_at_the_same_time(ray_cluster: Any, tmp_path: Path) -> None:
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    with (
        make_trainer(tmp_path, 2, TorchConfig(timeout_s=600, init_timeout_s=20)) as one,
        make_trainer(tmp_path, 3, TorchConfig(timeout_s=77, backend="gloo")) as other,
    ):
        streams = [
            trainer.run_generator(
                reduce_until_both_trainers_reduce,
                {"value": value, "mark": mark, "marks": marks},
                callbacks=quiet(),
                returns="all",
            )
            for trainer, value, mark in ((one, 1.0, marks[0]), (other, 10.0, marks[1]))
        ]
        first, second = (stream.get_returns() for stream in streams)
    assert [(found["sums"], found["timeout_s"]) for found in first] == [({2.0}, 600)] * 2
    assert [(found["sums"], found["timeout_s"]) for found in second] == [({30.0}, 77)] * 3
    assert len({found["port"] for found in first}) == len({found["port"] for found in second}) == 1
    assert first[0]["port"] != second[0]["port"]

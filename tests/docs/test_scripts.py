"""The commands of guides run the scripts and files of their pages, as a reader would type them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from support import command
from support.project import ROOT
from support.snippets import snippets

GUIDES = ROOT / "doc" / "guides"
PAGE = GUIDES / "scripts.md"
NAMED = re.compile(r"^# (?P<name>\w+\.(py|yaml))\b")
COMMANDS = [
    line.removeprefix("$ ") for block in snippets(PAGE, "console") for line in block.code.splitlines() if line.strip()
]


def write_files(folder: Path, page: Path = PAGE) -> set[str]:
    """Write the files that a page shows, whose first lines have their names; return the names."""
    names = set()
    for block in snippets(page, "python", "yaml"):
        if found := NAMED.match(block.code):
            (folder / found["name"]).write_text(block.code)
            names.add(found["name"])
    return names


@pytest.mark.timeout(300)
def test_commands_of_the_page_run(ray_cluster: Any, tmp_path: Path) -> None:
    assert write_files(tmp_path) == {"train.py", "large.py", "ddp.py", "engine.yaml"}
    printed = []
    for line in COMMANDS:
        program, *words = shlex.split(line)
        assert program == "raysgd"
        done = command.run(ray_cluster, tmp_path, *words)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    assert len(printed) == 5
    assert re.search(r"\(rank 1 pid=\d+\) trained 5 epochs", printed[0])
    assert "trained 4 epochs" in printed[2] and "epoch=0" not in printed[2], "the second run did not resume"
    assert re.search(r"\(rank 0 pid=\d+\) of 2 ranks", printed[3])
    assert re.search(r"\(rank 0 pid=\d+\) loss \d+\.", printed[4]) and "had no effect" not in printed[4]


@pytest.mark.timeout(300)
def test_a_training_by_a_file_runs_and_continues(ray_cluster: Any, tmp_path: Path) -> None:
    page = GUIDES / "declarative.md"
    assert write_files(tmp_path, page) == {"job.yaml", "parts.py"}
    lines = [line for block in snippets(page, "console") for line in block.code.splitlines()]
    assert [line.split()[:3] for line in lines] == [["$", "raysgd", "train"]] * 2
    epochs = []
    for line in lines:
        done = command.run(ray_cluster, tmp_path, *shlex.split(line)[2:], "--json")
        assert done.returncode == 0, done.stderr
        epochs.append(json.loads(done.stdout[done.stdout.index("{\n") :])["finished_train_steps"])
    assert epochs == [16, 32]


@pytest.mark.timeout(300)
def test_the_example_by_a_file_learns_digits(ray_cluster: Any, tmp_path: Path) -> None:
    folder = ROOT / "examples" / "declarative"
    words = [
        "train",
        "-f",
        "digits.yaml",
        "--checkpoint.save_dir",
        str(tmp_path / "runs"),
        "--max_epochs",
        "2",
        "--json",
    ]
    done = command.run(ray_cluster, folder, *words)
    assert done.returncode == 0, done.stderr
    assert "digits of rank 0 are right" in done.stdout
    assert json.loads(done.stdout[done.stdout.index("{\n") :])["val_loss"] < 1.0


@pytest.mark.timeout(300)
def test_the_example_by_a_file_fine_tunes_a_language_model(ray_cluster: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    from transformers import AutoModelForCausalLM

    from support.tiny_language_models import make_folder

    words = ["train", "-f", "sft.yaml", "--model.args.name", make_folder(tmp_path / "model")]
    words += ["--checkpoint.save_dir", str(tmp_path / "runs"), "--json"]
    folder = ROOT / "examples" / "declarative"
    more = {"PYTHONPATH": f"{ROOT}:{Path(peft.__file__).parents[1]}"}
    for changes in (
        ["--optimizer.args.lr", "0.05"],
        ["--export", str(tmp_path / "tuned")],
        ["--export", str(tmp_path / "adapter"), "--model.args.exports", "adapter"],
    ):
        done = command.run(ray_cluster, folder, *words, *changes, **more)
        assert done.returncode == 0, done.stderr
        if changes[0] != "--export":
            found = json.loads(done.stdout[done.stdout.index("{\n") :])
            assert found["val_loss"] < 4.0, "the loss of random answers is 5"
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    for name, value in tuned.state_dict().items():
        torch.testing.assert_close(value, adapted.state_dict()[name])


def test_file_of_the_page_is_a_config_of_the_engine(tmp_path: Path) -> None:
    from raysgd.cli.engine_flags import FILE_FLAG, make_engine_config
    from raysgd.engine.config import EngineConfig

    write_files(tmp_path)
    config = make_engine_config({FILE_FLAG: str(tmp_path / "engine.yaml")})
    assert config == EngineConfig(precision="bf16", zero_stage=3, cpu_offload=True)

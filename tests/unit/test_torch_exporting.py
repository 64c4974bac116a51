"""`raysgd.torch.export`: files, names, types and tied tensors of models that one process saved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import raysgd
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ConfigError
from raysgd.torch import export


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(6, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("empty", torch.empty(0, 2))


def save(folder: Path, state: Any, **options: Any) -> raysgd.Checkpoint:
    with raysgd.local(dir=folder):
        raysgd.save_checkpoint(state, **options)
    return raysgd.Checkpoint.from_path(folder / "checkpoint_000001")


def test_tensors_of_a_model_are_written_once_under_their_names(tmp_path: Path) -> None:
    model = Tied()
    saved = save(tmp_path / "run", {"model": model, "step": 3})
    export(saved, tmp_path / "out", config={"model_type": "tied"})
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert set(found) == set(expected), "weights of norms are equal and not tied"
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "tied"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"], "nothing is left behind"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_are_those_without_wrappers(tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}{name}": value for name, value in nn.Linear(2, 3).state_dict().items()}
    export(save(tmp_path / "run", state), tmp_path / "out", key=None)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"weight", "bias"}


def test_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    state = {"module.weight": torch.ones(2), "head.module.weight": torch.zeros(2)}
    export(save(tmp_path / "run", {"ema": state}), tmp_path / "out", key="ema")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "torch.float64"])
def test_floating_point_tensors_are_written_as_another_type(tmp_path: Path, dtype: Any) -> None:
    model = Tied()
    export(save(tmp_path / "run", {"model": model}).path or "", tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    assert torch.equal(found["words.weight"], model.words.weight.detach().to(wanted))
    assert found["positions"].dtype == torch.int64


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), limit=st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_files_hold_up_to_a_limit(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int) -> None:
    folder = tmp_path_factory.mktemp("export")
    state = {f"w{number}": torch.arange(size, dtype=torch.float32) for number, size in enumerate(sizes)}
    export(save(folder / "run", {"model": state}), folder / "out", max_shard_bytes=limit)
    files = sorted((folder / "out").glob("*.safetensors"))
    tensors = {file.name: load_file(file) for file in files}
    for of_file in tensors.values():
        assert len(of_file) == 1 or sum(4 * value.numel() for value in of_file.values()) <= limit
    merged = {name: value for of_file in tensors.values() for name, value in of_file.items()}
    assert set(merged) == set(state) and all(torch.equal(merged[name], value) for name, value in state.items())
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        return
    index = json.loads((folder / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * sum(sizes)}
    assert index["weight_map"] == {name: file for file, of_file in tensors.items() for name in of_file}
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"key": "net"},
            CheckpointError,
            r"has no state\['net'\]: it holds 'model', 'step', 'none', 'odd'; give one of these as key",
        ),
        ({"key": "step"}, CheckpointError, r"state\['step'\] is an int; export needs the state dict"),
        ({"key": "none"}, CheckpointError, r"state\['none'\] is empty"),
        ({"key": "odd"}, CheckpointError, r"odd has dtype torch.complex128, which safetensors files cannot hold"),
        ({"key": None}, CheckpointError, r"the state\['model'\] is an? \w*, not a tensor"),
        ({"dtype": "int64"}, ConfigError, r"dtype='int64'\) is not a floating point type"),
        ({"dtype": "float99"}, ConfigError, r"dtype='float99'\) is not a floating point type"),
        ({"config": nn.Linear(1, 1)}, ConfigError, r"is the model, a Linear; give its model.config"),
        ({"config": 3}, ConfigError, r"config=...\) is an int; give the config of transformers, or a dict"),
        ({"max_shard_bytes": 0}, ConfigError, r"max_shard_bytes"),
    ],
    ids=str,
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    state = {"model": Tied(), "step": 3, "none": {}, "odd": {"odd": torch.zeros(2, dtype=torch.complex128)}}
    saved = save(tmp_path / "run", state)
    with pytest.raises(error, match=message):
        export(saved, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left behind"


def test_folder_must_be_empty(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", {"model": Tied()})
    out = tmp_path / "out"
    out.mkdir()
    export(saved, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="out: it exists and is not an empty folder"):
        export(saved, out)
    with pytest.raises(ConfigError, match=r"model\.safetensors: it exists and is not an empty folder"):
        export(saved, out / "model.safetensors")
    assert (out / "model.safetensors").read_bytes() == before


def test_checkpoints_without_a_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="in memory only"):
        export(raysgd.Checkpoint(None), tmp_path / "out")
    (tmp_path / "notes.txt").write_text("text")
    files = save(tmp_path / "run", str(tmp_path / "notes.txt"), files=True)
    with pytest.raises(CheckpointError, match="was saved with files=True"):
        export(files, tmp_path / "out")


def test_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", {"model": Tied()})
    (file,) = (tmp_path / "run" / "checkpoint_000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorruptError):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()

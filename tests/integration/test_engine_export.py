"""Models that were trained under the engine's strategies are exported, and transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import raysgd
from support.engine_exports import train_and_save
from support.engine_models import batch, build
from support.torch_ranks import RankGroup

pytestmark = pytest.mark.timeout(600)

ZERO_3 = {"zero_stage": 3}
TENSOR_AND_PIPELINE = {"tensor_parallel": 2, "pipeline_parallel": 2}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(4) as group:
        yield group


def save(ranks: RankGroup, kind: str, folder: Path, **strategies: Any) -> tuple[torch.nn.Module, raysgd.Checkpoint]:
    """Return the model as the ranks hold it together, and its checkpoint."""
    gathered: dict[str, torch.Tensor] = {}
    for of_rank in ranks.run(train_and_save, kind, folder, **strategies):
        gathered |= {name: torch.from_numpy(value) for name, value in of_rank.items()}
    model = build(kind)
    model.load_state_dict(gathered)
    return model.eval(), raysgd.Checkpoint.from_path(folder / "checkpoint_000001")


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    inputs = {name: value for name, value in batch("gpt2", 7).items() if name != "labels"}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**inputs).logits
    return found


def names_in(folder: Path) -> set[str]:
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        ("gpt2", ZERO_3),
        ("gpt2", TENSOR_AND_PIPELINE),
        ("gpt2", {}),
        ("llama", ZERO_3),
        ("llama", TENSOR_AND_PIPELINE),
        ("llama, biased and tied", {"pipeline_parallel": 2, "zero_stage": 2}),
    ],
    ids=str,
)
def test_transformers_loads_an_exported_model(
    ranks: RankGroup, tmp_path: Path, kind: str, strategies: dict[str, Any]
) -> None:
    model, checkpoint = save(ranks, kind, tmp_path, **strategies)
    folder = tmp_path / "exported"
    raysgd.torch.export(checkpoint, folder, config=model.config)
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "config.json"}
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not torch.equal(logits_of(build(kind)), logits_of(model)), "the model was trained"
    is_tied = kind != "llama"
    assert names_in(folder) == set(model.state_dict()) - ({"lm_head.weight"} if is_tied else set())


def test_large_model_is_exported_in_several_files(ranks: RankGroup, tmp_path: Path) -> None:
    model, checkpoint = save(ranks, "llama", tmp_path, **ZERO_3)
    folder = tmp_path / "several"
    raysgd.torch.export(checkpoint, folder, config=model.config, dtype="bfloat16", max_shard_bytes=12_000)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == names_in(folder) == set(model.state_dict())
    assert set(index["weight_map"].values()) == set(files)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16)), name

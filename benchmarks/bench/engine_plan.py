"""What the plan predicts of a rank's memory, and what the engine measures there, for eight models. Runs in workers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import raysgd
from raysgd.errors import ConfigError
from raysgd.session import context

KINDS = ("parameters", "gradients", "optimizer", "kept_activations")
#: Strategies by the name that the page shows. Those that need more ranks, or a model that the engine can cut, are left out.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ZeRO-0": {},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
    "ZeRO-1, 2 accumulated": {"zero_stage": 1, "accumulation_steps": 2},
    "ZeRO-2, 2 accumulated": {"zero_stage": 2, "accumulation_steps": 2},
    "full recomputation": {"activation_checkpointing": "full"},
    "ZeRO-3, selective recomputation": {"zero_stage": 3, "activation_checkpointing": "selective"},
    "ZeRO-3, bf16": {"zero_stage": 3, "precision": "bf16"},
    "bf16-true": {"precision": "bf16-true"},
    "ZeRO-2, bf16-true": {"zero_stage": 2, "precision": "bf16-true"},
    "ZeRO-3, bf16-true": {"zero_stage": 3, "precision": "bf16-true"},
    "ZeRO-1, tensor x2": {"zero_stage": 1, "tensor_parallel": 2},
    "ZeRO-3, tensor x2, sequence": {"zero_stage": 3, "tensor_parallel": 2, "sequence_parallel": True},
    "tensor x4": {"tensor_parallel": 4},
    "pipeline x2": {"pipeline_parallel": 2, "micro_batches": 4},
    "ZeRO-2, pipeline x2, full recomputation": {
        "zero_stage": 2,
        "pipeline_parallel": 2,
        "micro_batches": 2,
        "activation_checkpointing": "full",
    },
}
_VOCABULARY, _LENGTH, _WIDTH, _LAYERS, _HEADS = 1000, 64, 128, 4, 4


@dataclass(frozen=True)
class _Model:
    """A model and its batches.

    Attributes:
        make: Makes the model.
        shapes: Shapes of a row of a batch, by argument.
        num_rows: Rows of a micro-batch.
    """

    make: Callable[[], nn.Module]
    shapes: dict[str, tuple[int, ...]]
    num_rows: int = 4

    def batch(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Make a batch: floats for images and features, classes or token numbers for everything else."""
        made = {}
        for name, shape in self.shapes.items():
            if name in ("x", "pixel_values"):
                made[name] = torch.randn(num_rows, *shape)
            else:
                made[name] = torch.randint(_VOCABULARY if shape else 10, (num_rows, *shape))
        return made


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 8 * _WIDTH)
        self.down = nn.Linear(8 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.layers = nn.ModuleList(_Residual() for _ in range(6))
        self.classifier = nn.Linear(_WIDTH, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.classifier(x), labels)


class _Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for before, after in pairwise((3, 32, 64, 128)):
            stages += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(128 * 16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(self.stages(x).flatten(1)), labels)


def make_models() -> dict[str, _Model]:
    """Return the models by name; those of transformers have random weights."""
    import transformers as hf

    ids: dict[str, tuple[int, ...]] = {"input_ids": (_LENGTH,), "labels": (_LENGTH,)}
    sizes: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "intermediate_size": 4 * _WIDTH,
    }
    gpt2 = hf.GPT2Config(vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS)
    llama = hf.LlamaConfig(**sizes, num_key_value_heads=_HEADS)
    qwen3 = hf.Qwen3Config(**sizes, num_key_value_heads=_HEADS, head_dim=_WIDTH // _HEADS)
    bert = hf.BertConfig(**sizes, num_labels=10)
    t5 = hf.T5Config(
        vocab_size=_VOCABULARY,
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=4 * _WIDTH,
        num_layers=_LAYERS,
        num_heads=_HEADS,
        decoder_start_token_id=0,
    )
    vit = hf.ViTConfig(
        **{name: size for name, size in sizes.items() if name != "vocab_size"},
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    return {
        "GPT-2": _Model(lambda: hf.GPT2LMHeadModel(gpt2), ids),
        "LLaMA": _Model(lambda: hf.LlamaForCausalLM(llama), ids),
        "Qwen3": _Model(lambda: hf.Qwen3ForCausalLM(qwen3), ids),
        "BERT": _Model(lambda: hf.BertForSequenceClassification(bert), {**ids, "labels": ()}),
        "T5": _Model(lambda: hf.T5ForConditionalGeneration(t5), ids),
        "ViT": _Model(lambda: hf.ViTForImageClassification(vit), {"pixel_values": (3, 32, 32), "labels": ()}),
        "MLP": _Model(_Perceptron, {"x": (_WIDTH,), "labels": ()}, num_rows=256),
        "ConvNet": _Model(_Convolutional, {"x": (3, 32, 32), "labels": ()}, num_rows=16),
    }


def measure_plan(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Predict and measure the memory of each model under each strategy that has enough ranks.

    Args:
        config: ``models`` and ``strategies``: names; all of them if they are not given.

    Returns:
        For each case ``model``, ``strategy`` and ``ranks``, with ``predicted`` and ``measured`` bytes by kind; or with
        ``refused``: why the plan or the engine does not have the strategy; or with ``failed``: the error of the step.
    """
    rank, size = raysgd.world_rank(), raysgd.world_size()
    models = {name: one for name, one in make_models().items() if name in config.get("models", (name,))}
    strategies = {
        name: raysgd.EngineConfig(**fields)
        for name, fields in STRATEGIES.items()
        if name in config.get("strategies", (name,))
    }
    cases = [(name, how) for name in models for how, of in strategies.items() if size % of.workers_per_replica == 0]
    held = raysgd.gather([_hold(models[name], strategies[how]) for name, how in cases])
    # The ranks share the work of predicting.
    own = {
        number: _predict(models[name], strategies[how]) for number, (name, how) in list(enumerate(cases))[rank::size]
    }
    predicted = {number: one for each in raysgd.gather(own) for number, one in each.items()}
    found = []
    for number, (name, how) in enumerate(cases):
        by_kind = predicted[number]
        stage = by_kind.pop("stage", 0)
        measured = held[stage * strategies[how].tensor_parallel][number]  # of the first rank in that pipeline stage
        errors = {key: text for each in (measured, by_kind) for key, text in each.items() if isinstance(text, str)}
        result = errors or {"predicted": by_kind, "measured": measured}
        found.append({"model": name, "strategy": how, "ranks": size, **result})
    return found


def _predict(one: _Model, config: raysgd.EngineConfig) -> dict[str, Any]:
    """Return the bytes of the rank that needs most, and its ``stage``; or why the plan does not have the strategy."""
    try:
        found = raysgd.engine.predict_memory(
            one.make, one.batch(one.num_rows), config, raysgd.world_size(), device="cpu"
        )
    except ConfigError as error:
        return {"refused": str(error)}
    return {kind: getattr(found, kind) for kind in (*KINDS, "stage")}


def _hold(one: _Model, config: raysgd.EngineConfig) -> dict[str, Any]:
    """Return what this rank holds in a step, by kind, or why the engine does not have the strategy."""
    session = context.current()
    # All strategies are measured in the same processes, whichever of them hold one replica.
    session.identity = replace(session.identity, workers_per_replica=config.workers_per_replica)
    torch.manual_seed(0)
    try:
        return _step(one, config)
    except ConfigError as error:
        return {"refused": str(error)}
    except RuntimeError as error:
        return {"failed": str(error)}
    finally:
        gc.collect()


def _step(one: _Model, config: raysgd.EngineConfig) -> dict[str, int]:
    engine, model = raysgd.Engine(config), one.make().train()
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    batch = one.batch(one.num_rows * (config.micro_batches or 1))
    uses = []
    for _ in range(config.accumulation_steps):
        with engine.measure_activations():
            out = model(**batch)
            engine.backward(out if isinstance(out, torch.Tensor) else out.loss)
        uses.append(engine.memory())
        optimizer.step()
    held = {kind: max(getattr(use, kind) for use in uses) for kind in KINDS}
    return {**held, "optimizer": engine.memory().optimizer}

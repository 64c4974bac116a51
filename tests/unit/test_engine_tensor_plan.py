"""Plans of tensor parallelism: what is shared, and what is refused with which names; no process group is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from raysgd.engine.composing import compose
from raysgd.engine.config import EngineConfig
from raysgd.engine.tensor_parallel import check_own_plan, make_tensor_plan
from raysgd.engine.tensor_parallel.tensor_plan import fused_shard
from raysgd.errors import ConfigError
from support.engine_models import HIDDEN, build

#: torch's styles of layers whose inputs and outputs are whole on each rank, by the dim of the weight's rows or columns.
OUTPUTS_GATHERED, INPUTS_SPLIT = "ColwiseParallel to Replicate()", "RowwiseParallel from Replicate()"
COLUMNS, ROWS = "ColumnLinear Shard(dim=0) Shard(dim=0)", "RowLinear Shard(dim=1)"


def described(model: nn.Module, size: int = 2, sequence_parallel: bool = False) -> dict[str, str]:
    return {path: say(style) for path, style in make_tensor_plan(model, size, sequence_parallel).styles.items()}


def say(style: Any) -> str:
    if isinstance(style, ColwiseParallel):
        return f"ColwiseParallel to {style.output_layouts[0]!r}"
    if isinstance(style, RowwiseParallel):
        return f"RowwiseParallel from {style.input_layouts[0]!r}"
    return " ".join([style.layer.__name__, *map(repr, style.placements.values())])


def test_plan_shares_attention_and_feed_forward_layers() -> None:
    found = described(build("llama"))
    block = "model.layers.1."
    assert {found[block + f"self_attn.{name}_proj"] for name in "qkv"} == {COLUMNS}
    assert found[block + "self_attn.o_proj"] == found[block + "mlp.down_proj"] == ROWS
    assert found[block + "self_attn"] == "Region" and found[block + "mlp"] == "Region"
    assert block + "input_layernorm" not in found, "it is replicated"
    assert found["model.embed_tokens"] == "VocabularyEmbedding Shard(dim=0)" and found["lm_head"] == OUTPUTS_GATHERED


def test_plan_cuts_each_part_of_a_fused_layer() -> None:
    fused = "ColumnLinear _StridedShard(dim=1, sf=3) Replicate()"
    assert described(build("gpt2"))["transformer.h.0.attn.c_attn"] == fused


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_ranks_have_their_share_of_each_fused_part(num_parts: int) -> None:
    weight = torch.arange(4 * num_parts).view(-1, 1)
    shards, _ = fused_shard(0, num_parts)._split_tensor(weight, 2, with_padding=False)  # type: ignore[attr-defined]
    assert [each.flatten().tolist() for each in shards] == [
        [4 * part + row for part in range(num_parts) for row in rows] for rows in ((0, 1), (2, 3))
    ]


def test_plan_shares_features_where_the_vocabulary_does_not_divide() -> None:
    found = described(build("gpt2", vocabulary=97))
    assert found["transformer.wte"] == OUTPUTS_GATHERED and found["lm_head"] == INPUTS_SPLIT


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3", {"self_attn.q_norm": "Replicated", "self_attn": "Region"}),
        ("gpt_neox", {"attention.query_key_value": COLUMNS, "attention.dense": ROWS}),
        ("phi3", {"self_attn.qkv_proj": OUTPUTS_GATHERED, "mlp.down_proj": INPUTS_SPLIT}),
        ("starcoder2", {"mlp.c_fc": COLUMNS, "mlp.c_proj": ROWS, "mlp": "Region"}),
    ],
)
def test_plan_of_transformers_is_read(kind: str, expected: dict[str, str]) -> None:
    with torch.device("meta"):
        found = described(build(kind))
    blocks = "gpt_neox.layers" if kind == "gpt_neox" else "model.layers"
    assert {name: found[f"{blocks}.1.{name}"] for name in expected} == expected


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_neox", "granite", "mistral", "qwen2", "qwen3"])
def test_sequence_parallel_runs_the_blocks_of_planned_models(kind: str) -> None:
    found = described(build(kind), sequence_parallel=True)
    assert list(found.values()).count("SequenceBlock") == 2


def test_plan_is_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Transformer(HIDDEN, 4, 1, 1, 64)
    assert described(model)["decoder.layers.0.multihead_attn"].startswith("ShardedMultiheadAttention")


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("llama", 4, "model.layers.0.self_attn: 2 heads of k_proj (2 % 4 = 2)"),
        ("gpt2", 8, "transformer.h.0.attn: 4 heads (4 % 8 = 4)"),
        ("bert", 3, "bert.encoder.layer.0.attention: 4 heads (4 % 3 = 1)"),
        ("t5", 3, "encoder.block.0.layer.0.SelfAttention: 4 heads (4 % 3 = 1)"),
        ("encoder", 3, "encoder.layers.0: 64 features (64 % 3 = 1)"),
    ],
)
def test_size_that_does_not_divide_is_refused_with_the_arithmetic(kind: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match="does not divide") as problem:
        make_tensor_plan(build(kind), size)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "message"),
    [
        ("mixtral", False, "model.layers.0.mlp: transformers' plan gives its experts the style 'moe_tp_experts'"),
        (
            "minicpm3",
            False,
            "model.layers.0.self_attn: transformers' plan gives its kv_a_proj_with_mqa the style 'mla_",
        ),
        ("phi3", True, "model.layers.0: sequence_parallel=True needs that each rank has its own heads and features"),
    ],
)
def test_what_a_plan_of_transformers_needs_is_refused_by_name(kind: str, sequence_parallel: bool, message: str) -> None:
    with torch.device("meta"):
        model = build(kind)
    with pytest.raises(ConfigError, match="Give a plan of your own") as problem:
        make_tensor_plan(model, 2, sequence_parallel)
    assert message in str(problem.value)


def test_attention_with_another_forward_pass_is_refused_in_a_planned_model() -> None:
    model: Any = build("llama")
    attention = model.model.layers[1].self_attn

    class OtherLlamaAttention(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            outputs, weights = super().forward(hidden_states, **kwargs)
            return hidden_states + outputs, weights

    attention.__class__ = OtherLlamaAttention
    with pytest.raises(
        ConfigError, match=r"layers\.1\.self_attn: its class OtherLlamaAttention has a forward pass of its own"
    ):
        make_tensor_plan(model, 2)


class OtherLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class OtherAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_another_linear(model: Any) -> None:
    model.encoder.layers[1].linear2 = OtherLinear(64, HIDDEN)


def with_another_attention(model: Any) -> None:
    model.encoder.layers[1].self_attn = OtherAttention(HIDDEN, 4)


def with_an_adapter(model: Any) -> None:
    model.encoder.layers[1].down_sample = nn.Linear(HIDDEN, HIDDEN)


def with_another_width(model: Any) -> None:
    model.encoder.layers[1].linear2 = nn.Linear(32, HIDDEN)


def with_added_keys(model: Any) -> None:
    model.encoder.layers[1].self_attn = nn.MultiheadAttention(HIDDEN, 4, add_zero_attn=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_another_linear, "encoder.layers.1: it holds a OtherLinear where a plain linear layer is expected"),
        (
            with_another_attention,
            "encoder.layers.1.self_attn: its class OtherAttention changes the forward pass of MultiheadAttention",
        ),
        (with_an_adapter, "encoder.layers.1.down_sample: a Linear that no known layer uses"),
        (with_another_width, "encoder.layers.1: linear2 has 32 inputs, and 64 are expected"),
        (with_added_keys, "encoder.layers.1.self_attn: add_bias_kv=True and add_zero_attn=True"),
    ],
)
def test_unknown_layers_of_a_block_are_refused_by_name(change: Callable[[nn.Module], None], message: str) -> None:
    model = build("encoder")
    change(model)
    with pytest.raises(ConfigError, match="is not sure about") as problem:
        make_tensor_plan(model, 2)
    assert message in str(problem.value)
    assert "encoder.layers.0" not in str(problem.value)


def test_model_without_known_layers_is_refused_with_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"it has 0: Linear; 2: Linear\. Give a plan of your own"):
        make_tensor_plan(model, 2)


def test_names_alone_do_not_decide() -> None:
    """A layer outside of known layers stays whole, whatever its name says."""
    model: Any = build("encoder")
    model.output_query = nn.Linear(HIDDEN, HIDDEN)
    assert "output_query" not in described(model)


def test_sequence_parallel_refuses_blocks_that_it_does_not_know() -> None:
    model = nn.ModuleList([nn.ModuleDict({"attention": nn.MultiheadAttention(HIDDEN, 4)})])
    assert described(model)["0.attention"].startswith("ShardedMultiheadAttention")
    with pytest.raises(ConfigError, match="0: sequence_parallel=True does not know how a ModuleDict uses the sequence"):
        make_tensor_plan(model, 2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"layers.*.lineer1": ColwiseParallel()},
            "matches no module of the TransformerEncoder (did you mean 'layers.*.linear1'?)",
        ),
        ({"layers.1.linea1": ColwiseParallel()}, "(did you mean 'layers.1.linear1'?)"),
        ({"layers.*.linear1.weight": ColwiseParallel()}, "(did you mean 'layers.*.linear1'?)"),
        ({"linear1": ColwiseParallel()}, "tensor_plan['linear1'] matches no module"),
        ({}, "tensor_plan is empty, so that it shards no layer: leave it out"),
        ([("layers.*.linear1", ColwiseParallel())], "tensor_plan is a list; give a dict of module paths and styles"),
        ("auto", "tensor_plan is a str; give a dict"),
        (ColwiseParallel(), "tensor_plan is a ColwiseParallel; give a dict"),
        (ColwiseParallel, "tensor_plan is the class ColwiseParallel; give a dict"),
        (
            {"layers.*.linear1": "colwise"},
            "tensor_plan['layers.*.linear1'] is a str; give a style, such as ColwiseParallel(),",
        ),
        (
            {"layers.*.linear1": ColwiseParallel},
            "is the class ColwiseParallel; give a style, such as ColwiseParallel(),",
        ),
        (
            {"layers.*.norm1": RowwiseParallel()},
            "is a RowwiseParallel, which shards nn.Linear and nn.Embedding, and layers.0.norm1 is a LayerNorm: give",
        ),
    ],
    ids=str,
)
def test_own_plan_that_cannot_be_applied_is_refused(plan: Any, message: str) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    with pytest.raises(ConfigError) as problem:
        compose(EngineConfig(tensor_parallel=2), pytest.fail, model, None, plan)  # type: ignore[arg-type]
    assert message in str(problem.value)


def test_own_plan_is_not_combined_with_sequence_parallel() -> None:
    config = EngineConfig(tensor_parallel=2, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"tensor_plan is yours.*leave sequence_parallel out"):
        compose(config, pytest.fail, nn.Linear(8, 8), None, {"": ColwiseParallel()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [{"layers.*.linear1": ColwiseParallel(), "l*.1.linear[2]": RowwiseParallel()}, lambda model, mesh: None],
    ids=["styles", "function"],
)
def test_own_plan_of_layers_that_exist_is_allowed(plan: Any) -> None:
    check_own_plan(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), plan)

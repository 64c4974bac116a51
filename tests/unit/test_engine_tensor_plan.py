"""Plans of tensor parallelism: what is shared, and what is refused with which names; no process group is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raysgd.engine.tensor_parallel import make_tensor_plan
from raysgd.errors import ConfigError
from support.engine_models import HIDDEN, build


def described(model: nn.Module, size: int = 2, sequence_parallel: bool = False) -> dict[str, str]:
    return dict(make_tensor_plan(model, size, sequence_parallel).describe())


def test_plan_shares_attention_and_feed_forward_layers() -> None:
    found = described(build("llama"))
    block = "model.layers.1."
    assert {found[block + f"self_attn.{name}_proj"] for name in "qkv"} == {"outputs shared"}
    assert found[block + "self_attn.o_proj"] == found[block + "mlp.down_proj"] == "inputs shared"
    assert found[block + "self_attn"] == "heads shared" and found[block + "mlp"] == "features shared"
    assert found[block + "input_layernorm"] == "replicated"
    assert found["model.embed_tokens"] == "vocabulary shared" and found["lm_head"] == "outputs shared"


def test_plan_cuts_each_part_of_a_fused_layer() -> None:
    assert described(build("gpt2"))["transformer.h.0.attn.c_attn"] == "outputs shared, 3 fused parts"


def test_plan_shares_features_where_the_vocabulary_does_not_divide() -> None:
    found = described(build("gpt2", vocabulary=97))
    assert found["transformer.wte"] == "features shared" and found["lm_head"] == "inputs shared"


def test_plan_covers_every_parameter() -> None:
    for kind in ("gpt2", "llama", "bert", "bert, classifier", "t5", "t5, gated", "encoder", "encoder and decoder"):
        model = build(kind)
        owners = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
        assert owners <= make_tensor_plan(model, 2).styles.keys()


def test_plan_is_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Transformer(HIDDEN, 4, 1, 1, 64)
    assert described(model)["decoder.layers.0.multihead_attn"] == "heads shared"


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("llama", 4, "model.layers.0.self_attn: 2 key-value heads (2 % 4 = 2)"),
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
    assert described(model)["output_query"] == "replicated"


def test_sequence_parallel_refuses_blocks_that_it_does_not_know() -> None:
    model = nn.ModuleList([nn.ModuleDict({"attention": nn.MultiheadAttention(HIDDEN, 4)})])
    assert described(model)["0.attention"] == "heads shared"
    with pytest.raises(ConfigError, match="0: sequence_parallel=True does not know how a ModuleDict uses the sequence"):
        make_tensor_plan(model, 2, sequence_parallel=True)

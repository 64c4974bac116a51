"""The sizes of redco's table: each model fits the hardware it is listed with, and twice the layers do not.

The table gives model, length and hardware, for fp32 and Adam: 16 bytes for each parameter. GB are 10^9 bytes and nothing is
offloaded. The batch has one row for each device. A doubled model has twice the layers: 24 + 24 instead of 12 + 12 for
BART-Large. Models are made from configurations, on the meta device, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from raysgd.engine.planning import Plan, plan
from raysgd.errors import ConfigError


class Size(NamedTuple):
    """A row of the table. The engine shares OPT's layers by a plan of the user's own."""

    make: Callable[[int], nn.Module]
    billions: float
    length: int
    num_devices: int
    gb: int
    tensor_plan: dict[str, Any] | None = None


OPT_PLAN: dict[str, Any] = {
    **{f"model.decoder.layers.*.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "model.decoder.layers.*.self_attn.out_proj": RowwiseParallel(),
    "model.decoder.layers.*.fc1": ColwiseParallel(),
    "model.decoder.layers.*.fc2": RowwiseParallel(),
    "model.decoder.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def make_bart(times: int) -> nn.Module:
    return BartForConditionalGeneration(BartConfig(encoder_layers=12 * times, decoder_layers=12 * times))


def make_gpt2(times: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=36 * times, n_head=20))


def make_llama(times: int) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=32 * times))


def make_gptj(times: int) -> nn.Module:
    return GPTJForCausalLM(GPTJConfig(n_layer=28 * times))


def make_t5(times: int) -> nn.Module:
    sizes = {"d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128}
    layers = {"num_layers": 24 * times, "num_decoder_layers": 24 * times}
    return T5ForConditionalGeneration(T5Config(**sizes, **layers, decoder_start_token_id=0))


def make_opt(width: int, num_layers: int, num_heads: int) -> Callable[[int], nn.Module]:
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "num_attention_heads": num_heads}
    return lambda times: OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=num_layers * times))


SIZES = {
    "BART-Large": Size(make_bart, 0.406, 1024, 2, 10),
    "GPT2-Large": Size(make_gpt2, 0.774, 512, 2, 10),
    "LLaMA-7B": Size(make_llama, 6.74, 1024, 4, 40),
    "GPT-J-6B": Size(make_gptj, 6.05, 1024, 4, 40),
    "T5-11B": Size(make_t5, 11.3, 512, 8, 32),
    "OPT-13B": Size(make_opt(5120, 40, 40), 12.9, 1024, 8, 32, OPT_PLAN),
    "OPT-66B": Size(make_opt(9216, 64, 72), 65.7, 512, 64, 32, OPT_PLAN),
}


def plan_size(name: str, times: int, **options: Any) -> Plan:
    size = SIZES[name]
    ids = (size.num_devices, size.length)
    batch = {"input_ids": ids, "labels": ids}
    options.setdefault("tensor_plan", size.tensor_plan)
    return plan(lambda: size.make(times), batch, size.num_devices, size.gb * 1e9, **options)


@pytest.mark.parametrize("name", SIZES)
def test_model_fits_its_hardware(name: str) -> None:
    found = plan_size(name, 1)
    assert found.num_parameters / 1e9 == pytest.approx(SIZES[name].billions, rel=0.005)
    states = found.chosen.memory.parameters + found.chosen.memory.gradients + found.chosen.memory.optimizer
    assert states >= 16 * found.num_parameters / SIZES[name].num_devices
    assert states < found.chosen.memory.total <= 0.95 * SIZES[name].gb * 1e9


@pytest.mark.parametrize("name", [name for name in SIZES if name != "BART-Large"])
def test_doubled_model_fits_nowhere(name: str) -> None:
    # Even with all of the memory.
    with pytest.raises(ConfigError, match=r"fits nowhere: .*The smallest need is .*What would help: "):
        plan_size(name, 2, margin=0)


def test_doubled_bart_large_still_fits() -> None:
    assert plan_size("BART-Large", 2).chosen.is_fitting


def test_activations_decide_about_the_strategy_of_opt_66b() -> None:
    found = plan_size("OPT-66B", 1)
    # The shards of the states alone would fit with ZeRO-3; its gathered blocks and the activations do not.
    sharded = [one for one in found.candidates if one.config.zero_stage == 3 and one.config.workers_per_replica == 1]
    for one in sharded:
        assert one.memory.parameters + one.memory.gradients + one.memory.optimizer < 0.95 * 32e9
        assert not one.is_fitting

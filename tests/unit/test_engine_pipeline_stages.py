"""How blocks are divided among the stages of a pipeline."""

from __future__ import annotations

import warnings
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raysgd.engine.config import EngineConfig
from raysgd.engine.pipeline.chunks import check_split
from raysgd.engine.pipeline.stages import balance, read_model
from raysgd.errors import ConfigError
from support.engine_models import build


def largest(sizes: list[int], parts: list[range]) -> int:
    return max(sum(sizes[at] for at in part) for part in parts)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), num_stages=st.integers(1, 8))
def test_largest_stage_is_as_small_as_possible(sizes: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(sizes))
    found = balance(sizes, num_stages)
    assert [at for part in found for at in part] == list(range(len(sizes)))
    assert len(found) == num_stages and all(found)
    cuts = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), num_stages - 1))
    others = ([range(*ends) for ends in pairwise(cut)] for cut in cuts)
    assert largest(sizes, found) == min(largest(sizes, one) for one in others)


def test_stage_with_the_embedding_has_fewer_blocks() -> None:
    split = read_model(build("llama", num_blocks=6, vocabulary=960), 2)
    assert split.ties == () and split.ranges == (range(3), range(3, 6))
    tied = read_model(build("llama, biased and tied", num_blocks=6, vocabulary=960), 3)
    assert tied.ties == ({0: "model.embed_tokens.weight", 2: "lm_head.weight"},)
    assert [len(one) for one in tied.ranges] == [1, 4, 1]


@pytest.mark.parametrize("kind", ["bert to gpt2", "encoder"])
def test_model_of_another_class_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel cannot split a"):
        read_model(build(kind), 2)


def test_more_stages_than_blocks_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel=3 needs as many blocks, and model\.layers has 2\."):
        read_model(build("llama"), 3)


def test_blocks_of_two_stages_that_share_a_parameter_are_tied() -> None:
    model = build("gpt2")
    blocks = model.get_submodule("transformer.h")
    blocks[1].mlp = blocks[0].mlp  # type: ignore[index]
    names = {0: "transformer.h.0.mlp.c_fc.weight", 1: "transformer.h.1.mlp.c_fc.weight"}
    assert names in read_model(model, 2).ties


#: Sizes of all models; each takes those that its configuration has.
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: Two kinds of layers, which the base model looks up by index, and windows that are shorter than the sequence.
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {"use_sliding_window": True, **MIXED},
    "Qwen3": {"use_sliding_window": True, "head_dim": 8, **MIXED},
    "Mistral": {"sliding_window": 2},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, **MIXED},
    "Gemma3Text": {"head_dim": 8, **MIXED},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 0.5},
    "GPTNeoX": {"hidden_dropout": 0.1},
    "SmolLM3": {},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def make(name: str, head: str = "CausalLM", **sizes: Any) -> nn.Module:
    """Make a model of a family, with weights that are large enough to show what changes a loss."""
    warnings.filterwarnings("ignore")
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model: nn.Module = getattr(transformers, f"{name.removesuffix('Text')}For{head}")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_decoder_with_a_plan_of_transformers_is_split(name: str) -> None:
    key_value_heads = {} if name == "GPTNeoX" else {"num_key_value_heads": 2}
    model = make(name, **{"num_hidden_layers": 4, **key_value_heads, **MODELS[name]})
    for num_ranks, schedule in ((3, None), (2, "Interleaved1F1B"), (2, "ZBVZeroBubble")):
        split = read_model(model, num_ranks, schedule)
        assert sum(len(one) for one in split.ranges) == 4
        check_split(model, split)


@pytest.mark.parametrize(
    ("name", "head"),
    [("Roberta", "MaskedLM"), ("Roberta", "SequenceClassification"), ("Bert", "TokenClassification")],
)
def test_encoder_is_split_with_the_loss_of_its_head(name: str, head: str) -> None:
    model = make(name, head, num_hidden_layers=3)
    check_split(model, read_model(model, 3))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_encoder_and_decoder_are_split_at_any_block(kind: str, num_ranks: int) -> None:
    layers = {"T5": ("num_layers", "num_decoder_layers"), "Bart": ("encoder_layers", "decoder_layers")}[kind]
    heads = "num_heads" if kind == "T5" else "decoder_attention_heads"
    width = {"T5": {"d_kv": 8}, "Bart": {"encoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}}
    sizes = {heads: 4, layers[0]: 3, layers[1]: 2, "decoder_start_token_id": 0, **width[kind]}
    model = make(kind, "ConditionalGeneration", **sizes)
    split = read_model(model, num_ranks)
    check_split(model, split)
    assert any(len(tie) == min(num_ranks, 3) for tie in split.ties)


def test_model_that_computes_between_rows_is_refused() -> None:
    model = make("Qwen2", num_hidden_layers=2, num_key_value_heads=2)
    model.get_submodule("model.norm").register_forward_hook(lambda module, _, states: states - states.mean(0))
    with pytest.raises(ConfigError, match=r"the loss of its stages, .*, is not that of the model"):
        check_split(model, read_model(model, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_function": lambda **_: None}, "loss_function is one of your own"),
        ({"forward": None}, "it is no model of transformers, or has another forward pass"),
    ],
)
def test_loss_that_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    model = make("Qwen2", num_hidden_layers=2, num_key_value_heads=2)
    for name, value in change.items():
        if name == "forward":
            model.__class__ = type("Own", (type(model),), {"forward": lambda self, **inputs: inputs})
        else:
            setattr(model, name, value)
    with pytest.raises(ConfigError, match=message):
        read_model(model, 2)


def test_classifier_of_a_decoder_is_refused() -> None:
    model = make("Qwen2", "SequenceClassification", num_hidden_layers=2, num_key_value_heads=2)
    with pytest.raises(ConfigError, match="looks for the last token in input_ids"):
        read_model(model, 2)


def test_schedule_that_torch_cannot_run_for_an_encoder_and_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ZBVZeroBubble.*as the decoder of a T5ForConditionalGeneration does"):
        read_model(build("t5", num_blocks=4), 2, "ZBVZeroBubble")


def test_two_stages_for_each_rank_need_twice_the_blocks() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel=2 with LoopedBFS is 4 stages, and needs .* has 3\."):
        read_model(build("gpt2", num_blocks=3), 2, "LoopedBFS")


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ({"pipeline_schedule": "1F1B"}, "needs pipeline_parallel=2 or more"),
        ({"pipeline_schedule": "Zigzag", "pipeline_parallel": 2}, "Zigzag"),
        ({"pipeline_schedule": "DualPipeV", "pipeline_parallel": 2, "zero_stage": 3}, "on their own.* zero_stage=3"),
        ({"pipeline_schedule": "ZBVZeroBubble", "pipeline_parallel": 2, "compile": "model"}, "on their own.* compile="),
        (
            {"pipeline_schedule": "LoopedBFS", "pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
            "gives each rank two stages, and sequence_parallel=True",
        ),
    ],
)
def test_schedule_that_does_not_go_with_a_strategy_is_refused(strategies: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**strategies)

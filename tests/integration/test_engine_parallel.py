"""Tensor, sequence and pipeline parallelism on four gloo ranks, against the plain loop in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from support import engine_ranks, planned_ranks
from support.torch_ranks import RankGroup

#: A call waits for four processes, which import torch and transformers first.
pytestmark = pytest.mark.timeout(300)

#: The relative difference to the plain loop that is allowed in fp32: to the losses of 20 steps of AdamW, and to the gradients
#: of the first step. Later gradients are those of other weights: AdamW turns rounding errors of small gradients into steps.
TOLERANCE, LATER_TOLERANCE = 1e-5, 1e-4

#: The same for losses with autocast, and with parameters in bf16, where one loss has 8 bits.
AUTOCAST_TOLERANCE, BF16_TOLERANCE = 2e-3, 2e-2

#: Kinds of which each of four ranks can have one head; LLaMA has two key-value heads.
FOUR_HEADS = ["gpt2", "bert", "t5, gated", "encoder and decoder"]
ALL_KINDS = [
    *FOUR_HEADS,
    "gpt2, eager",
    "llama",
    "llama, biased and tied",
    "bert, classifier",
    "bert to bert",
    "bert to gpt2",
    "t5",
    "encoder",
    "encoder, sequence first",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(4) as group:
        yield group


def assert_equal(found: list[tuple[float, float, float]]) -> None:
    for losses, gradients, later_gradients in found:
        assert losses < TOLERANCE and gradients < TOLERANCE and later_gradients < LATER_TOLERANCE, found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_two_tensor_parallel_ranks_train_to_the_plain_losses(
    ranks: RankGroup, kind: str, sequence_parallel: bool
) -> None:
    assert_equal(ranks.run(engine_ranks.compare, kind, (2, 1, 2), sequence_parallel=sequence_parallel))


def test_models_with_a_plan_of_transformers_train_to_the_plain_losses(ranks: RankGroup) -> None:
    for kind in ("gemma3_text", "mistral", "phi3", "starcoder2"):
        assert_equal(ranks.run(engine_ranks.compare, kind, (2, 1, 2)))
    for kind in ("gemma3_text", "starcoder2"):
        assert_equal(ranks.run(engine_ranks.compare, kind, (2, 1, 2), sequence_parallel=True))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", FOUR_HEADS)
def test_four_tensor_parallel_ranks_train_to_the_plain_losses(
    ranks: RankGroup, kind: str, sequence_parallel: bool
) -> None:
    assert_equal(ranks.run(engine_ranks.compare, kind, (1, 1, 4), sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5, gated"])
def test_vocabulary_that_does_not_divide_trains_to_the_plain_losses(ranks: RankGroup, kind: str) -> None:
    assert_equal(ranks.run(engine_ranks.compare, kind, (2, 1, 2), vocabulary=97))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "bert"])
def test_fsdp_on_top_of_tensor_parallel_trains_to_the_plain_losses(
    ranks: RankGroup, kind: str, sequence_parallel: bool
) -> None:
    options = {"sequence_parallel": sequence_parallel, "data_parallel": "fsdp", "is_even": True}
    assert_equal(ranks.run(engine_ranks.compare, kind, (2, 1, 2), **options))


def test_replicas_of_tensor_parallel_models_train_to_the_plain_losses(ranks: RankGroup) -> None:
    options = {"data_parallel": "replicate", "is_even": True}
    assert_equal(ranks.run(engine_ranks.compare, "gpt2", (2, 1, 2), **options))


@pytest.mark.parametrize("is_autocast", [True, False], ids=["autocast", "parameters"])
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=["sp", "pp and sp"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_bf16_trains_to_the_losses_of_bf16_in_one_process(
    ranks: RankGroup, kind: str, shape: tuple[int, int, int], is_autocast: bool
) -> None:
    for losses, gradients, _ in ranks.run(engine_ranks.lower_precision, kind, shape, is_autocast):
        assert losses < (AUTOCAST_TOLERANCE if is_autocast else BF16_TOLERANCE) and gradients < 2e-2


@pytest.mark.parametrize("data_parallel", [None, "fsdp"], ids=["sp", "sp and fsdp"])
def test_gradients_are_clipped_by_the_norm_over_all_ranks(ranks: RankGroup, data_parallel: str | None) -> None:
    for norm, gradients in ranks.run(engine_ranks.clipped, "gpt2", data_parallel):
        assert norm < TOLERANCE and gradients < 1e-6


@pytest.mark.parametrize("data_parallel", [None, "fsdp"], ids=["tp", "tp and fsdp"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_parameters_are_dtensors_with_the_first_ranks_values(
    ranks: RankGroup, kind: str, data_parallel: str | None
) -> None:
    assert ranks.run(engine_ranks.parameters, kind, (2, 1, 2), False, data_parallel) == [[]] * 4


def test_ranks_have_a_share_of_the_parameters(ranks: RankGroup) -> None:
    for own, whole in ranks.run(engine_ranks.bytes_of_parameters, "llama", (2, 1, 2)):
        assert whole / 2 < own < whole / 2 * 1.05


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "starcoder2", "t5, gated"])
def test_ranks_drop_their_own_features_inside_regions_and_the_same_outside(
    ranks: RankGroup, kind: str, sequence_parallel: bool
) -> None:
    expected = {"losses": True, "replicated parameters": True, "own masks": False, "other masks": True, "finite": True}
    assert ranks.run(engine_ranks.random_numbers, kind, sequence_parallel) == [expected] * 4


def test_ranks_drop_their_own_attention_weights(ranks: RankGroup) -> None:
    assert ranks.run(engine_ranks.attention_masks_differ, "gpt2, eager") == [True] * 4


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert"])
def test_activation_checkpointing_draws_the_same_numbers_again(
    ranks: RankGroup, kind: str, sequence_parallel: bool
) -> None:
    assert max(ranks.run(engine_ranks.checkpointed, kind, sequence_parallel)) < 1e-6


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "encoder"])
def test_inference_and_generation_equal_the_plain_model(ranks: RankGroup, kind: str, sequence_parallel: bool) -> None:
    expected = {"loss": True} if kind == "encoder" else {"loss": True, "tokens": True}
    assert ranks.run(engine_ranks.inference, kind, sequence_parallel) == [expected] * 4


@pytest.mark.parametrize("kind", ["gpt2, eager", "bert"])
def test_returned_attention_weights_are_those_of_all_heads(ranks: RankGroup, kind: str) -> None:
    assert ranks.run(engine_ranks.attention_weights, kind) == [True] * 4


@pytest.mark.parametrize("kind", ["styles", "function"])
def test_own_plan_is_applied_and_other_layers_are_replicated(ranks: RankGroup, kind: str) -> None:
    for difference, odd in ranks.run(engine_ranks.own_plan, kind):
        assert difference < 1e-6 and odd == []


def test_own_plan_shards_an_embedding_with_a_buffer(ranks: RankGroup) -> None:
    assert max(ranks.run(engine_ranks.scaled_embedding)) < 1e-6


def test_own_plan_shards_a_tied_embedding_of_two_stages(ranks: RankGroup) -> None:
    assert max(ranks.run(engine_ranks.tied_in_stages)) < 1e-6


def test_torch_lacks_what_the_own_layers_do(ranks: RankGroup) -> None:
    """If one of these is False with a newer torch, its own style does it, and ours can go."""
    for found in ranks.run(engine_ranks.what_torch_lacks):
        assert all(found.values()), found


def test_random_numbers_continue_after_compose_as_on_the_first_rank(ranks: RankGroup) -> None:
    found = ranks.run(engine_ranks.drawn_after_compose)
    assert [drawn for drawn, _ in found] == [expected for _, expected in found]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_norms_of_torchs_sequence_parallel_train_as_plain_ones(ranks: RankGroup, zero_stage: int) -> None:
    for losses, norms in ranks.run(engine_ranks.sequence_parallel_norms, 4, zero_stage=zero_stage):
        assert losses == pytest.approx([0.0] * 4, abs=TOLERANCE) and norms < LATER_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "what", "message"),
    [
        ("gpt2", "odd length", "10 % 4 = 2. Pad batches to a multiple of 4."),
        ("gpt2", "hidden states", "output_hidden_states=True is not possible with sequence_parallel=True"),
        ("gpt2", "plan of another size", "The tensor plan is for 4 ranks, and the mesh has 2."),
        ("gpt2", "tied layers", "transformer.wte, lm_head share one parameter"),
        (
            "gpt2",
            "function for two axes",
            "It gets the tensor-parallel axis alone: give the mesh itself to parallelize_module",
        ),
        (
            "gpt2",
            "function with another module",
            "tensor_plan returned another module, a Sequential. Change the given model",
        ),
        ("gpt2", "called stage", "This model is one stage of a pipeline, and cannot be called"),
        ("bert", "blocks", "pipeline_parallel=2 needs as many blocks, and bert.encoder.layer has 1."),
        ("encoder", "class", "pipeline_parallel cannot split a EncoderModel"),
        ("gpt2", "unknown argument", "does not know what to do with head_weights of the batch"),
    ],
)
def test_refusal_says_what_is_not_possible(ranks: RankGroup, kind: str, what: str, message: str) -> None:
    for found in ranks.run(engine_ranks.raised, kind, what):
        assert found.startswith("ConfigError") and message in found


@pytest.mark.parametrize("kind", ["gpt2", "llama, biased and tied", "bert", "bert, classifier", "t5", "t5, gated"])
def test_pipeline_of_two_stages_trains_to_the_plain_losses(ranks: RankGroup, kind: str) -> None:
    assert_equal(ranks.run(engine_ranks.compare, kind, (2, 2, 1), micro_batches=4, num_blocks=3))


@pytest.mark.parametrize("kind", ["gpt2", "t5, gated"])
def test_pipeline_of_four_stages_trains_to_the_plain_losses(ranks: RankGroup, kind: str) -> None:
    assert_equal(ranks.run(engine_ranks.compare, kind, (1, 4, 1), micro_batches=8, num_blocks=5))


def test_pipeline_of_relu_blocks_trains_to_the_losses_of_the_plain_loop_in_its_micro_batches(ranks: RankGroup) -> None:
    # Rounding may move the input of a ReLU over zero, which changes gradients: after 20 steps of the plain loop alone, losses of
    # whole batches and of micro-batches differ by 4e-5; computed in fp64, by 4e-16. Stages add nothing to that.
    options = {"micro_batches": 8, "num_blocks": 5, "is_reference_split": True}
    assert_equal(ranks.run(engine_ranks.compare, "t5", (1, 4, 1), **options))


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("Interleaved1F1B", "t5, gated"),
        ("InterleavedZeroBubble", "gpt2"),
        ("LoopedBFS", "bert"),
        ("ZBVZeroBubble", "llama, biased and tied"),
        ("DualPipeV", "gpt2"),
    ],
)
def test_schedule_of_two_stages_for_each_rank_trains_to_the_plain_losses(
    ranks: RankGroup, schedule: str, kind: str
) -> None:
    options = {"schedule": schedule, "num_blocks": 5, "micro_batches": 8}
    assert_equal(ranks.run(engine_ranks.compare, kind, (2, 2, 1), **options))
    for difference, has_gradients in ranks.run(engine_ranks.evaluated, kind, schedule, 5):
        assert difference < TOLERANCE and not has_gradients


def test_several_stages_for_each_rank_with_fsdp_train_to_the_plain_losses(ranks: RankGroup) -> None:
    options = {"schedule": "Interleaved1F1B", "num_blocks": 5, "data_parallel": "fsdp", "is_even": True}
    assert_equal(ranks.run(engine_ranks.compare, "llama, biased and tied", (2, 2, 1), **options))


def test_several_tensor_parallel_stages_for_each_rank_train_to_the_plain_losses(ranks: RankGroup) -> None:
    options = {"schedule": "ZBVZeroBubble", "num_blocks": 5, "micro_batches": 4}
    assert_equal(ranks.run(engine_ranks.compare, "llama, biased and tied", (1, 2, 2), **options))


def test_rank_of_a_v_has_the_first_and_the_last_stage(ranks: RankGroup) -> None:
    names, copies = ranks.run(engine_ranks.stages, "gpt2", 4, "ZBVZeroBubble")[0]
    assert {name.split(".")[2] for name in names if ".h." in name} == {"0", "3"}
    assert "transformer.ln_f.weight" in names and copies == ()


@pytest.mark.parametrize("micro_batches", [1, 3, None])
def test_number_of_micro_batches_does_not_change_losses(ranks: RankGroup, micro_batches: int | None) -> None:
    assert_equal(ranks.run(engine_ranks.compare, "bert", (2, 2, 1), micro_batches=micro_batches, rows=7))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_pipeline_with_fsdp_trains_to_the_plain_losses(ranks: RankGroup, kind: str) -> None:
    options = {"data_parallel": "fsdp", "micro_batches": 2, "is_even": True}
    assert_equal(ranks.run(engine_ranks.compare, kind, (2, 2, 1), **options))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_pipeline_of_tensor_parallel_stages_trains_to_the_plain_losses(
    ranks: RankGroup, kind: str, sequence_parallel: bool
) -> None:
    options = {"sequence_parallel": sequence_parallel, "micro_batches": 4}
    assert_equal(ranks.run(engine_ranks.compare, kind, (1, 2, 2), **options))


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)], ids=["pp", "pp and sp"])
def test_pipeline_with_activation_checkpointing_trains_to_the_plain_losses(
    ranks: RankGroup, shape: tuple[int, int, int]
) -> None:
    assert_equal(ranks.run(engine_ranks.checkpointed_pipeline, "llama", shape))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_pipeline_accumulates_gradients_of_scaled_steps(ranks: RankGroup, kind: str) -> None:
    assert max(ranks.run(engine_ranks.accumulated, kind)) < TOLERANCE


def test_pipeline_evaluates_without_gradients(ranks: RankGroup) -> None:
    for difference, has_gradients in ranks.run(engine_ranks.evaluated, "gpt2"):
        assert difference < TOLERANCE and not has_gradients


def test_backward_of_a_pipeline_that_has_made_no_backward_passes_is_refused(ranks: RankGroup) -> None:
    for errors in ranks.run(engine_ranks.refused_backward, "gpt2"):
        assert ["call model.train() before" in one for one in errors] == [True, True]


def test_stage_keeps_the_names_of_its_parameters(ranks: RankGroup) -> None:
    found = ranks.run(engine_ranks.stages, "gpt2", 4)
    first, copies = found[0]
    last, last_copies = found[1]
    assert "transformer.wte.weight" in first and copies == ()
    assert "transformer.h.3.attn.c_attn.weight" in last and last_copies == ("lm_head.weight",)
    blocks = [{name.split(".")[2] for name in names if ".h." in name} for names in (first, last)]
    assert sorted(blocks[0] | blocks[1]) == ["0", "1", "2", "3"] and not blocks[0] & blocks[1]


def test_table_says_what_each_rank_has(ranks: RankGroup) -> None:
    strategies = {"tensor_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full", "precision": "bf16"}
    for text in ranks.run(planned_ranks.describe, "gpt2", **strategies):
        head, *rows = (line.split(maxsplit=1) for line in text.splitlines())
        assert head == ["module", "done to it"]
        block = "full activation checkpointing; FSDP over 2 ranks"
        assert dict(rows) == {
            "(model)": "layers sharded over 2 ranks; autocast to bf16; FSDP over 2 ranks",
            "transformer.h.0": block,
            "transformer.h.1": block,
        }


def test_table_says_which_stage_each_rank_has(ranks: RankGroup) -> None:
    for rank, text in enumerate(ranks.run(planned_ranks.describe, "gpt2", pipeline_parallel=2, zero_stage=1)):
        stage = rank % 2
        assert re.findall(r"^(\S+) +(.*)$", text, re.MULTILINE)[1:] == [
            (f"transformer.h.{stage}", f"stage {stage} of 2"),
            ("(model)", "optimizer state divided over 2 ranks"),
        ]


@pytest.mark.parametrize(
    ("zero_stage", "expected"),
    [
        (0, "DDP"),
        (1, "optimizer state divided over 4 ranks"),
        (2, "optimizer state and gradients divided over 4 ranks"),
        (3, "FSDP over 4 ranks"),
    ],
)
def test_table_says_what_is_divided(ranks: RankGroup, zero_stage: int, expected: str) -> None:
    for text in ranks.run(planned_ranks.describe, "bert", zero_stage=zero_stage):
        assert re.search(rf"^\(model\) +{expected}$", text, re.MULTILINE)
        assert ("bert.encoder.layer.1" in text) == (zero_stage == 3)

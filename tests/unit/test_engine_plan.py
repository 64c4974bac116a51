"""`plan`: what it chooses, what it says, and what it refuses."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from raysgd.engine.config import EngineConfig
from raysgd.engine.planning import Hardware, Plan, plan, predict_memory
from raysgd.engine.planning.candidates import Candidate
from raysgd.errors import ConfigError, UnknownArgumentError
from support.engine_models import build

WIDTH = 768
VOCABULARY = 4000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 12
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (12, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder of 12 layers and 12 heads: 91 million parameters, 1.46 GB of states with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(12)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


BATCH = {"ids": (8, 512), "labels": (8, 512)}
#: The engine does not know the class, so that its layers are sharded by a plan of the user's own.
TENSOR_PLAN: dict[str, Any] = {
    **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "layers.*.attention.o_proj": RowwiseParallel(),
    "layers.*.fc1": ColwiseParallel(),
    "layers.*.fc2": RowwiseParallel(),
    "embedding": RowwiseParallel(),
    "head": ColwiseParallel(),
}
STATES = 16 * 91_198_464


def make_plan(num_workers: int = 4, memory: float = 4e9, batch: Any = None, **options: Any) -> Plan:
    options.setdefault("tensor_plan", TENSOR_PLAN)
    return plan(Decoder, batch or BATCH, num_workers, memory, **options)


def test_plenty_of_memory_needs_plain_data_parallelism_at_most() -> None:
    found = make_plan(num_workers=1, memory=80e9)
    assert found.config == EngineConfig(fused_optimizer=True)
    assert found.chosen.data_parallel == 1
    assert found.loader_batch_size == 8


def test_less_memory_needs_more_strategies() -> None:
    totals, given = [], []
    for memory in (20e9, 2.5e9, 1e9):
        found = make_plan(memory=memory)
        totals.append(found.chosen.memory.total)
        given.append(found.chosen.num_strategies)
        assert found.chosen.memory.total <= memory * 0.95
    assert totals == sorted(totals, reverse=True)
    assert given == sorted(given)
    assert given[-1] > given[0]


def test_the_chosen_strategy_is_the_fastest_that_fits() -> None:
    found = make_plan(memory=1e9)
    fitting = [one for one in found.candidates if one.is_fitting]
    assert found.chosen in fitting
    assert found.chosen.step_s <= 1.02 * min(one.step_s for one in fitting)
    assert any(not one.is_fitting and one.step_s < found.chosen.step_s for one in found.candidates)


def test_printed_plan_has_a_table_and_the_reason() -> None:
    found = make_plan(memory=1.5e9)
    text = str(found)
    head, *rows = [line for line in text.splitlines() if line.endswith(("fits", "yes", "no"))]
    assert "91,198,464 parameters (layers: 12 layers) on 4 x 1.50 GB, of which 5% are kept free" in text
    assert (
        head.split() == "strategy rows parameters gradients optimizer activations buffers total GB s/step fits".split()
    )
    assert rows[0].startswith(">")
    assert found.chosen.describe() in rows[0]
    assert any(row.endswith("no") for row in rows)
    assert "Chosen: " in text
    # The reason against plain data parallelism has its numbers.
    assert "Not data x4" in found.reason
    assert "optimizer state 0.7" in found.reason


def test_plan_says_whether_its_times_are_calibrated() -> None:
    fixed: dict[str, Any] = {"zero_stage": 3, "tensor_parallel": 1, "activation_checkpointing": None}
    found = make_plan(**fixed)
    assert "s (not calibrated: times assume the speeds of a current data-center GPU)." in found.reason.splitlines()[0]
    assert "not calibrated" in str(found) and not found.is_calibrated
    found = make_plan(**fixed, hardware=Hardware(flops_per_s=3e14))
    assert "calibrated" not in str(found) and found.is_calibrated


def test_fixed_choices_are_not_varied() -> None:
    found = make_plan(zero_stage=3, tensor_parallel=2, activation_checkpointing="full", accumulation_steps=2)
    assert {one.config.zero_stage for one in found.candidates} == {3}
    assert {one.config.tensor_parallel for one in found.candidates} == {2}
    assert {one.config.activation_checkpointing for one in found.candidates} == {"full"}
    assert {one.config.accumulation_steps for one in found.candidates} == {2}
    assert {one.config.sequence_parallel for one in found.candidates} == {False}  # the plan of layers is the user's
    assert found.config.clip_grad_norm is None


def test_fields_that_a_plan_does_not_vary_are_passed_on() -> None:
    found = make_plan(clip_grad_norm=1.0, precision="bf16", weighted_gradients=True, compile="blocks")
    assert all(one.config.clip_grad_norm == 1.0 and one.config.precision == "bf16" for one in found.candidates)
    assert found.config.weighted_gradients
    assert found.config.compile == "blocks"


def test_choices_fixed_to_their_default_are_fixed() -> None:
    found = make_plan(memory=20e9, activation_checkpointing=None, tensor_parallel=1, pipeline_parallel=1)
    assert {one.config.activation_checkpointing for one in found.candidates} == {None}
    assert {one.config.workers_per_replica for one in found.candidates} == {1}


def test_rows_of_all_micro_batches_are_the_batch() -> None:
    for one in make_plan().candidates:
        count = one.config.accumulation_steps * (one.config.micro_batches or 1)
        assert one.num_rows * count * one.data_parallel == 8
        assert one.loader_batch_size * one.config.accumulation_steps * one.data_parallel == 8


@pytest.mark.parametrize(
    ("num_workers", "fixed", "message"),
    [
        (4, {"tensor_parallel": 3}, r"3 x 1 = 3 ranks hold one replica, which does not divide 4 workers"),
        (8, {"tensor_parallel": 8}, r"8 ranks do not divide 12 attention heads: 8 / 12|12 / 8 = 1\.50"),
        (16, {"pipeline_parallel": 16}, r"16 stages are more than the model's 12 layers"),
        (
            3,
            {"tensor_parallel": 1, "pipeline_parallel": 1},
            r"3 / \(1 x 1\) = 3 replicas do not divide the batch of 8 rows",
        ),
        (4, {"accumulation_steps": 3, "pipeline_parallel": 1}, r"no size of a micro-batch divides the batch"),
    ],
)
def test_impossible_fixed_choices_are_refused_with_the_arithmetic(num_workers: int, fixed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_plan(num_workers, **fixed)
    assert all(f"{name}={value!r}" in str(caught.value) for name, value in fixed.items())


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownArgumentError, match="zero_stage"):
        make_plan(zero_stages=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"memory": -1}, "memory_per_device"),
        ({"margin": 1.0}, "margin=1.0"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"hardware": 3}, "hardware=3"),
        ({"cpu_offload": True, "zero_stage": 1}, "cpu_offload=True needs zero_stage=3"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(**arguments)


def test_plan_that_fits_nowhere_names_the_smallest_need_and_what_would_help() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(num_workers=2, memory=0.5e9)
    text = str(caught.value)
    assert "fits nowhere: 91,198,464 parameters on 2 x 0.50 GB" in text
    assert re.search(r"The smallest need is 0\.7\d GB per device, with ", text)  # the states of two ranks are 0.73
    assert "optimizer state 0.3" in text
    assert "What would help: " in text
    assert "4 workers" in text


def test_fixed_choice_that_keeps_a_model_from_fitting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"would help: leaving out zero_stage=0 \("):
        make_plan(memory=1.2e9, zero_stage=0, tensor_parallel=1, pipeline_parallel=1)


def test_what_would_help_does_help() -> None:
    with pytest.raises(ConfigError, match=r"4 workers \("):
        make_plan(num_workers=2, memory=0.6e9)
    assert make_plan(num_workers=4, memory=0.6e9).chosen.is_fitting


def test_offload_keeps_states_in_the_host() -> None:
    found = make_plan(memory=1e9, cpu_offload=True)
    assert found.config.cpu_offload
    assert found.config.zero_stage == 3
    assert found.chosen.memory.host >= STATES / 4
    assert found.chosen.memory.optimizer == 0


def test_engine_may_refuse_strategies() -> None:
    def refuse(config: EngineConfig) -> str | None:
        return "tensor parallelism is not supported here" if config.tensor_parallel > 1 else None

    found = make_plan(refuse=refuse)
    assert {one.config.tensor_parallel for one in found.candidates} == {1}
    assert "tensor parallelism is not supported here" in found.refused.values()
    with pytest.raises(ConfigError, match="not supported here"):
        make_plan(refuse=refuse, tensor_parallel=2)


def test_models_that_the_engine_does_not_know_are_not_shared_or_split() -> None:
    found = make_plan(tensor_plan=None)
    assert {one.config.workers_per_replica for one in found.candidates} == {1}
    assert any("no layer that the tensor-parallel plan knows" in reason for reason in found.refused.values())
    assert any("pipeline_parallel cannot split a Decoder" in reason for reason in found.refused.values())
    with pytest.raises(ConfigError, match=r"No strategy with tensor_parallel=2 can work: .*Give a plan of your own"):
        make_plan(tensor_plan=None, tensor_parallel=2)
    with pytest.raises(ConfigError, match="no layer that the tensor-parallel plan knows"):
        predict_memory(Decoder, BATCH, EngineConfig(tensor_parallel=2), 2)


def test_own_plan_that_compose_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("tensor_plan['layers.*.fc3'] matches no module of the Decoder")):
        make_plan(tensor_plan={"layers.*.fc3": ColwiseParallel()})
    with pytest.raises(ConfigError, match=r"sequence_parallel=True divides .* and tensor_plan is yours"):
        make_plan(sequence_parallel=True)


def test_stages_of_an_encoder_and_a_decoder_are_planned() -> None:
    make, batch = partial(build, "t5"), {"input_ids": (4, 16), "labels": (4, 16)}
    found = plan(make, batch, 2, 80e9, pipeline_parallel=2)
    rows = dict.fromkeys(batch, (found.chosen.num_rows, 16))
    assert found.config.pipeline_parallel == 2
    assert found.chosen.memory == predict_memory(make, rows, found.config, 2)


def test_own_plan_says_how_layers_are_shared() -> None:
    half = {name: style for name, style in TENSOR_PLAN.items() if "attention" not in name}
    config = EngineConfig(tensor_parallel=2)
    whole, part = (predict_memory(Decoder, BATCH, config, 2, tensor_plan=one).parameters for one in (TENSOR_PLAN, half))
    attention = 12 * (4 * WIDTH * WIDTH + 3 * WIDTH) * 4
    assert part - whole == pytest.approx(attention / 2, rel=0.001)


def test_slow_connections_make_the_plan_choose_otherwise() -> None:
    fast, slow = (
        make_plan(memory=1.5e9, hardware=Hardware(bandwidth_bytes_per_s=bandwidth)) for bandwidth in (1e12, 1e8)
    )
    times = {repr(one.config): one.step_s for one in slow.candidates}
    assert times[repr(fast.config)] > 1.02 * slow.chosen.step_s


def test_prediction_of_a_plan_is_the_prediction_of_its_config() -> None:
    found = make_plan(memory=1.5e9)
    rows = {name: (found.chosen.num_rows, *shape[1:]) for name, shape in BATCH.items()}
    assert predict_memory(Decoder, rows, found.config, 4, tensor_plan=TENSOR_PLAN) == found.chosen.memory


def test_prediction_refuses_workers_that_do_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"num_workers=3 is not a multiple of tensor_parallel=2 x pipeline_parallel=1 = 2"
    ):
        predict_memory(Decoder, BATCH, EngineConfig(tensor_parallel=2), 3)


def test_model_without_repeated_layers_can_be_planned() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))

    found = plan(make, torch.zeros(16, 64), 2, 1e9)
    assert {one.config.workers_per_replica for one in found.candidates} == {1}
    assert any("2 stages are more than the model's 0 layers" in reason for reason in found.refused.values())


@pytest.mark.parametrize("given", [None, False])
def test_step_is_planned_fused_unless_the_user_chose_otherwise(given: bool | None) -> None:
    chosen = make_plan(num_workers=1, memory=80e9, fused_optimizer=given).chosen
    assert chosen.config.fused_optimizer is (given is None)


def test_optimizer_without_a_fused_step_needs_temporary_tensors() -> None:
    class Own(torch.optim.AdamW):
        pass

    kinds: tuple[Any, ...] = (torch.optim.AdamW, Own, torch.optim.SGD)  # SGD's fused step is for whole parameters
    fused, *others = (make_plan(num_workers=1, memory=80e9, optimizer_fn=kind).chosen for kind in kinds)
    assert fused.config.fused_optimizer
    for own in others:
        assert own.config.fused_optimizer is None
        assert own.memory.step == own.memory.gradients


class Reading(nn.Module):
    """Reads numbers out of a tensor while it is built, as models with a schedule of dropout rates do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layer = nn.Linear(4, 4)


class Careless(nn.Module):
    """Has a mistake that is not due to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4)  # type: ignore[call-arg]


def plan_layer(**changed: Any) -> Plan:
    arguments: dict[str, Any] = {
        "model_fn": lambda: nn.Linear(4, 4),
        "batch": torch.zeros(4, 4),
        "num_workers": 1,
        "memory_per_device": 1e9,
        "device": "cpu",
    }
    return plan(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_fn": Reading}, r"built without data: RuntimeError: Tensor\.item.*on device=\"cpu\""),
        ({"model_fn": lambda: nn.Linear(4, 4).to("cpu")}, r"NotImplementedError: Cannot copy.*must not move the model"),
        (
            {"optimizer_fn": torch.optim.LBFGS},
            r"LBFGS computes.*by a closure.*give an optimizer whose step\(\) needs no",
        ),
        (
            {"optimizer_fn": torch.optim.SparseAdam},
            r"SparseAdam cannot make a step without data: RuntimeError: Spars.*\. Its",
        ),
        ({"model_fn": lambda: nn.Linear(4, 4).requires_grad_(False)}, r"parameters of the model are frozen.*unfreeze"),
        ({"loss_fn": lambda model, batch: batch.sum()}, r"loss does not depend on a parameter.*Give loss_fn="),
        ({"batch": torch.zeros(0, 4)}, r"batch has 0 rows; give the rows of one optimizer step, 1 or more"),
        (
            {"memory_per_device": 40},
            r"memory_per_device=40 is less than a megabyte, since it is in bytes: give 40e9 for 40 GB",
        ),
        ({"memory_per_device": 80_000}, r"give 80000e6 for 80000 MB"),
        ({"plan": "auto"}, r"plan\(plan=\.\.\.\) is not an argument"),
    ],
)
def test_mistakes_are_refused_with_what_to_do(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_layer(**changed)


def test_other_errors_of_the_model_are_not_changed() -> None:
    with pytest.raises(TypeError, match="out_features"):
        plan_layer(model_fn=Careless)


@pytest.mark.parametrize(("config", "kind"), [({"zero_stage": 1}, "a dict"), (None, "a NoneType")])
def test_prediction_without_a_config_is_refused(config: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"config=.* is {kind}; give an EngineConfig\(\.\.\.\)"):
        predict_memory(lambda: nn.Linear(4, 4), torch.zeros(4, 4), config, 1)


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 0),
        ({"zero_stage": 1}, 1),
        ({"zero_stage": 3}, 3),
        ({"activation_checkpointing": "full"}, 1),
        ({"activation_checkpointing": "selective"}, 2),
        ({"accumulation_steps": 2}, 1),
        ({"tensor_parallel": 2}, 3),
        ({"tensor_parallel": 2, "sequence_parallel": True, "zero_stage": 2}, 6),
        ({"pipeline_parallel": 2, "zero_stage": 1, "accumulation_steps": 8}, 6),
    ],
    ids=str,
)
def test_simpler_strategies_have_a_lower_number(fields: dict[str, Any], number: int) -> None:
    unused: Any = None
    amounts: Any = {"data_parallel": 1, "num_rows": 1, "is_fitting": True}
    candidate = Candidate(config=EngineConfig(**fields), memory=unused, step_s=0.0, **amounts)
    assert candidate.num_strategies == number

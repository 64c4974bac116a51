"""What a traced step says, against the same step on real tensors, followed by torch's own memory tracker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.flop_counter import FlopCounterMode

from raysgd.engine.config import RECOMPUTED_EVERY, ActivationCheckpointing, EngineConfig
from raysgd.engine.model.recomputation import recompute
from raysgd.engine.planning import MemoryEstimate, predict_memory
from raysgd.engine.planning.memory_prediction import estimate_memory
from raysgd.engine.planning.trace import TracedModel
from raysgd.errors import ConfigError
from support.engine_models import batch, build
from support.planned_models import WIDTH, Perceptron, SmallModel, small_models

MODELS = small_models()
# Blocks of each model, for checkpointing.
STACKS = {"gpt2": ("transformer.h",), "llama": ("model.layers",), "encoder": ("encoder.layers",), "mlp": ("layers",)}


#: A user's plan for blocks that the engine does not know.
PAIRS = {"layers.*.fc1": ColwiseParallel(), "layers.*.fc2": RowwiseParallel()}


@dataclass
class Measured:
    """Bytes of a real step: states after the optimizer's step, activations at their peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(name: str) -> int:
    return MODELS[name].num_rows


def measure(model: nn.Module, batch: dict[str, torch.Tensor], *, has_autocast: bool = False) -> Measured:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            out = model(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        gradients = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
        optimizer.step()
    bytes_of = {getattr(kind, "name", kind): size for kind, size in peak.items()}
    states = sum(bytes_of[name] for name in ("PARAM", "BUFFER", "GRAD", "OPT"))
    return Measured(
        parameters=sum(one.nbytes for one in (*model.parameters(), *model.buffers())),
        gradients=gradients,
        optimizer=sum(one.nbytes for state in optimizer.state.values() for one in state.values()),
        activations=bytes_of["Total"] - states - sum(one.nbytes for one in batch.values()),
    )


def predict(one: SmallModel, num_rows: int, **fields: Any) -> MemoryEstimate:
    return predict_memory(one.make, one.batch(num_rows), EngineConfig(**fields), 1, device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_prediction_is_what_a_real_step_needs(name: str) -> None:
    model, num_rows = MODELS[name], rows_of(name)
    found, expected = predict(model, num_rows), measure(model.make(), model.batch(num_rows))
    assert found.parameters == pytest.approx(expected.parameters, rel=0.03)
    assert found.gradients == pytest.approx(expected.gradients, rel=0.03)
    assert found.optimizer == pytest.approx(expected.optimizer, rel=0.03)
    assert found.activations == pytest.approx(expected.activations, rel=0.2)


def test_gradients_of_large_parameters_are_no_activations() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])

    found = predict_memory(make, torch.randn(1, 256), EngineConfig(), 1, device="cpu")
    assert found.gradients == 4 * (256 * 256 + 256) * 4
    assert 4 * 256 * 4 <= found.activations <= 12 * 256 * 4, "those of four layers, and their gradients"


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder", "mlp", "cnn"])
def test_prediction_with_autocast(name: str) -> None:
    model, num_rows = MODELS[name], rows_of(name)
    found = predict(model, num_rows, precision="bf16")
    expected = measure(model.make(), model.batch(num_rows), has_autocast=True)
    assert found.activations == pytest.approx(expected.activations, rel=0.2)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", STACKS)
def test_prediction_with_activation_checkpointing(name: str, kind: ActivationCheckpointing) -> None:
    one, num_rows = MODELS[name], rows_of(name)
    model = one.make()
    for stack in STACKS[name]:
        recompute(list(model.get_submodule(stack).children())[:: RECOMPUTED_EVERY[kind]])
    if hasattr(model, "config"):
        model.config.use_cache = False  # as transformers does when it checkpoints: blocks fill the cache in both passes
    found, expected = predict(one, num_rows, activation_checkpointing=kind), measure(model, one.batch(num_rows))
    assert found.activations == pytest.approx(expected.activations, rel=0.2)
    assert found.activations < predict(one, num_rows).activations


def trace(make: Any, batch: Any, **options: Any) -> TracedModel:
    return TracedModel(make, batch, torch.optim.AdamW, **options)


def kept_by(model: TracedModel, num_rows: int) -> float:
    return sum(one.kept for one in model.levels(num_rows))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "encoder", "cnn"])
def test_flops_are_those_of_the_flop_counter(name: str) -> None:
    one, num_rows = MODELS[name], rows_of(name)
    traced, *_ = trace(one.make, one.batch(num_rows)).work(num_rows)
    model, batch = one.make().eval(), one.batch(num_rows)
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        out = model(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
    # Fused attention computes the scores again in the backward pass: up to a quarter more in attention alone.
    assert counter.get_total_flops() * 0.99 <= traced <= counter.get_total_flops() * 1.1


@pytest.mark.parametrize("name", ["llama", "opt", "t5"])
def test_blocks_that_stand_for_others_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = MODELS[name]
    quick = trace(one.make, one.batch(2))
    found = quick.levels(2)
    monkeypatch.setattr("raysgd.engine.planning.trace._find_twins", lambda stacks: list(range(len(quick.blocks))))
    whole = trace(one.make, one.batch(2))
    assert [level.block for level in found] == [level.block for level in whole.levels(2)]
    assert quick.work(2) == whole.work(2)
    assert kept_by(quick, 2) == pytest.approx(kept_by(whole, 2), rel=0.01)


class Deep(Perceptron):
    def __init__(self, depth: int = 100) -> None:
        super().__init__()
        self.layers = nn.ModuleList([type(self.layers[0])() for _ in range(depth)])


class Counting(Deep):
    """Counts its layers in its forward pass."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for index in range(100):
            x = self.layers[index](x)
        return nn.functional.cross_entropy(self.classifier(x), labels)


def test_trace_of_a_deep_model_takes_few_blocks_unless_it_counts_them() -> None:
    called = []

    def make(of: type[Deep]) -> nn.Module:
        model = of()
        for index, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, index=index: called.append(index))
        return model

    quick, whole = (trace(partial(make, of), MODELS["mlp"].batch(8)) for of in (Deep, Counting))
    levels = quick.levels(8)
    assert called == [0, 1, 99]
    assert [one.block for one in levels] == [None, *range(100), None]
    assert whole.levels(8) == levels
    assert called[-100:] == [*range(100)]


def test_tied_weights_count_once() -> None:
    found = trace(MODELS["gpt2"].make, MODELS["gpt2"].batch(1))
    assert found.num_parameters == sum(one.numel() for one in MODELS["gpt2"].make().parameters())
    assert ("transformer.wte.weight", "lm_head.weight") in [one.names for one in found.parameters]


def test_micro_batches_of_several_sizes_are_traced() -> None:
    found = trace(MODELS["mlp"].make, MODELS["mlp"].batch(64))
    assert kept_by(found, 64) == pytest.approx(64 * kept_by(found, 1), rel=0.01)
    assert kept_by(found, 8) == pytest.approx(8 * kept_by(found, 1), rel=0.01)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "encoder", "mlp"])
def test_tensor_parallel_layers_are_found(name: str) -> None:
    one = MODELS[name]
    found = trace(one.make, one.batch(4), tensor_plan=PAIRS if name == "mlp" else None)
    assert found.obstacle is None
    weights = [parameter for parameter in found.parameters if parameter.block is not None and len(parameter.shape) == 2]
    # All matrices of the blocks but T5's table of relative positions.
    whole = [parameter.names for parameter in weights if parameter.tensor_dim is None]
    assert [names for names in whole if "relative" not in names[0]] == []
    for alone, shared in zip(found.levels(4), found.levels(4, 2), strict=True):
        if alone.block is not None:
            assert shared.kept < alone.kept and shared.output == alone.output


def test_tensor_parallel_activations_are_those_of_the_megatron_papers() -> None:
    """Korthikanti et al. (2022), equations 1 and 2, for a layer with GELU, dropout and fused attention, in bytes of fp32.

    A layer keeps its input for two norms (8 sbh in fp32), the norms' outputs (8), queries, keys, values and the attention's
    output (16 / t), the MLP's two inner tensors (32 / t), and two masks of dropout (2, one byte each); with sequence
    parallelism everything but the norms' outputs is divided, as torch keeps these gathered.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.out_proj = nn.Linear(WIDTH, WIDTH)
            self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm1(x)
            q, k, v = (one(y).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
            x = x + self.dropout(self.out_proj(attended.transpose(1, 2).flatten(2)))
            return x + self.dropout(self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    plan = {f"layers.*.{name}_proj": ColwiseParallel() for name in "qkv"} | {"layers.*.out_proj": RowwiseParallel()}
    found = trace(Stack, {"x": torch.zeros(2, 256, WIDTH)}, tensor_plan=plan | PAIRS)
    sbh = 2 * 256 * WIDTH
    for count in (1, 2, 4):
        block, of_sequence = (found.levels(2, count, sequence_parallel=is_shared)[2] for is_shared in (False, True))
        assert block.kept == pytest.approx(sbh * (8 + 8 + 2 + 48 / count), rel=0.02)
        assert of_sequence.kept == pytest.approx(sbh * (8 + (8 + 2 + 48) / count), rel=0.02)


def test_plan_shards_what_the_engine_shards() -> None:
    """Output layers and norms of queries and keys too: the plan reads the engine's own plan."""
    found = {one.names[0]: one.tensor_dim for one in trace(partial(build, "qwen3"), batch("qwen3", 0)).parameters}
    block = "model.layers.1.self_attn."
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == 0
    assert [found[f"{block}{name}.weight"] for name in ("q_proj", "o_proj", "q_norm")] == [0, 1, None]


def test_function_for_an_unknown_model_is_not_planned() -> None:
    found = trace(MODELS["mlp"].make, MODELS["mlp"].batch(8), tensor_plan=lambda model, mesh: None)
    assert found.obstacle is not None
    assert "which layers the function given as tensor_plan shards" in found.obstacle


def test_bf16_keeps_half_and_bf16_true_adds_master_weights() -> None:
    one = MODELS["mlp"]
    fp32, autocast, true = (predict(one, 512, precision=kind) for kind in ("fp32", "bf16", "bf16-true"))
    assert autocast.parameters == fp32.parameters
    assert autocast.optimizer == fp32.optimizer
    assert autocast.activations < 0.8 * fp32.activations
    assert true.parameters == pytest.approx(fp32.parameters / 2)
    assert true.gradients == fp32.gradients  # those of the master weights
    assert true.optimizer == pytest.approx(fp32.optimizer * 1.5, rel=0.01)
    assert true.activations == pytest.approx(fp32.activations / 2, rel=0.05)


def test_gpu_keeps_less_for_attention_and_dropout() -> None:
    one = MODELS["encoder"]
    on_cpu, on_gpu = (
        predict_memory(one.make, one.batch(8), EngineConfig(), 1, device=device)  # type: ignore[arg-type]
        for device in ("cpu", "cuda")
    )
    assert on_gpu.activations < 0.8 * on_cpu.activations


def test_state_of_other_optimizers_is_counted() -> None:
    one = MODELS["mlp"]
    size = predict(one, 8).parameters
    for optimizer_fn, times in (
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (partial(torch.optim.Adam, amsgrad=True), 3),
    ):
        found = predict_memory(one.make, one.batch(8), EngineConfig(), 1, optimizer_fn=optimizer_fn)
        assert found.optimizer == pytest.approx(times * size, rel=0.001)


def test_frozen_parameters_have_no_gradients() -> None:
    def make() -> nn.Module:
        model = Perceptron()
        model.layers.requires_grad_(False)
        return model

    found = predict_memory(make, MODELS["mlp"].batch(8), EngineConfig(), 1)
    assert found.gradients == 4 * (10 * WIDTH + 10)
    assert found.optimizer == pytest.approx(2 * found.gradients, rel=0.01)


@pytest.mark.parametrize("kind", ["full", None])
def test_pipeline_stages_need_less_than_the_whole_model(kind: Any) -> None:
    one = MODELS["llama"]
    found = trace(one.make, one.batch(4))
    whole = estimate_memory(found, EngineConfig(activation_checkpointing=kind), data_parallel=1, num_rows=4)
    config = EngineConfig(pipeline_parallel=2, micro_batches=1, activation_checkpointing=kind)
    half = estimate_memory(found, config, data_parallel=1, num_rows=4)
    assert 0.4 * whole.parameters < half.parameters < 0.65 * whole.parameters
    assert half.activations < whole.activations


def test_shapes_stand_for_token_ids() -> None:
    one = MODELS["gpt2"]
    with_shapes = predict_memory(one.make, {"input_ids": (4, 64), "labels": (4, 64)}, EngineConfig(), 1)
    assert with_shapes == predict_memory(one.make, one.batch(4), EngineConfig(), 1)


def test_positional_batches_and_own_losses() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).repeat(1, 50), y)

    batch = (torch.zeros(32, 16), torch.zeros(32, dtype=torch.int64))
    own = predict_memory(make, batch, EngineConfig(), 1, loss_fn=loss_fn)
    default = predict_memory(make, batch[0], EngineConfig(), 1)
    assert own.parameters == default.parameters == 4 * (16 * 64 + 64 + 64 * 4 + 4)
    assert default.activations >= 32 * 64 * 4
    assert own.activations >= 32 * 50 * 4 * 4


def test_model_that_reads_values_is_refused() -> None:
    class Reading(Perceptron):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x, labels) * (2 if x.sum().item() > 0 else 1)

    with pytest.raises(
        ConfigError, match=r"without data: Reading\(\*\*batch\) raised .* must not depend on the values"
    ):
        predict_memory(Reading, MODELS["mlp"].batch(8), EngineConfig(), 1)


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        (
            torch.zeros(8, 3),
            None,
            r"Linear\(batch\) raised RuntimeError: .* The micro-batch has 0: \(8, 3\): give a batch such as",
        ),
        (
            {"y": torch.zeros(8, 4)},
            None,
            r"Linear\(\*\*batch\) raised TypeError: .*'y'.* The micro-batch has y: \(8, 4\): give a",
        ),
        (
            torch.zeros(8, 4),
            nn.functional.mse_loss,
            r"loss_fn\(model, batch\) raised .*loss_fn is called with the model and",
        ),
    ],
)
def test_call_that_fails_is_named_and_values_are_not_blamed(batch: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as problem:
        predict_memory(lambda: nn.Linear(4, 2), batch, EngineConfig(), 1, loss_fn=loss_fn)
    assert "values" not in str(problem.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4, 2), "labels": torch.zeros(3)}, r"first dimensions \[3, 4\]"),
        ({}, "neither tensors nor shapes"),
    ],
)
def test_batches_without_rows_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict_memory(Perceptron, batch, EngineConfig(), 1)


def test_model_fn_that_makes_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned int; it has to return a torch\.nn\.Module"):
        predict_memory(lambda: 3, (4, 2), EngineConfig(), 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="no parameters"):
        predict_memory(nn.Identity, torch.zeros(4, 2), EngineConfig(), 1)

"""What the ranks of `support.torch_ranks` do in the tests of tensor, sequence and pipeline parallelism."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import raysgd
from raysgd.checkpoint.codecs.torch import local_shards
from raysgd.engine.data_parallel.fully_sharded import fsdp_shard_placement
from raysgd.engine.model.local_tensors import local_of
from raysgd.engine.model.precision import autocast_forward
from raysgd.engine.pipeline.pipelined_model import PipelinedModel
from raysgd.engine.tensor_parallel import apply_tensor_plan, make_tensor_plan
from raysgd.errors import UsageError
from support.engine_models import STEPS, batch, build, differences, full, mesh, plain, split_options, train
from support.engine_steps import mean_over_ranks, session_of

Shape = tuple[int, int, int]


def prepare(
    kind: str,
    shape: Shape,
    sequence_parallel: bool,
    data_parallel: str | None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    **options: Any,
) -> tuple[nn.Module, PipelinedModel | None]:
    """Build a model on all ranks, of which only the first of each replica has the reference's weights, and apply a mesh."""
    axes = mesh(*shape)
    is_first = axes["pp"].get_local_rank() == axes["tp"].get_local_rank() == 0
    model = build(kind, seed=0 if is_first else 7, **options)
    pipeline = PipelinedModel(model, axes["pp"], schedule, micro_batches) if shape[1] > 1 else None
    if shape[2] > 1:
        apply_tensor_plan(model, axes["tp"], make_tensor_plan(model, shape[2], sequence_parallel))
    if data_parallel == "replicate":
        replicate(model, mesh=axes["dp"])
    elif data_parallel == "fsdp":
        policy: Any = {"mesh": axes["dp"], "shard_placement_fn": fsdp_shard_placement(shape[0])}
        names = ("GPT2Block", "LlamaDecoderLayer", "Qwen3DecoderLayer", "BertLayer")
        blocks = [one for one in model.modules() if type(one).__name__ in names]
        for block in (*blocks, model):
            fully_shard(block, **policy)
    return model, pipeline


def compare(
    kind: str,
    shape: Shape,
    *,
    sequence_parallel: bool = False,
    data_parallel: str | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    is_reference_split: bool = False,
    **options: Any,
) -> tuple[float, float, float]:
    """Train with and without strategies, and return the largest relative differences of losses and gradients.

    With ``is_reference_split`` the loop without strategies adds the gradients of as many micro-batches.
    """
    of_model, of_batch = split_options(options)
    model, pipeline = prepare(kind, shape, sequence_parallel, data_parallel, micro_batches, schedule, **of_model)
    dp = mesh(*shape)["dp"]

    def step(whole: dict[str, Tensor]) -> Tensor:
        own = whole
        if data_parallel is not None:
            own = {key: value.chunk(dp.size())[dp.get_local_rank()] for key, value in whole.items()}
        if pipeline is not None:
            loss = pipeline.step(own)
        else:
            loss = model(**own).loss
            loss.backward()
            loss = loss.detach()
        dist.all_reduce(loss, group=dp.get_group())
        return loss / dp.size()

    found = list(train(model, [batch(kind, one, **of_batch) for one in range(STEPS)], step))
    assert found[0][1], "no gradients"
    return differences(found, plain(kind, micro_batches if is_reference_split else None, **options))


def lower_precision(kind: str, shape: Shape, is_autocast: bool) -> tuple[float, float, float]:
    """Train with bf16 autocast, or parameters in bf16, with and without strategies; return the differences."""
    model, reference = build(kind), build(kind)
    if not is_autocast:
        model.bfloat16(), reference.bfloat16()
    axes = mesh(*shape)
    pipeline = PipelinedModel(model, axes["pp"], micro_batches=4) if shape[1] > 1 else None
    if shape[2] > 1:
        apply_tensor_plan(model, axes["tp"], make_tensor_plan(model, shape[2], sequence_parallel=True))
    if is_autocast:
        autocast_forward(model, torch.bfloat16), autocast_forward(reference, torch.bfloat16)

    def step_of(trained: nn.Module, one: dict[str, Tensor]) -> Tensor:
        if trained is model and pipeline is not None:
            return pipeline.step(one)
        loss: Tensor = trained(**one).loss
        loss.backward()
        return loss

    batches = [batch(kind, step) for step in range(STEPS)]
    found, expected = (list(train(one, batches, partial(step_of, one))) for one in (model, reference))
    return differences(found, expected)


def clipped(kind: str, data_parallel: str | None) -> tuple[float, float]:
    """Clip gradients with torch's own function; return the differences of the norm and of the clipped gradients."""
    model, _ = prepare(kind, (2, 1, 2), True, data_parallel)
    reference, one = build(kind), batch(kind, 0, is_even=True)
    norms = []
    for trained in (model, reference):
        trained(**one).loss.backward()
        norms.append(float(full(nn.utils.clip_grad_norm_(trained.parameters(), 0.1))))
    theirs = dict(reference.named_parameters())
    pairs = [(full(own.grad), theirs[name].grad) for name, own in model.named_parameters()]
    return abs(norms[0] / norms[1] - 1), max(float((own - other).abs().max()) for own, other in pairs)


def checkpointed_pipeline(
    kind: str, shape: Shape, schedule: str | None = None, num_blocks: int = 2
) -> tuple[float, float, float]:
    """Train stages with activation checkpointing; return the differences to the plain loop."""
    model, pipeline = prepare(kind, shape, True, None, 4, schedule, num_blocks=num_blocks)
    assert pipeline is not None
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    found = list(train(model, [batch(kind, one) for one in range(STEPS)], pipeline.step))
    return differences(found, plain(kind, num_blocks=num_blocks))


def same_on_all(value: Any) -> bool:
    """Whether all ranks have the same value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(one == values[0] for one in values)


def parameters(
    kind: str,
    shape: Shape,
    sequence_parallel: bool,
    data_parallel: str | None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    **options: Any,
) -> list[str]:
    """Return what is wrong with the parameters: their types, their values, and where checkpoints say that their shards lie."""
    model, _ = prepare(kind, shape, sequence_parallel, data_parallel, **options)
    expected = dict(build(kind, **options).named_parameters())
    wrong = []
    if model.state_dict().keys() != build(kind, **options).state_dict().keys():
        wrong.append("names of the state dict")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            wrong.append(f"{name} is not a DTensor")
            continue
        if not torch.equal(full(parameter), expected[name]):
            wrong.append(f"{name}: full_tensor()")
        local, count = parameter.to_local(), 0
        for index, place in local_shards(parameter).items():
            count += local[place].numel()
            if not torch.equal(local[place], expected[name][index.slices()]):
                wrong.append(f"{name}: {index}")
        if count != local.numel():
            wrong.append(f"{name}: shards of {count} values for {local.numel()}")
    return wrong


def bytes_of_parameters(kind: str, shape: Shape, sequence_parallel: bool = False) -> tuple[int, int]:
    """Return the numbers of values that this rank has and that the model has."""
    model, _ = prepare(kind, shape, sequence_parallel, None)
    return (
        sum(one.to_local().numel() for one in model.parameters() if isinstance(one, DTensor)),
        sum(one.numel() for one in model.parameters()),
    )


def random_numbers(kind: str, sequence_parallel: bool) -> dict[str, bool]:
    """Train with dropout on four ranks, and say what is equal on all of them."""
    torch.manual_seed(dist.get_rank())
    model, _ = prepare(kind, (1, 1, 4), sequence_parallel, None, dropout=0.3)
    masks: dict[str, Tensor] = {}

    def watch(name: str, output: Tensor, input: Tensor) -> None:
        masks.setdefault(name, (output == 0) & (input != 0))

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.register_forward_hook(lambda module, args, output, name=name: watch(name, output, args[0]))
    losses = [loss for loss, _ in train(model, [batch(kind, step) for step in range(3)])]
    replicated = [
        one.to_local().sum().item()
        for one in model.parameters()
        if isinstance(one, DTensor) and one.placements == (Replicate(),)
    ]
    inside = {name for name in masks if name.endswith("DenseReluDense.dropout")}
    own = inside if not sequence_parallel else {name for name in masks if re.search(r"\.\d+\.", name)}
    is_same = {name: same_on_all(mask.tolist()) for name, mask in masks.items()}
    return {
        "losses": same_on_all(losses),
        "replicated parameters": same_on_all(replicated),
        "own masks": any(is_same[name] for name in is_same if name in own),
        "other masks": all(is_same[name] for name in is_same if name not in own),
        "finite": all(math.isfinite(loss) for loss in losses),
    }


def attention_masks_differ(kind: str) -> bool:
    """Whether ranks drop different attention weights in heads that have the same weights."""
    model, _ = prepare(kind, (1, 1, 4), False, None, dropout=0.5)
    model.train()
    seen = []
    original = nn.functional.dropout

    def watch(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        output = original(input, p, training, inplace)
        if input.dim() == 4:
            seen.append((output == 0).tolist())
        return output

    nn.functional.dropout = watch
    try:
        model(**batch(kind, 0))
    finally:
        nn.functional.dropout = original
    assert seen
    return not same_on_all(seen)


def checkpointed(kind: str, sequence_parallel: bool) -> float:
    """Return how much activation checkpointing changes gradients, with dropout."""
    gradients = []
    for is_checkpointed in (False, True):
        model, _ = prepare(kind, (1, 1, 4), sequence_parallel, None, dropout=0.3)
        if is_checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        torch.manual_seed(3)
        gradients.append(list(train(model, [batch(kind, 0)])))
    return differences(gradients[1], gradients[0])[1]


def inference(kind: str, sequence_parallel: bool) -> dict[str, bool]:
    """Evaluate without gradients, and generate, with and without tensor parallelism."""
    model, _ = prepare(kind, (2, 1, 2), sequence_parallel, None)
    reference = build(kind)
    found = {}
    inputs = batch(kind, 0)
    with torch.no_grad():
        found["loss"] = torch.allclose(model.eval()(**inputs).loss, reference.eval()(**inputs).loss, rtol=1e-5)
        if hasattr(model, "generate"):
            rows = {key: inputs[key][:1] for key in ("input_ids", "attention_mask")}
            options: Any = {"max_new_tokens": 5, "do_sample": False}
            generated = [one.generate(**rows, **options) for one in (model, reference)]  # type: ignore[operator]
            found["tokens"] = torch.equal(*generated)
    return found


def attention_weights(kind: str) -> bool:
    """Whether the attention weights that a model returns are those of all heads."""
    model, _ = prepare(kind, (2, 1, 2), False, None)
    outputs = [one.eval()(**batch(kind, 0), output_attentions=True) for one in (model, build(kind))]
    return all(
        torch.allclose(own, other, atol=1e-6) for own, other in zip(*(one.attentions for one in outputs), strict=True)
    )


def own_plan(kind: str) -> tuple[float, list[str]]:
    """Train a small network with a user's plan; return the difference to a plain one, and parameters that are not DTensors."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan: Any = styles
    if kind == "function":

        def plan(model: nn.Module, mesh: Any) -> None:
            parallelize_module(model, mesh, styles)

    model, reference = network(), network()
    apply_tensor_plan(model, mesh(2, 1, 2)["tp"], plan)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for one in (model, reference):
        one(inputs).square().mean().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    odd = [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]
    return max(float((full(own.grad) - other.grad).abs().max()) for own, other in pairs), odd


def tied_in_stages() -> float:
    """Share GPT-2's embedding by a user's plan over two stages; return the difference of its gradient to the plain one."""
    axes, model, reference = mesh(1, 2, 2), build("gpt2"), build("gpt2")
    pipeline = PipelinedModel(model, axes["pp"], micro_batches=4)
    plan = {"transformer.wte": RowwiseParallel(input_layouts=Replicate())}
    apply_tensor_plan(model, axes["tp"], {**plan, "lm_head": ColwiseParallel(output_layouts=Replicate())})
    pipeline.step(batch("gpt2", 0))
    reference(**batch("gpt2", 0)).loss.backward()
    (tied,) = (one for name, one in model.named_parameters() if name in ("transformer.wte.weight", "lm_head.weight"))
    return float((full(tied.grad) - dict(reference.named_parameters())["transformer.wte.weight"].grad).abs().max())


def scaled_embedding() -> float:
    """Train Gemma's embedding, which has a buffer, with a user's plan; return the difference of gradients to a plain one."""
    model, reference = build("gemma3_text"), build("gemma3_text")
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    apply_tensor_plan(model, mesh(2, 1, 2)["tp"], {**plan, "lm_head": ColwiseParallel(output_layouts=Replicate())})
    for one in (model, reference):
        one(**batch("gemma3_text", 0)).loss.backward()
    theirs = dict(reference.named_parameters())
    return max(float((full(own.grad) - theirs[name].grad).abs().max()) for name, own in model.named_parameters())


def what_torch_lacks() -> dict[str, bool]:
    """Return whether torch's styles, and FSDP2 on top of them, cannot do what the engine has layers of its own for."""
    from transformers.pytorch_utils import Conv1D

    axes = mesh(2, 1, 2)
    tp, fused = axes["tp"], _StridedShard(0, split_factor=3)
    rows = DTensor.from_local(torch.ones(2, 3, 8), tp, [Replicate()])
    try:
        parallelize_module(Conv1D(12, 4), tp, ColwiseParallel())
        is_transposed = False
    except NotImplementedError:
        is_transposed = True
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    attention.in_proj_weight = nn.Parameter(distribute_tensor(attention.in_proj_weight.detach(), tp, [fused]))
    attention.in_proj_bias = nn.Parameter(distribute_tensor(attention.in_proj_bias.detach(), tp, [fused]))
    parallelize_module(attention.out_proj, tp, RowwiseParallel())
    with CommDebugMode() as heads:
        attention(rows, rows, rows)
    embedding = nn.Embedding(12, 4)
    parallelize_module(embedding, tp, RowwiseParallel(input_layouts=Replicate()))
    embedding(torch.arange(3)).sum().backward()
    whole, layer = torch.arange(48.0).view(12, 4), nn.Linear(4, 12, bias=False)
    layer.weight.data.copy_(whole)
    parallelize_module(layer, tp, ColwiseParallel())
    first_of_each = torch.cat([part.chunk(2)[tp.get_local_rank()] for part in whole.chunk(3)])
    gathered = nn.Linear(4, 12, bias=False)
    gathered.weight = nn.Parameter(distribute_tensor(whole.clone(), tp, [fused]))
    fully_shard(gathered, mesh=axes["dp"])
    region = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    parallelize_module(region, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    masks: list[Any] = []
    region[1].register_forward_hook(lambda module, args, output: masks.append((output == 0).tolist()))
    torch.manual_seed(0)
    region(torch.ones(2, 8))
    return {
        "a layer with a transposed weight": is_transposed,
        "heads of nn.MultiheadAttention, which it gathers": "all_gather" in str(heads.get_comm_counts()),
        "a gradient of an embedding's own rows": tuple(local_of(embedding.weight.grad).shape) == (12, 4),
        "each part of a fused layer": not torch.equal(layer.weight.to_local(), first_of_each),
        "a fused weight that FSDP2 divides along the same dim": not torch.equal(full(gathered.weight), whole),
        "own random numbers of each rank": same_on_all(masks),
    }


def drawn_after_compose() -> tuple[float, float]:
    """Return the first random number after compose, and what the first rank of the replica would draw without it."""
    rank = dist.get_rank()
    model = build("gpt2")
    torch.manual_seed(rank - rank % 2)
    torch.rand(3)
    expected = float(torch.rand(()))
    torch.manual_seed(rank)
    torch.rand(3)
    with session_of(rank, dist.get_world_size(), workers_per_replica=2):
        raysgd.Engine(tensor_parallel=2).compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        return float(torch.rand(())), expected


def raised(kind: str, what: str) -> str:
    """Return the message of what a rank raises."""
    plans: dict[str, Any] = {
        "plan of another size": lambda model: make_tensor_plan(model, 4),
        "tied layers": lambda _: {"transformer.wte": RowwiseParallel()},
        "function for two axes": lambda _: lambda model, axes: (model, axes["tensor_parallel"]),
        "function with another module": lambda _: lambda model, axes: nn.Sequential(model),
    }
    try:
        if what == "odd length":
            model, _ = prepare(kind, (1, 1, 4), True, None)
            model.train()(**batch(kind, 0, length=10))
        elif what == "hidden states":
            model, _ = prepare(kind, (1, 1, 4), True, None)
            model(**batch(kind, 0), output_hidden_states=True)
        elif what in plans:
            apply_tensor_plan(build(kind), mesh(2, 1, 2)["tp"], plans[what](build(kind)))
        elif what == "called stage":
            PipelinedModel(build(kind), mesh(2, 2, 1)["pp"]).module(**batch(kind, 0))
        elif what == "blocks":
            PipelinedModel(build(kind, num_blocks=1), mesh(2, 2, 1)["pp"])
        elif what == "unknown argument":
            pipeline = PipelinedModel(build(kind), mesh(2, 2, 1)["pp"])
            pipeline.step({**batch(kind, 0), "head_weights": torch.ones(8)})
        else:
            PipelinedModel(build(kind), mesh(2, 2, 1)["pp"])
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def accumulated(kind: str) -> float:
    """Return the difference of gradients of two pipeline steps to those of two plain ones, scaled by a half each."""
    model, reference = build(kind), build(kind)
    pipeline = PipelinedModel(model, mesh(2, 2, 1)["pp"], micro_batches=4)
    pipeline.scale = lambda batch: 0.5
    for step in range(2):
        pipeline.step(batch(kind, step))
        (reference(**batch(kind, step)).loss / 2).backward()
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    norm = torch.stack([one.grad.norm() for one in reference.parameters() if one.grad is not None]).norm()
    own = model.named_parameters(remove_duplicate=False)
    return max(float((one.grad - theirs[name].grad).norm() / norm) for name, one in own if one.grad is not None)


def stages(kind: str, num_blocks: int, schedule: str | None = None) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of a stage's parameters, and which of them are copies."""
    pipeline = PipelinedModel(build(kind, num_blocks=num_blocks), mesh(2, 2, 1)["pp"], schedule)
    return [name for name, _ in pipeline.module.named_parameters()], pipeline.copied_parameters


def evaluated(kind: str, schedule: str | None = None, num_blocks: int = 2) -> tuple[float, bool]:
    """Return the difference of an evaluation's loss to the plain one, and whether gradients came of it."""
    model, reference = build(kind, num_blocks=num_blocks).eval(), build(kind, num_blocks=num_blocks).eval()
    pipeline = PipelinedModel(model, mesh(2, 2, 1)["pp"], schedule)
    loss = pipeline.evaluate(batch(kind, 0, rows=6))
    expected = reference(**batch(kind, 0, rows=6)).loss
    return abs(float(loss / expected.detach()) - 1), any(one.grad is not None for one in model.parameters())


def refused_backward(kind: str) -> list[str]:
    """Return the errors of a pass in evaluation mode, and of a second one for the same loss of a pipeline."""
    errors = []
    with session_of(dist.get_rank(), dist.get_world_size(), 2):
        engine, model = raysgd.Engine(pipeline_parallel=2), build(kind)
        model, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for is_training in (False, True):
            loss = model.train(is_training)(**batch(kind, 0)).loss
            if is_training:
                engine.backward(loss)
            try:
                engine.backward(loss)
            except UsageError as error:
                errors.append(str(error))
    return errors


def _normalized() -> nn.Module:
    torch.manual_seed(0)
    layers = {"embed": nn.Linear(8, 16), "norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}
    layers |= {"last_norm": nn.LayerNorm(16), "head": nn.Linear(16, 4)}
    return nn.Sequential(OrderedDict(layers))


def _rows_of_step(step: int) -> Tensor:
    return torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(step))


def sequence_parallel_norms(num_steps: int, **strategies: Any) -> tuple[list[float], float]:
    """Train with a function that uses torch's ``SequenceParallel``, by SGD; return the losses and how far the norms are off.

    The function is that of Lightning Fabric's ``ModelParallelStrategy``. The weights after steps of SGD are as far from the
    plain loop's as the gradients are.
    """
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    def parallelize(model: nn.Module, axis: Any) -> nn.Module:
        return parallelize_module(model, axis, styles)

    with session_of(dist.get_rank(), dist.get_world_size(), workers_per_replica=2):
        engine = raysgd.Engine(tensor_parallel=2, **strategies)
        model, reference = _normalized(), _normalized()
        model, optimizer, _, _, _ = engine.compose(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), tensor_plan=parallelize
        )
        plain_optimizer, losses = torch.optim.SGD(reference.parameters(), lr=0.1), []
        for step in range(num_steps):
            rows = _rows_of_step(step)
            loss = model(rows.chunk(raysgd.data_parallel_size())[raysgd.data_parallel_rank()]).square().mean()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            expected = reference(rows).square().mean()
            expected.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            losses.append(mean_over_ranks([loss.detach()]) / float(expected.detach()) - 1)
        theirs, starts = dict(reference.named_parameters()), dict(_normalized().named_parameters())
        found = []
        for name, own in model.named_parameters():
            if "norm" in name:
                moved = (theirs[name] - starts[name]).norm()
                found.append(float((full(own) - theirs[name]).norm() / moved))
        return losses, max(found)

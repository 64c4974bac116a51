"""``Engine(plan="auto")``: choose the strategies where a model is composed. Worker side.

Rank 0 chooses, from the memory of the smallest device, and all ranks get its plan. Nothing of the user's is changed: a copy of
the model without data is traced, and rows are read from the loader's dataset, not from the loader.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from raysgd._util.logs import get_logger
from raysgd.engine.config import PLAN_FIELDS, EngineConfig
from raysgd.engine.planning.candidates import Hardware, Search
from raysgd.engine.planning.strategy_plan import FACTORS, Change, Plan, choose_fused_step, make_plan
from raysgd.engine.planning.trace import Batch, DeviceType, LossFn, TracedModel, compute_loss
from raysgd.errors import ConfigError
from raysgd.session import api, context
from raysgd.torch.devices import device
from raysgd.torch.samplers import seeded
from raysgd.workers.liveness.memory_use import MemoryFiles

_MARGIN = 0.05
_GIVE_BATCH = 'give engine.compose(sample_batch=...), a batch as the training loop gets it, for plan="auto"'
#: Optimizers that update each number of a parameter by itself, so that ranks can update parts of parameters.
_ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip


def choose_plan(config: EngineConfig, given: frozenset[str], **composed: Any) -> Plan:
    """Choose the strategies that are not given. All ranks call it, and get the same plan.

    Args:
        config: The strategies, with ``plan="auto"``.
        given: Names of the fields that were chosen by hand, and stay as they are.
        **composed: The arguments of `Engine.compose` on which a plan depends.

    Raises:
        ConfigError: No strategy fits, or the model cannot be traced; on all ranks.
    """
    memory = _find_smallest_memory(config.memory_per_device)
    decided: list[Any] = [None]
    if api.world_rank() == 0:
        try:
            with seeded(0):  # datasets draw random numbers when a row is read; those of the loop stay as they are
                plan = _choose(config, given, memory, **composed)
            decided = [plan]
            chosen, *reasons = plan.reason.splitlines()
            get_logger().info(f'plan="auto": {chosen[:1].lower()}{chosen[1:]} {reasons[0] if reasons else ""}'.rstrip())
        except ConfigError as error:
            decided = [error]
        except BaseException as error:
            # The others would wait for the plan until their time is up.
            _broadcast([ConfigError(f'plan="auto" failed on rank 0: {type(error).__name__}: {error}')])
            raise
    found = _broadcast(decided)
    if isinstance(found, ConfigError):
        raise found
    assert isinstance(found, Plan)
    return found


def _choose(
    config: EngineConfig,
    given: frozenset[str],
    memory: float,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    train_dataloader: DataLoader[Any] | None,
    sample_batch: Batch,
    loss_fn: LossFn | None,
    tensor_plan: Any,
) -> Plan:
    if optimizer is None:
        raise ConfigError(
            'plan="auto" needs the optimizer, whose state takes memory: give engine.compose(optimizer=...).'
        )
    kind: DeviceType = "cuda" if device().type == "cuda" else "cpu"
    # A step stays that of the batches that the loop gets: how many it accumulates is not chosen.
    fixed = {name: getattr(config, name) for name in (*sorted(given - set(PLAN_FIELDS)), "accumulation_steps")}
    fixed = choose_fused_step(fixed, type(optimizer), kind)
    traced = TracedModel(
        lambda: _copy_without_data(model),
        _read_batch(train_dataloader) if sample_batch is None else sample_batch,
        lambda parameters: _copy_of_optimizer(optimizer, parameters),
        loss_fn=loss_fn or _compute_loss,
        precision=config.precision,
        device=kind,
        tensor_plan=tensor_plan,
    )
    traced.work(traced.num_rows)  # for traced.returns_loss
    identity = context.current().identity
    search = Search(
        model=traced,
        num_workers=identity.world_size,
        batch_rows=traced.num_rows * config.accumulation_steps * identity.data_parallel_size,
        workers_per_replica=identity.workers_per_replica,
        limit_bytes=memory * (1 - _MARGIN),
        hardware=Hardware(),
        fixed=fixed,
        refuse=lambda one: _find_obstacle(one, given, optimizer, traced),
    )
    return make_plan(search, memory, _list_changes(search, given), kept="accumulation_steps")


def _list_changes(search: Search, given: frozenset[str]) -> list[list[Change]]:
    """List what may help if nothing fits: smaller batches, more workers with as many rows each, and larger replicas."""
    smaller, more, larger = [list[Change]() for _ in range(3)]
    count, steps = search.model.num_rows, search.fixed["accumulation_steps"]
    for factor in (one for one in range(2, count + 1) if count % one == 0):
        rows, fixed = count // factor, {**search.fixed, "accumulation_steps": steps * factor}
        name = f"batches of {rows} row{'s' * (rows > 1)} with accumulation_steps={steps * factor}"
        smaller.append((name, {"fixed": fixed}))
    for factor in FACTORS:
        workers, each = search.num_workers * factor, (search.workers_per_replica or 1) * factor
        if search.num_workers > 1:
            fields = {"num_workers": workers, "batch_rows": search.batch_rows * factor}
            more.append((f"{workers} workers", fields))
        is_given = bool({"tensor_parallel", "pipeline_parallel"} & given)
        if not (is_given or search.num_workers % each or search.batch_rows % factor):
            fields = {"workers_per_replica": each, "batch_rows": search.batch_rows // factor}
            larger.append((f"Trainer(..., workers_per_replica={each})", fields))
    return [smaller, more, larger]


def _find_obstacle(config: EngineConfig, given: frozenset[str], optimizer: Optimizer, model: TracedModel) -> str | None:
    """Return why a strategy that was not given would change what the loop computes, or None."""
    name = type(optimizer).__name__
    if config.zero_stage and "zero_stage" not in given and type(optimizer) not in _ELEMENTWISE:
        return (
            f"it is not known whether {name} updates each number of a parameter by itself, as ZeRO needs; with zero_stage= it "
            "is used all the same"
        )
    if config.pipeline_parallel > 1 and "pipeline_parallel" not in given and not model.returns_loss:
        return (
            "a pipeline returns the model's loss alone, and the sample batch is not a dict from which the model computes its "
            "loss; with pipeline_parallel= it is used all the same"
        )
    return None


def _compute_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the loss as the training loop probably does: call the model with the part of a batch that it takes."""
    return compute_loss(model, _select_arguments(model, batch))


def _select_arguments(model: nn.Module, batch: Batch) -> Batch:
    """Return the part of a batch that the model's ``forward`` takes: labels may be for the loop's own loss."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {one.kind for one in parameters}
    if isinstance(batch, Mapping) and inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {one.name for one in parameters}
        return {key: value for key, value in batch.items() if key in names}
    if isinstance(batch, (tuple, list)) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(batch[: sum(one.kind in positional for one in parameters)])
    return batch


# -- what is planned ------------------------------------------------------------------------------------------------------


def _read_batch(loader: DataLoader[Any] | None) -> Batch:
    """Make a batch of the first rows of a loader's dataset. The loader is not started, so that its order stays as it is."""
    if loader is None:
        raise ConfigError(f"there is no train_dataloader from which a batch could be read: {_GIVE_BATCH}.")
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, whose rows can be read once: {_GIVE_BATCH}."
        )
    size = loader.batch_size
    if size is None and isinstance(loader.batch_sampler, BatchSampler):
        size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None and loader.batch_sampler is not None:
        raise ConfigError(
            f"{type(loader.batch_sampler).__name__} does not say how many rows a batch has: {_GIVE_BATCH}."
        )
    try:
        if size is None:  # the dataset has whole batches
            return loader.collate_fn(dataset[0])
        indices = range(min(size, len(dataset)))
        many = getattr(dataset, "__getitems__", None)
        return loader.collate_fn(many(list(indices)) if callable(many) else [dataset[index] for index in indices])
    except Exception as error:
        raise ConfigError(
            f"the first rows of {type(dataset).__name__} cannot be read ({type(error).__name__}: {error}): {_GIVE_BATCH}."
        ) from error


def _copy_without_data(model: nn.Module) -> nn.Module:
    """Copy a model; parameters and buffers of the copy are on the meta device."""
    made: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        made[id(tensor)] = empty
    try:
        return copy.deepcopy(model, made)
    except Exception as error:
        raise ConfigError(
            f'plan="auto" works on a copy of the model, and {type(model).__name__} cannot be copied ({type(error).__name__}: '
            f"{error}): choose the strategies by raysgd.engine.plan(...), and give Engine(plan.config)."
        ) from error


def _copy_of_optimizer(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Make an optimizer of the same class and settings for other parameters, without state and without the user's hooks."""
    made: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # which schedulers replace
    hooks: dict[str, Any] = {
        name: OrderedDict() for name, value in own.items() if name.endswith("_hooks") and isinstance(value, dict)
    }
    group = {**optimizer.param_groups[0], "params": parameters}
    vars(made).update(own, **hooks, state=defaultdict(dict), param_groups=[group])
    return made


# -- ranks ----------------------------------------------------------------------------------------------------------------


def _find_smallest_memory(given: float | None) -> float:
    """Return the bytes of the smallest device of all ranks; ranks that share a device have equal parts of it."""
    owner, size = ("given", given) if given is not None else _find_own_memory()
    found = _gather((owner, size))
    ranks = Counter(owner for owner, _ in found)
    if any(size is None for _, size in found):
        raise ConfigError('the memory of a node cannot be read: give memory_per_device= in bytes, with plan="auto".')
    return min(float(size) / (1 if owner == "given" else ranks[owner]) for owner, size in found)


def _find_own_memory() -> tuple[str, float | None]:
    """Return the name of this rank's device or node, and its bytes."""
    own = device()
    if own.type == "cuda":
        properties = torch.cuda.get_device_properties(own)
        return f"cuda {properties.uuid}", properties.total_memory
    node = f"node {context.current().identity.node_rank}"
    return node, min((pool.limit_bytes for pool in MemoryFiles().pools_of(os.getpid())), default=None)


def _gather(value: Any) -> list[Any]:
    found = [value] * api.world_size()
    if api.world_size() > 1:
        dist.all_gather_object(found, value)
    return found


def _broadcast(values: list[Any]) -> Any:
    if api.world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]

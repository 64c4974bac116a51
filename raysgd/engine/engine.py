"""`Engine`: applies strategies to a model, its optimizer, scheduler and loaders, and makes the steps. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from raysgd._util.text import with_article
from raysgd.engine.accumulation import Accumulation
from raysgd.engine.attached import AttachedHook
from raysgd.engine.blocks import find_blocks
from raysgd.engine.config import EngineConfig
from raysgd.engine.gradients import global_norm, scale
from raysgd.engine.memory import MemoryUse, measure
from raysgd.engine.optimizer import EngineOptimizer, follow_steps, replace_parameters
from raysgd.engine.pieces import OptimizerPieces
from raysgd.engine.precision import DTYPES, LossScale, autocast_forward, cast_inputs
from raysgd.engine.recomputation import recompute
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.devices import device
from raysgd.torch.loader import PreparedLoader, prepare_data_loader
from raysgd.torch.meshes import mesh as make_mesh
from raysgd.torch.model import is_wrapped, prepare_model
from raysgd.torch.restoring import restore

_END = object()


class Engine:
    """Applies strategies for speed and large models to a training loop. ::

        engine = raysgd.Engine(precision="bf16", zero_stage=3)
        model, optimizer, lr_scheduler, train_loader, eval_loader = engine.compose(
            model=model, optimizer=optimizer, lr_scheduler_fn=schedule, train_dataloader=loader
        )
        for batch in train_loader:
            loss = model(**batch).loss
            engine.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    Without strategies the losses are those of the loop without the engine. It works in a ``train_func``, and alone as a world
    of one.

    Args:
        config: All strategies at once, in place of ``strategies``.
        **strategies: Fields of `raysgd.engine.EngineConfig`.

    Attributes:
        config: The strategies.

    Raises:
        ConfigError: A strategy does not exist, or needs other workers than the Trainer has.
    """

    def __init__(self, config: EngineConfig | None = None, **strategies: Any) -> None:
        if config is not None and strategies:
            raise ConfigError("Engine(config, ...) has a config and strategies too; give one of the two.")
        self.config = EngineConfig(**strategies) if config is None else config
        self._check_workers()
        self._accumulation = Accumulation(self.config.accumulation_steps)
        self._scale = LossScale(self.config.precision == "fp16", self.config.loss_scale)
        self._mesh: DeviceMesh | None = None
        self._model: nn.Module | None = None
        self._optimizer: EngineOptimizer | None = None
        self._scheduler: Any = None
        self._pieces: OptimizerPieces | None = None
        self._is_finite: bool | None = None  # of the gradients of a complete step, once they are finished
        self._weight = 0.0  # rows or tokens of the step's batches, on this rank
        self._rows = 1  # of the newest batch
        self._changes: dict[str, list[str]] = {}  # what was done, by module

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all workers, with the axes ``"dp"``, ``"pp"`` and ``"tp"``."""
        if self._mesh is None:
            config = self.config
            self._mesh = make_mesh(tensor_parallel=config.tensor_parallel, pipeline_parallel=config.pipeline_parallel)
        return self._mesh

    # -- composing ----------------------------------------------------------------------------------------------------

    def compose(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler_fn: Callable[[Any], Any] | None = None,
        train_dataloader: DataLoader[Any] | None = None,
        eval_dataloader: DataLoader[Any] | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Prepare everything that a training loop uses. All ranks call it.

        Args:
            model: Is changed in place; its parameters may be replaced by others.
            optimizer: Made of the model's parameters. It is moved to the new ones with its groups and its state.
            lr_scheduler_fn: Called with the optimizer that is returned; returns its scheduler.
            train_dataloader: Each copy of the model reads its shard; see `raysgd.torch.prepare_data_loader`.
            eval_dataloader: The same.

        Returns:
            model, optimizer, lr_scheduler, train_dataloader, eval_dataloader; None for what was not given.

        Raises:
            ConfigError: Something cannot be used with the strategies; the text says what and why.
            UsageError: It is called a second time.
        """
        if self._model is not None:
            raise UsageError("engine.compose was called before; make an Engine for each model.")
        self._check_given(model, optimizer, lr_scheduler_fn)
        self._model = self._compose_model(model, optimizer)
        if optimizer is not None:
            self._optimizer = EngineOptimizer(optimizer, self)
            if lr_scheduler_fn is not None:
                self._scheduler = self._make_scheduler(lr_scheduler_fn, self._optimizer)
        train = None if train_dataloader is None else _FollowedLoader(prepare_data_loader(train_dataloader), self)
        evaluate = None if eval_dataloader is None else prepare_data_loader(eval_dataloader)
        return self._model, self._optimizer, self._scheduler, train, evaluate

    def _compose_model(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        config, before = self.config, dict(model.named_parameters())
        if optimizer is not None:
            known = set(before.values())
            replace_parameters(optimizer, {parameter: parameter for parameter in known})  # refuses other parameters
        model = model.to(device())
        is_plain = config.zero_stage == 0 and config.workers_per_replica == 1
        if api.world_size() > 1 and not is_plain:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        blocks = find_blocks(model)
        if config.activation_checkpointing is not None:
            recompute(blocks.values() or [model], selective=config.activation_checkpointing == "selective")
            self._note(blocks or {"": model}, f"{config.activation_checkpointing} activation checkpointing")
        self._set_precision(model)
        if config.zero_stage == 3:
            self._shard(model, blocks)
        if optimizer is not None:
            after = dict(model.named_parameters())
            replace_parameters(optimizer, {before[name]: after[name] for name in before})
            self._divide(model, optimizer)
        if config.compile is not None:
            self._compile(model, blocks)
        model.register_forward_pre_hook(AttachedHook(self._before_forward))
        if is_plain:
            model = prepare_model(model, move_to_device=False)
            if api.world_size() > 1:
                self._note({"": model}, "DDP")
        return model

    def _set_precision(self, model: nn.Module) -> None:
        precision = self.config.precision
        if precision == "fp32":
            return
        dtype = DTYPES[precision]
        if precision == "bf16-true":
            if self.config.zero_stage < 3:  # FSDP keeps its pieces in fp32, and gathers them in bf16
                model.to(dtype)
            cast_inputs(model, dtype)
            self._note({"": model}, "parameters in bf16, master weights in fp32")
        else:
            autocast_forward(model, dtype)
            self._note({"": model}, f"autocast to {precision}")

    def _shard(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if self.config.precision == "bf16-true":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        offload = CPUOffloadPolicy(pin_memory=device().type == "cuda") if self.config.cpu_offload else OffloadPolicy()
        settings: dict[str, Any] = {"mesh": self.mesh["dp"], "mp_policy": policy, "offload_policy": offload}
        if scalars := {parameter for parameter in model.parameters() if not parameter.ndim}:
            settings["ignored_params"] = scalars  # FSDP cannot divide them: their gradients are averaged as in DDP
        for block in blocks.values():
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        self._note({**blocks, "": model}, f"FSDP over {self.mesh['dp'].size()} ranks")

    def _divide(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Give the optimizer pieces of the parameters, if it shall not update all of them on this rank or in their type."""
        config = self.config
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter in trained]
        if config.zero_stage == 3:  # FSDP divides all others
            parameters = [parameter for parameter in parameters if not parameter.ndim]
        is_divided = config.zero_stage in (1, 2)
        has_masters = config.precision == "bf16-true" and config.zero_stage < 3
        is_averaged = config.zero_stage == 0 and config.workers_per_replica == 1  # by DDP
        if not parameters or (is_averaged and not has_masters):
            return
        self._pieces = OptimizerPieces(parameters, self.mesh, is_divided=is_divided, is_averaged=is_averaged)
        pieces = self._pieces.piece_of
        replace_parameters(optimizer, {parameter: pieces.get(parameter, parameter) for parameter in trained})
        if is_divided:
            what = "optimizer state" if config.zero_stage == 1 else "optimizer state and gradients"
            self._note({"": model}, f"{what} divided over {self.mesh['dp'].size()} ranks")

    def _compile(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        targets = {"": model} if self.config.compile == "model" or not blocks else blocks
        for module in targets.values():
            module.compile()
        self._note(targets, "compiled")

    def _make_scheduler(self, make: Callable[[Any], Any], optimizer: EngineOptimizer) -> Any:
        scheduler = make(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                f"lr_scheduler_fn made {with_article(type(scheduler).__name__)} for another optimizer; make it for the one that "
                "it is called with."
            )
        return follow_steps(scheduler, self)

    # -- a step -------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Make the backward pass of a batch, in place of ``loss.backward()``.

        Args:
            loss: The mean over the batch on this rank; a scalar.
            weight: With ``weighted_gradients=True``, over how many rows or tokens the mean is. None: the rows of the batch
                that the engine's loader has handed out last.
        """
        weight = float(self._rows if weight is None else weight) if self.config.weighted_gradients else 1.0
        factor = self._scale.scale * weight
        (loss if factor == 1 else loss * factor).backward()  # type: ignore[no-untyped-call]
        self.on_backward(weight)

    def on_backward(self, weight: float) -> None:
        """Count a backward pass, and collect its gradients where the optimizer updates pieces."""
        self._weight += weight
        self._accumulation.on_backward()
        if self._pieces is not None and (self.config.zero_stage == 2 or self._accumulation.is_complete):
            self._pieces.collect_gradients()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of a complete step by their global norm, over all shards; call it before ``optimizer.step()``.

        Returns:
            The norm before clipping; None if the step is not complete, or is skipped because gradients overflowed.
        """
        if not self._accumulation.is_complete or not self.finish_gradients():
            return None
        gradients = self._gradients()
        norm = global_norm(gradients, self.mesh)
        scale(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Make gradients be averaged in the backward pass that completes a step, and in no other if that is possible."""
        if not (module.training and torch.is_grad_enabled()):
            return
        completes = self._accumulation.will_complete
        model = self._model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = completes
        if self._pieces is not None:
            self._pieces.is_collecting = self.config.zero_stage == 2 or completes

    def _gradients(self) -> list[torch.Tensor]:
        assert self._optimizer is not None
        parameters = (each for group in self._optimizer.param_groups for each in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _divisor(self) -> torch.Tensor | float:
        """Return what the sum of the step's gradients is divided by."""
        if not self.config.weighted_gradients:
            return self._weight * self._scale.scale
        # Gradients were averaged over the copies of the model: their sum is that average times their number.
        total = torch.tensor(self._weight, dtype=torch.float64, device=device())
        copies = self.mesh["dp"] if api.world_size() > 1 else None
        if copies is None:
            return self._weight * self._scale.scale
        dist.all_reduce(total, group=copies.get_group())
        return total * self._scale.scale / copies.size()

    # -- what the optimizer and the scheduler call ------------------------------------------------------------------------

    def finish_gradients(self) -> bool:
        """Make the gradients of a complete step those of its mean loss, and clip them; returns whether they are finite."""
        if self._is_finite is None:
            gradients = self._gradients()
            factor: Any = 1 / self._divisor()
            self._is_finite = True
            if self.config.clip_grad_norm is not None or self._scale.is_enabled:
                norm = global_norm(gradients, self.mesh) * factor
                self._is_finite = not self._scale.is_enabled or bool(torch.isfinite(norm))
                if self.config.clip_grad_norm is not None:
                    factor = factor * torch.clamp(self.config.clip_grad_norm / (norm + 1e-6), max=1.0)
            if self._is_finite and not (isinstance(factor, float) and factor == 1):
                scale(gradients, factor)
        return self._is_finite

    def is_complete(self) -> bool:
        return self._accumulation.is_complete

    def is_open(self) -> bool:
        return self._accumulation.is_open

    def on_step(self, *, skipped: bool) -> None:
        self._scale.update(overflowed=skipped)
        self._accumulation.on_step(skipped=skipped)
        self._is_finite, self._weight = None, 0.0

    def drop_gradients(self) -> None:
        assert self._optimizer is not None
        self._optimizer.inner.zero_grad()
        if self._pieces is not None:
            self._pieces.drop_gradients()

    def may_schedule(self) -> bool:
        return self._accumulation.may_schedule()

    def on_schedule(self) -> None:
        self._accumulation.on_schedule()

    def update_parameters(self) -> None:
        if self._pieces is not None:
            with torch.no_grad():
                self._pieces.update_parameters()

    def on_batch(self, batch: Any, *, is_last: bool) -> None:
        """The training loader hands out a batch."""
        self._accumulation.is_last_batch = is_last
        self._rows = count_rows(batch)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, **more: Any) -> None:
        """Save model, optimizer, scheduler and the engine's own state, and ``more`` values; see `raysgd.save_checkpoint`.

        Every rank calls it. Each saves the pieces that it holds, and any number of ranks with any strategies can load them.
        """
        self._check_composed()
        if taken := sorted({"model", "optimizer", "lr_scheduler", "engine"} & set(more)):
            raise UsageError(
                f"engine.save_checkpoint({taken[0]}=...): the engine saves its own {taken[0]}; use another name."
            )
        is_spread = api.world_size() > 1 and (self.config.zero_stage > 0 or self.config.workers_per_replica > 1)
        model = self._saved_model() if is_spread else self._model
        state: dict[str, Any] = {"model": model, "engine": {"loss_scale": self._scale.state_dict()}, **more}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.inner
            if masters := self._masters():
                state["engine"]["masters"] = masters
        if self._scheduler is not None:
            state["lr_scheduler"] = self._scheduler.state_dict()
        if is_spread:
            api.save_checkpoint(state, all_ranks=True)
        else:
            api.save_checkpoint(state if api.world_rank() == 0 else None)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Restore what `save_checkpoint` saved, from the run's newest checkpoint; after `compose`, on all ranks.

        Returns:
            The values that were saved in addition; None if there is no checkpoint.
        """
        self._check_composed()
        state = api.load_checkpoint()
        if state is None:
            return None
        targets: dict[str, Any] = {"model": self._model}
        if self._optimizer is not None:
            targets["optimizer"] = self._optimizer.inner
        restore(state, into=targets)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["lr_scheduler"])
        self._scale.load_state_dict(state["engine"]["loss_scale"])
        if self._pieces is not None:
            self._pieces.take_parameters()
            if masters := state["engine"].get("masters"):
                restore(masters, into=self._masters())
        return {
            name: value for name, value in state.items() if name not in ("optimizer", "lr_scheduler", "engine", "model")
        }

    def _saved_model(self) -> dict[str, Any]:
        """Return the model's state; of what every rank holds in full, each saves some rows."""
        assert self._model is not None
        copies = self.mesh["dp"]
        state = self._model.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim:
                own = Shard(0)._split_tensor(value.detach(), copies.size(), with_padding=False, contiguous=False)[0]
                state[name] = DTensor.from_local(
                    own[copies.get_local_rank()],
                    copies,
                    [Shard(0)],
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
        return state

    def _masters(self) -> dict[str, torch.Tensor]:
        """Return the master weights by the names of their parameters, if they are in another type."""
        if self._pieces is None or self.config.precision != "bf16-true":
            return {}
        assert self._model is not None
        pieces = self._pieces.piece_of
        return {
            name: pieces[parameter].detach()
            for name, parameter in self._model.named_parameters()
            if parameter in pieces and pieces[parameter] is not parameter
        }

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_workers(self) -> None:
        identity, needed = context.current().identity, self.config.workers_per_replica
        if identity.workers_per_replica != needed:
            raise ConfigError(
                f"tensor_parallel={self.config.tensor_parallel} and pipeline_parallel={self.config.pipeline_parallel} need "
                f"{needed} workers for each copy of the model, and the Trainer was made with "
                f"workers_per_replica={identity.workers_per_replica}: give Trainer(..., workers_per_replica={needed})."
            )
        if api.world_size() > 1 and not dist.is_initialized():
            raise UsageError(
                "the engine needs a torch process group for several workers: use Trainer(backend='torch')."
            )

    def _check_composed(self) -> None:
        if self._model is None:
            raise UsageError("call engine.compose(...) first: there is no model to save or to load.")

    def _check_given(self, model: Any, optimizer: Any, lr_scheduler_fn: Any) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"engine.compose(model=...) is {with_article(type(model).__name__)}; give a torch module."
            )
        if is_wrapped(model):
            raise ConfigError(
                f"the model is wrapped by {type(model).__name__} already, and the engine does that itself: give the model inside."
            )
        devices = sorted({str(tensor.device) for tensor in model.parameters()})
        if len(devices) > 1:
            raise ConfigError(
                f"the model's parameters are on {len(devices)} devices ({', '.join(devices)}), and the engine moves a model to "
                "one: make it on one device, and give zero_stage=3 if it is too large for that."
            )
        if devices == ["meta"]:
            raise ConfigError(
                "the model is on the meta device, where parameters have no values: make it on the CPU, or load its values first."
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer is {with_article(type(optimizer).__name__)}; give a torch optimizer.")
        if lr_scheduler_fn is None:
            return
        if hasattr(lr_scheduler_fn, "optimizer") or not callable(lr_scheduler_fn):
            raise ConfigError(
                f"lr_scheduler_fn is {with_article(type(lr_scheduler_fn).__name__)} that belongs to an optimizer already; give a "
                "function that makes it, such as functools.partial(StepLR, step_size=30)."
            )
        if optimizer is None:
            raise ConfigError("lr_scheduler_fn needs an optimizer: give optimizer=... too.")

    # -- what users see ------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryUse:
        """Measure what this rank's parameters, gradients and optimizer state take now.

        After the first step the optimizer has its state, and between ``backward`` and ``zero_grad`` there are gradients.
        """
        self._check_composed()
        assert self._model is not None
        pieces = [] if self._pieces is None else list(self._pieces.piece_of.values())
        states = [] if self._optimizer is None else list(self._optimizer.state.values())
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        return measure(self._model.parameters(), pieces, state)

    def _note(self, modules: dict[str, nn.Module], what: str) -> None:
        for name in modules:
            self._changes.setdefault(name, []).append(what)

    def describe(self) -> str:
        """Return a table of what was done to each module."""
        rows = [("module", "done to it"), *((name or "(model)", "; ".join(did)) for name, did in self._changes.items())]
        if len(rows) == 1:
            rows.append(("(model)", "nothing"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {did}" for name, did in rows)


class _FollowedLoader(PreparedLoader):
    """A prepared loader whose batches the engine follows."""

    def __init__(self, prepared: PreparedLoader, engine: Engine) -> None:
        vars(self).update(vars(prepared))
        self._engine = engine

    def __iter__(self) -> Iterator[Any]:
        return self._follow(super().__iter__())

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)
            self._engine.on_batch(batch, is_last=following is _END)
            yield batch
            batch = following


def count_rows(batch: Any) -> int:
    """Return the size of the first dimension of a batch's first tensor; 1 if there is none."""
    from torch.utils import _pytree as pytree

    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor) and each.ndim]
    return tensors[0].shape[0] if tensors else 1

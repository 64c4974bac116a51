"""The parts of a declarative training, made in a worker: model, optimizer, scheduler, datasets, samplers, loaders. Uses torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from raysgd._util.logs import get_logger
from raysgd._util.text import with_article
from raysgd.declarative.args import HookConfig, TrainerArgs
from raysgd.declarative.hooks import HOOKS
from raysgd.declarative.values import ComponentError, Importer, naming
from raysgd.session import api, context, rank_state
from raysgd.torch.loader import PreparedLoader, make_batch_seeds, prepare_data_loader, reads_shard
from raysgd.torch.rows import skip_batches
from raysgd.torch.samplers import Order

_logger = get_logger()
#: Arguments that the loop sets.
_OF_SAMPLERS = ("dataset", "num_replicas", "rank")
_OF_LOADERS = ("dataset", "batch_size", "sampler")
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_model(args: TrainerArgs, importer: Importer) -> nn.Module:
    """Make the model, with the weights of ``tracing_from_weights`` if they are given.

    Raises:
        ComponentError: It is not a torch module, or the weights are not its own.
    """
    with naming("model"):
        model = importer.build(args.model.type, args.model.args)
    if not isinstance(model, nn.Module):
        raise ComponentError(
            f"model.type {args.model.type} made {with_article(type(model).__name__)}; give a torch module."
        )
    if args.tracing_from_weights is not None:
        _load_weights(model, args.tracing_from_weights)
    kind = _TYPES.get(args.precision_of("buffer") or "")
    if kind is not None and not isinstance(args.precision, str):  # else the engine converts those that it should
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(kind)
    return model


def _load_weights(model: nn.Module, path: str) -> None:
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except (OSError, RuntimeError, ValueError) as error:
        raise ComponentError(f"tracing_from_weights {path} cannot be loaded into the model: {error}") from None


def make_optimizer(args: TrainerArgs, importer: Importer, model: nn.Module) -> Optimizer:
    """Make the optimizer of the model's parameters."""
    with naming("optimizer"):
        optimizer = importer.build(args.optimizer.type, args.optimizer.args, model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise ComponentError(
            f"optimizer.type {args.optimizer.type} made {with_article(type(optimizer).__name__)}; give a torch optimizer."
        )
    return optimizer


def load_function(importer: Importer, name: str, field: str) -> Any:
    """Return the function with this full name.

    Raises:
        ComponentError: It does not exist, or is not callable.
    """
    with naming(field):
        found = importer.load(name)
    if not callable(found):
        raise ComponentError(f"{field} {name} is not callable; give the full name of a function.")
    return found


def seed_rows(seed: int) -> None:
    """Seed the generators of Python and NumPy equally on the ranks of a replica of the model, as models draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def make_hooks(args: TrainerArgs, importer: Importer) -> dict[str, Any]:
    """Make the configured hooks: one object, by the name that messages give it, or none."""
    if isinstance(args.hook, HookConfig):
        with naming("hook"):
            hook = importer.build(args.hook.type, args.hook.args)
        if not any(callable(getattr(hook, name, None)) for name in HOOKS):
            raise ComponentError(
                f"hook.type {args.hook.type} has no method of a TrainHook, such as {', '.join(list(HOOKS)[:3])}."
            )
        return {f"hook.type {args.hook.type}": hook}
    given = {} if args.hook is None else args.hook
    functions = {name: load_function(importer, value, f"hook.{name}") for name, value in given.items()}
    return {"hook": SimpleNamespace(**functions)}


def make_dataset(args: TrainerArgs, importer: Importer, stage: str) -> Any:
    """Make the dataset of a stage, ``"train"``, ``"val"`` or ``"test"``; None if the stage has none."""
    if stage != "train" and not args.dataset.args_of(stage):
        return None
    with naming(f"dataset, {stage}_args"):
        return importer.build(args.dataset.type, args.dataset.args_of(stage))


def make_loader(args: TrainerArgs, importer: Importer, stage: str, dataset: Any) -> Any:
    """Make the loader of a stage's dataset."""
    given = _without(args.dataloader.args_of(stage), _OF_LOADERS)
    if "collate_fn" in given and isinstance(given["collate_fn"], str):
        given["collate_fn"] = load_function(importer, given["collate_fn"], f"dataloader.{stage}_args.collate_fn")
    sampler = _make_sampler(args, importer, stage, dataset)
    with naming("dataloader"):
        loader = importer.build(
            args.dataloader.type, given, dataset=dataset, batch_size=args.micro_batch_size, sampler=sampler
        )
    if not isinstance(loader, DataLoader):
        return loader
    if stage == "train" and not reads_shard(loader, sampler):
        raise ComponentError(
            f"dataloader.type {args.dataloader.type} made a DataLoader without the sampler that it gets, so each of "
            f"{api.data_parallel_size()} replicas of the model would read all rows: give sampler to the DataLoader."
        )
    if loader.generator is None and not api.in_worker():  # in a worker `prepare_data_loader` gives it one
        loader.generator = torch.Generator()  # of its own: it would draw from the one that dropout uses
    return prepare_data_loader(loader, add_sampler=False)


def _make_sampler(args: TrainerArgs, importer: Importer, stage: str, dataset: Any) -> Any:
    given = _without(args.dataset_sampler.args_of(stage), _OF_SAMPLERS)
    is_default = args.dataset_sampler.type == type(args.dataset_sampler).type
    if isinstance(dataset, IterableDataset):
        if given or not is_default:
            raise ComponentError(
                f"dataset.type {args.dataset.type} is an IterableDataset, which no sampler can split: leave out dataset_sampler, "
                "and let the dataset yield the rows of raysgd.data_parallel_rank() of raysgd.data_parallel_size()."
            )
        return None
    if is_default:
        given = {"shuffle": stage == "train", "seed": args.seed or 0, **given}
    identity = context.current().identity
    with naming("dataset_sampler"):
        sampler = importer.build(
            args.dataset_sampler.type,
            given,
            dataset=dataset,
            num_replicas=identity.data_parallel_size,
            rank=identity.data_parallel_rank,
        )
    has_own_draws = not isinstance(sampler, DistributedSampler) and hasattr(sampler, "__len__")
    return Order(sampler, args.seed or 0) if has_own_draws else sampler


def _without(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


class Batches:
    """The micro-batches of a loader, grouped into steps; resumed within an epoch where it was left.

    Args:
        loader: A prepared torch loader, or any other iterable over batches.
        input_type: What floating-point tensors of batches are converted to, such as ``"bf16"``; None: they stay.
    """

    def __init__(self, loader: Any, input_type: str | None) -> None:
        self.loader = loader
        self._type = _TYPES.get(input_type or "")
        self._seeds = None if isinstance(loader, PreparedLoader) else make_batch_seeds()  # that one has its own

    @property
    def is_stateful(self) -> bool:
        """Whether the loader saves its position by itself."""
        inner = self._inner
        return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))

    @property
    def _inner(self) -> Any:
        return self.loader.loader if isinstance(self.loader, PreparedLoader) else self.loader

    def state_dict(self) -> Any:
        return self._inner.state_dict()

    def start_epoch(self, epoch: int, num_done: int, state: Any = None, generators: Any = None) -> Iterator[Any]:
        """Return the batches of an epoch that are not done.

        Args:
            epoch: From 0.
            num_done: Batches of this rank that are done.
            state: What `state_dict` returned after them, if the loader saves its position.
            generators: The states of the random number generators when the epoch began, for loaders that draw from them.
        """
        if callable(set_epoch := getattr(self.loader, "set_epoch", None)) or callable(
            set_epoch := getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        ):
            set_epoch(epoch)
        generator = getattr(self._inner, "generator", None)
        if isinstance(generator, torch.Generator) and not api.in_worker():
            generator.manual_seed(epoch)
        if not num_done:
            return self._converted(self._read(epoch))
        if state is not None:
            self._inner.load_state_dict(state)
            return self._converted(self._read(epoch, num_done))
        now = rank_state.capture_generators()
        if generators is not None:
            rank_state.restore_generators(generators)
        if self.has_plain_order:
            remaining = skip_batches(self.loader, num_done)  # their rows are not read
        else:
            _logger.info(
                "%s saves no position: the %d batches before it are read again.", type(self._inner).__name__, num_done
            )
            remaining = self._read(epoch)
            for _ in itertools.islice(remaining, num_done):
                pass
        rank_state.restore_generators(now)
        return self._converted(remaining)

    def _read(self, epoch: int, number: int = 0) -> Iterator[Any]:
        """Iterate over the loader, which begins with the batch of this number."""
        if isinstance(self.loader, PreparedLoader):
            self.loader.first_batch = number
        batches = iter(self.loader)
        return batches if self._seeds is None else self._seeds.read(batches, epoch, number)

    @property
    def has_plain_order(self) -> bool:
        """Whether the order of the data is known without drawing from global generators, and rows are read in this process."""
        inner = self._inner
        is_known = type(getattr(inner, "sampler", None)) in (DistributedSampler, Order)
        return type(inner) is DataLoader and is_known and not inner.num_workers

    @property
    def is_even(self) -> bool:
        """Whether it is known that all replicas of the model have equally many batches."""
        return isinstance(self.loader, PreparedLoader) and self.loader.knows_own_rows

    def _converted(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._type is None:
            return batches
        return (convert(batch, self._type) for batch in batches)


def convert(value: Any, kind: torch.dtype) -> Any:
    """Return a batch whose floating-point tensors have another type."""

    def one(leaf: Any) -> Any:
        return leaf.to(kind) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(one, value)


def find_loss(output: Any, where: str) -> torch.Tensor:
    """Return the loss in what a model returned.

    Raises:
        ComponentError: There is none.
    """
    loss = output
    if isinstance(output, (tuple, list)) and output:
        loss = output[0]
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else with_article(type(output).__name__)
        )
        raise ComponentError(
            f"{where} returned {what}; its forward takes a batch and returns the loss: a scalar tensor, the first value of a "
            "tuple, or .loss or ['loss'] of an object or dict."
        )
    return loss.reshape(())


def count_tokens(output: Any, where: str) -> int:
    """Return the number of tokens in what a model returned.

    Raises:
        ComponentError: There is none.
    """
    found = output.get("num_tokens") if isinstance(output, Mapping) else getattr(output, "num_tokens", None)
    if found is None:
        raise ComponentError(
            f"{where} returned no num_tokens, by which per-token-mean divides: return a dict with 'loss', the sum over the "
            "tokens of the batch, and their number as 'num_tokens', or give optimizer.aggregate_outputs_fn."
        )
    return int(found)


def read_rows(args: TrainerArgs, importer: Importer, number: int) -> Any:
    """Return a batch of the training data's first rows, for a plan; rows are repeated if there are too few.

    Raises:
        ComponentError: The dataset has no row.
    """
    dataset = importer.build(args.dataset.type, args.dataset.train_args)
    given = args.dataloader.train_args.get("collate_fn")
    collate = importer.load(given) if isinstance(given, str) else default_collate
    if isinstance(dataset, IterableDataset):
        rows = list(itertools.islice(dataset, number))
    else:
        rows = [dataset[place] for place in range(min(number, len(dataset)))]
    if not rows:
        raise ComponentError("the training data has no row.")
    return collate([rows[place % len(rows)] for place in range(number)])

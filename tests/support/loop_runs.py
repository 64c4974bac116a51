"""Trains a loop of several habits with the engine on two ranks, and plainly in one process. Runs in processes of one group.

The plain loop is what a user writes for one process with torch alone. It computes the batches of all ranks, one after the
other, and nothing in it is the engine's: `support.loop_habits` has what both loops do besides.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd.backends import torch_groups
from raysgd.errors import RaySGDError
from raysgd.torch.model import unwrap
from support.group_sessions import group_session
from support.loop_habits import HABITS, OF_STAGES, Habit
from support.loop_models import VOCABULARY, Net, RowsFrom, make_llama

RANKS = 2
#: The largest difference of a number of 1 or so that rounding explains. Sums of two ranks are rounded in another order: a few
#: units of 1.2e-7 in each of up to 14 steps. Numbers of bf16 have 8 bits, those of fp16 11; the plain loop is in fp32.
TOLERANCES = {"fp32": 3e-5, "bf16": 6e-2, "fp16": 5e-3, "bf16-true": 6e-2}
#: What the guide calls strategies by whose marks habits are refused.
NAMES = {"all": "all strategies", "tensor": "tensor parallelism", "pipeline": "pipelines"}


@dataclass(frozen=True)
class Strategy:
    """Fields of the engine's config, and marks by which habits name strategies."""

    fields: dict[str, Any]
    marks: tuple[str, ...]
    is_accelerated: bool = False

    @property
    def copies(self) -> int:
        """The ranks that read different rows."""
        return RANKS // (self.fields.get("tensor_parallel", 1) * self.fields.get("pipeline_parallel", 1))


STRATEGIES: dict[str, Strategy] = {
    "DDP": Strategy({}, ("DDP",)),
    "ZeRO 1": Strategy({"zero_stage": 1}, ("ZeRO 1",)),
    "ZeRO 2": Strategy({"zero_stage": 2}, ("ZeRO 2",)),
    "ZeRO 3": Strategy({"zero_stage": 3}, ("ZeRO 3",)),
    "bf16": Strategy({"precision": "bf16"}, ("DDP", "bf16")),
    "bf16, ZeRO 3": Strategy({"precision": "bf16", "zero_stage": 3}, ("ZeRO 3", "bf16")),
    "fp16": Strategy({"precision": "fp16", "loss_scale": 64.0}, ("DDP", "fp16")),
    "fp16, ZeRO 2": Strategy({"precision": "fp16", "loss_scale": 64.0, "zero_stage": 2}, ("ZeRO 2", "fp16")),
    "bf16-true": Strategy({"precision": "bf16-true"}, ("DDP", "bf16-true")),
    "bf16-true, ZeRO 1": Strategy({"precision": "bf16-true", "zero_stage": 1}, ("ZeRO 1", "bf16-true")),
    "bf16-true, ZeRO 3": Strategy({"precision": "bf16-true", "zero_stage": 3}, ("ZeRO 3", "bf16-true")),
    "tensor parallel": Strategy({"tensor_parallel": 2}, ("tensor", "divided")),
    "pipeline": Strategy({"pipeline_parallel": 2}, ("pipeline", "divided")),
    "pipeline, bf16": Strategy({"pipeline_parallel": 2, "precision": "bf16"}, ("pipeline", "divided", "bf16")),
    "accelerate": Strategy({}, ("DDP", "accelerate"), True),
    "accelerate, ZeRO 2": Strategy({"zero_stage": 2}, ("ZeRO 2", "accelerate"), True),
    "accelerate, ZeRO 3": Strategy({"zero_stage": 3}, ("ZeRO 3", "accelerate"), True),
}


@dataclass(frozen=True)
class Loop:
    """One loop to compare.

    Attributes:
        strategy: A name of `STRATEGIES`.
        habits: Names of `loop_habits.HABITS`.
        accumulation: Batches per step.
        seed: Of sizes, weights, data, the optimizer, and when things happen.
        has_settings: Whether the engine gets the fields of its config that the habits need.
    """

    strategy: str
    habits: tuple[str, ...]
    accumulation: int
    seed: int
    has_settings: bool = True

    @property
    def chosen(self) -> list[Habit]:
        return [HABITS[name] for name in self.habits]

    @property
    def marks(self) -> set[str]:
        marks = {*STRATEGIES[self.strategy].marks, *(("accumulated",) if self.accumulation > 1 else ())}
        return marks | ({"averaged"} if any(each.strategies for each in self.chosen) else set())

    @property
    def net(self) -> set[str]:
        return {option for each in self.chosen for option in each.net}

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the engine's config."""
        strategy = STRATEGIES[self.strategy]
        found = dict(strategy.fields)
        if self.has_settings:
            found |= dict(pair for each in self.chosen for pair in each.strategies)
        if self.accumulation > 1 and not strategy.is_accelerated:
            found["accumulation_steps"] = self.accumulation
        return found

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.fields.get("precision", "fp32")]

    @property
    def is_refused(self) -> bool:
        return any("all" in each.refused or self.marks & set(each.refused) for each in self.chosen)

    def smaller(self) -> Iterator[Loop]:
        """Return loops with less of what this one has."""
        for habit in self.habits:
            yield replace(self, habits=tuple(each for each in self.habits if each != habit))
        if self.accumulation > 1:
            yield replace(self, accumulation=1)


def fits(loop: Loop) -> bool:
    """Return whether the habits of a loop go together, and with its strategy."""
    kinds = [each.kind for each in loop.chosen]
    there = {*loop.marks, *loop.habits, *kinds, *loop.net}
    return len(set(kinds)) == len(kinds) and all(
        not there & set(each.without)
        and (not each.only or loop.marks & set(each.only))
        and (name in OF_STAGES or each.kind in OF_STAGES or "pipeline" not in loop.marks)
        for name, each in zip(loop.habits, loop.chosen, strict=True)
    )


def draw(seed: int) -> Loop:
    """Draw a loop."""
    names = list(HABITS)
    numbers = random.Random(seed)
    loop = Loop(numbers.choice(list(STRATEGIES)), (), numbers.choice([1, 2, 3]), seed)
    wanted = numbers.choice([1, 2, 3, 3, 4])
    while len(loop.habits) < wanted:
        more = replace(loop, habits=(*loop.habits, numbers.choice(names)))
        loop = more if fits(more) else loop
    return loop


@dataclass
class Outcome:
    """What a loop has done.

    Attributes:
        losses: Of each batch: its number, and the loss of each rank, or of this one.
        values: What is compared besides, by name.
        error: With what it ended, if it did.
        is_refused: Whether the error is one of raysgd's own.
    """

    losses: list[tuple[int, list[float]]] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    error: str | None = None
    is_refused: bool = False


class Run:
    """The objects of a loop in one process, equal in all of them, and where it is.

    Attributes:
        rank: The data-parallel rank whose rows are computed.
        world_rank: That of the process.
        number: Of the batch, over all epochs.
        moment: A batch at which something happens, anywhere.
        boundary: The first batch of a step at which something happens.
        notes: What habits keep.
        dtype: What the layers of the model compute in.
    """

    dtype = torch.float32
    world_rank = 0

    def __init__(self, loop: Loop, rank: int, copies: int, first: int = 0) -> None:
        self.loop, self.rank, self.copies, self.number = loop, rank, copies, first
        numbers = random.Random(loop.seed)
        torch.manual_seed(loop.seed)
        self.is_staged = "pipeline" in loop.marks
        self.model: Any = make_llama() if self.is_staged else Net(numbers, loop.net)
        self.inner: Any = self.model
        self.rows = numbers.randrange(2, 4) * (2 if "norm" in loop.net else 1)  # of a batch
        self.per_epoch = numbers.randrange(4, 7)
        self.total = self.per_epoch * (1 if loop.accumulation < 3 and numbers.random() < 0.5 else 2)
        self.moment = numbers.randrange(1, self.total - 1)
        self.boundary = numbers.choice([at for at in range(1, self.total) if self._ends_step(at - 1)][:3])
        generator = torch.Generator().manual_seed(loop.seed)
        count = self.rows * self.per_epoch * STRATEGIES[loop.strategy].copies
        self.x, self.y = torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)
        if self.is_staged:
            self.x = torch.randint(VOCABULARY, (count, 5), generator=generator)
        self.rows_of_evaluation = torch.randn(5, 3, generator=generator), torch.randn(5, 1, generator=generator)
        self.outcome = Outcome()
        self.logged: list[torch.Tensor] = []
        self.rates: list[float] = []
        self.notes: dict[str, Any] = {}
        self.hidden = torch.zeros(())
        self.act("begin")
        self.optimizer = self._make_optimizer(numbers)
        self.scheduler: Any = None

    def _make_optimizer(self, numbers: random.Random) -> Any:
        for each in self.loop.chosen:
            if each.optimizer is not None:
                return each.optimizer(self)
        decay = numbers.choice([0.0, 0.1])
        if numbers.random() < 0.5:
            return torch.optim.SGD(self.inner.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
        # Its eps keeps rounding errors of small gradients small.
        return torch.optim.AdamW(self.inner.parameters(), lr=0.05, eps=1e-2, weight_decay=decay)

    def _ends_step(self, number: int) -> bool:
        place = number % self.per_epoch
        return (place + 1) % self.loop.accumulation == 0 or place + 1 == self.per_epoch

    @property
    def ends_step(self) -> bool:
        """Whether this batch is the last one of its step."""
        return self._ends_step(self.number)

    @property
    def num_steps(self) -> int:
        return sum(map(self._ends_step, range(self.total)))

    @property
    def ends_epoch(self) -> bool:
        return (self.number + 1) % self.per_epoch == 0

    def is_skipped(self, number: int) -> bool:
        before, self.number = self.number, number
        found = any(each.skips is not None and each.skips(self) for each in self.loop.chosen)
        self.number = before
        return found

    def in_step(self, number: int) -> int:
        """Return how many batches a batch's step has."""
        place, first = number % self.per_epoch, number - number % self.per_epoch
        begin = place - place % self.loop.accumulation
        batches = range(first + begin, first + min(begin + self.loop.accumulation, self.per_epoch))
        return sum(not self.is_skipped(each) for each in batches)

    @cached_property
    def schedule(self) -> Any:
        return next((each.schedule for each in self.loop.chosen if each.schedule is not None), None)

    def does(self, habit: str) -> bool:
        return habit in self.loop.habits

    def act(self, place: str) -> None:
        """Do what the habits do at a place."""
        for each in self.loop.chosen:
            if (function := getattr(each, place)) is not None:
                function(self)

    # -- what habits use -----------------------------------------------------------------------------------------------

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.is_staged:
            return self.model(input_ids=x, labels=x).loss  # type: ignore[no-any-return]
        branch = self.number // self.loop.accumulation
        if "branch per rank" in self.loop.net:
            branch = self.rank + self.number // 2
        found, self.hidden = self.model(x, branch % 2)
        return nn.functional.mse_loss(found, y)

    def losses(self, batch: Any) -> list[torch.Tensor]:
        """Return the losses of a batch, each with a backward pass of its own."""
        torch.manual_seed(100 * self.number + self.rank)  # of dropout
        if self.does("overflow"):
            self.inner.overflows = self.is_overflowing and self.rank == self.copies - 1
        found = [] if self.does("gradient penalty") else [self.loss(*batch)]
        for each in self.loop.chosen:
            if each.losses is not None:
                found = each.losses(self, batch, found)
        return found

    @property
    def is_overflowing(self) -> bool:
        return self.does("overflow") and self.number == self.boundary

    @property
    def has_overflown(self) -> bool:
        """Whether a batch of this step has overflown: the boundary is the first batch of one."""
        return self.does("overflow") and self.boundary <= self.number < self.boundary + self.loop.accumulation

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            x, y = self.rows_of_evaluation
            if self.is_staged:
                self.log(self.model(input_ids=self.x[:4], labels=self.x[:4]).loss)
            else:
                self.log(nn.functional.mse_loss(self.model(x, 0)[0], y))
        self.model.train()

    def log(self, value: torch.Tensor) -> None:
        self.logged.append(value.detach().clone())

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def save(self) -> None:
        """Save a checkpoint; the plain loop needs none."""

    def end_batch(self) -> None:
        self.act("after")
        self.rates += [float(group["lr"]) for group in self.optimizer.param_groups]

    def finish(self) -> Outcome:
        self.act("end")
        for name, each in [*self.inner.named_parameters(), *self.inner.named_buffers()]:
            self.outcome.values[name] = self.whole(each).float().flatten().tolist()
        self.outcome.values["logged"] = [float(self.whole(each)) for each in self.logged]
        self.outcome.values["rates"] = self.rates
        return self.outcome


# -- the plain loop ------------------------------------------------------------------------------------------------------


def train_plainly(loop: Loop) -> Outcome:
    """Train in one process, by torch alone."""
    copies = STRATEGIES[loop.strategy].copies
    run = Run(loop, 0, copies)
    model, optimizer = run.model, run.optimizer
    scheduler = None if run.schedule is None else run.schedule.make(optimizer, run.num_steps)
    resumed = {first for _, first, _ in parts_of(loop)[1:]}
    for number in range(run.total):
        run.number = number
        # A checkpoint has the gradients of an unfinished step, which the engine knows, and no others.
        if number in resumed and (STRATEGIES[loop.strategy].is_accelerated or run._ends_step(number - 1)):
            optimizer.zero_grad()
        run.act("before")
        if run.is_skipped(number):
            continue
        losses = []
        for rank in range(copies):
            run.rank = rank
            with first_rank_counts(model, rank):
                own = run.losses(plain_batch(run, number, rank))
                share = copies * run.in_step(number)
                (sum(own) / share).backward()  # type: ignore[union-attr]
            losses.append(float(sum(own).detach()))  # type: ignore[arg-type]
        run.rank = 0
        run.outcome.losses.append((number, losses))
        if run.ends_step:
            run.act("gradients")
            if not run.has_overflown:
                optimizer.step()
                if run.schedule is not None and run.schedule.every == "step":
                    schedule_step(run, scheduler, sum(losses) / copies)
            if not (run.does("kept gradients") and number == run.boundary - 1):
                zeroed = model if run.does("zero_grad of the model") else optimizer
                zeroed.zero_grad(set_to_none=not run.does("zeros"))
        run.end_batch()
        if run.ends_epoch and run.schedule is not None and run.schedule.every == "epoch":
            schedule_step(run, scheduler, None)
    return run.finish()


@contextmanager
def first_rank_counts(model: nn.Module, rank: int) -> Iterator[None]:
    """Keep the buffers from the rows of all ranks but the first: what these change is the first rank's."""
    kept = {name: each.clone() for name, each in model.named_buffers()}
    yield
    if rank:
        for name, each in model.named_buffers():
            each.copy_(kept[name])


def plain_batch(run: Run, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's rows: ranks take turns by rows."""
    place = number % run.per_epoch
    own, at = slice(rank, None, run.copies), slice(place * run.rows, (place + 1) * run.rows)
    return run.x[own][at], run.y[own][at]


def schedule_step(run: Run, scheduler: Any, loss: float | None) -> None:
    if run.schedule.metric is None:
        scheduler.step()
    elif run.schedule.metric == "loss":
        scheduler.step(loss)
    else:
        run.evaluate()
        scheduler.step(float(run.logged[-1]))


# -- the loop with the engine --------------------------------------------------------------------------------------------


class EngineRun(Run):
    """The loop of a rank with the engine, or with `raysgd.accelerate`, from any batch on."""

    def __init__(self, loop: Loop, first: int) -> None:
        super().__init__(loop, raysgd.data_parallel_rank(), raysgd.data_parallel_size(), first)
        self.world_rank = raysgd.world_rank()
        if loop.fields.get("precision") == "bf16-true":
            self.dtype = torch.bfloat16
        whole = STRATEGIES[loop.strategy].copies
        self.sampler = RowsFrom(len(self.x))
        sampler = {"sampler": self.sampler} if any(each.kind == "resume" for each in loop.chosen) else {}
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=self.rows * whole // self.copies, **sampler)
        make = None if self.schedule is None else lambda optimizer: self.schedule.make(optimizer, self.num_steps)
        self.is_accelerated = STRATEGIES[loop.strategy].is_accelerated
        self.engine: Any = None
        if self.is_accelerated:
            self.loader: Any = raysgd.torch.prepare_data_loader(loader)
            self.model, self.optimizer = raysgd.accelerate(self.model, optimizer=self.optimizer, **loop.fields)
            self.scheduler = None if make is None else make(self.optimizer)
            self.backward: Any = torch.Tensor.backward
        else:
            self.engine = raysgd.Engine(**loop.fields)
            plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            self.model, self.optimizer, self.scheduler, self.loader, _ = self.engine.compose(
                model=self.model,
                optimizer=self.optimizer,
                lr_scheduler_fn=make,
                train_dataloader=loader,
                tensor_plan=plan if "tensor_parallel" in loop.fields else None,
            )
            self.backward = self.engine.backward
        self.inner = unwrap(self.model)

    def train(self, first: int, last: int) -> None:
        """Train on the batches of these numbers."""
        for epoch in range(first // self.per_epoch, self.total // self.per_epoch):
            begin = first % self.per_epoch if epoch == first // self.per_epoch else 0
            self.sampler.first = begin * len(self.x) // self.per_epoch
            reads = next((each.reads for each in self.loop.chosen if each.reads is not None), None)
            batches = self.loader if reads is None else reads(self.loader, self.loop.accumulation)
            for number, batch in enumerate(batches, epoch * self.per_epoch + begin):
                self.number = number
                self._train_on(batch)
                if number + 1 == last:
                    break
            if self.number + 1 == last:
                return

    def _train_on(self, batch: Any) -> None:
        self.act("before")
        if self.is_skipped(self.number):
            return
        optimizer, accelerated = self.optimizer, self.is_accelerated
        begins_step = self.number % self.per_epoch % self.loop.accumulation == 0
        if self.does("zero_grad first") and (begins_step or not accelerated):
            optimizer.zero_grad()
        losses = self.losses(batch)
        self.outcome.losses.append((self.number, [float(sum(losses).detach())]))  # type: ignore[arg-type]
        share = self.in_step(self.number) if accelerated else 1
        for place, loss in enumerate(losses):
            is_last = place + 1 == len(losses) or not self.does("two losses")
            self.backward(loss / share if accelerated else loss, **({} if is_last else {"retain_graph": True}))
        if not accelerated or self.ends_step:
            self.act("gradients")
            if self.does("closure"):
                optimizer.step(lambda: None)
            optimizer.step()
            if self.schedule is not None and self.schedule.every == "step":
                schedule_step(self, self.scheduler, float(sum(losses).detach()))  # type: ignore[arg-type]
            self._zero_grad()
        self.end_batch()
        if self.ends_epoch and self.schedule is not None and self.schedule.every == "epoch":
            schedule_step(self, self.scheduler, None)

    def _zero_grad(self) -> None:
        is_kept = self.does("kept gradients") and self.number == self.boundary - 1
        if self.does("zero_grad of the model"):
            self.model.zero_grad()
        elif self.does("zeros"):
            self.optimizer.zero_grad(set_to_none=False)
        elif not is_kept and not self.does("zero_grad first"):
            self.optimizer.zero_grad()

    def save(self) -> None:
        if self.engine is not None:
            self.engine.save_checkpoint(number=self.number)
            return
        state = {"model": self.model, "optimizer": self.optimizer, "number": self.number}
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        raysgd.save_checkpoint({**state, **scheduler}, all_ranks="zero_stage" in self.loop.fields)

    def load(self) -> None:
        if self.engine is not None:
            self.engine.load_checkpoint()
            return
        state = raysgd.load_checkpoint()
        raysgd.torch.restore(state, into={"model": self.model, "optimizer": self.optimizer})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def parts_of(loop: Loop) -> list[tuple[int, int, int]]:
    """Return the trainings of a loop, each resumed from the one before: its ranks, its first batch, and where it ends."""
    run = Run(loop, 0, RANKS)
    kind = next((name for name in loop.habits if HABITS[name].kind == "resume"), None)
    at = run.moment if kind == "resume" else run.boundary
    first, second = {"resume on one rank": (2, 1), "resume on two ranks": (1, 2)}.get(kind or "", (2, 2))
    return [(RANKS, 0, run.total)] if kind is None else [(first, 0, at), (second, at, run.total)]


def train(loop: Loop) -> Outcome:
    """Train with the engine on this rank."""
    found = Outcome()
    replica = RANKS // STRATEGIES[loop.strategy].copies
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [None] * RANKS
        dist.all_gather_object(folders, own)
        logged: list[torch.Tensor] = []
        rates: list[float] = []
        try:
            for number, (size, first, last) in enumerate(parts_of(loop)):
                group = nullcontext() if size == dist.get_world_size() else group_of(size, rank, store, number)
                # A rank that is alone has its own folder; then the first rank's is read.
                folder = folders[rank if size == 1 and number == 0 else 0]
                with group, group_session(Path(folder), replica if size > 1 else 1):
                    run = EngineRun(loop, first)
                    run.outcome, run.logged, run.rates = found, logged, rates
                    if number:
                        run.load()
                    try:
                        run.train(first, last)
                        if last == run.total:
                            run.finish()
                        else:
                            run.save()
                    except Exception:
                        torch_groups.leave_all()  # frees the ranks that wait for this one
                        raise
                    run.model = run.inner = None
        except Exception as error:
            found.is_refused = isinstance(error, RaySGDError)
            where = "" if found.is_refused else f" {traceback.extract_tb(error.__traceback__)[-6:]}"
            found.error = f"{type(error).__name__}: {error}{where}"
        gc.collect()
        store.add("ended", 1)
        while store.add("ended", 0) < RANKS:  # another rank may still read the folder of this one
            time.sleep(0.001)
    return found


@contextmanager
def group_of(size: int, rank: int, store: Any, number: int) -> Iterator[None]:
    """Form the group of a part of a training, in place of the group that there is."""
    store.add(f"ended {number}", 1)
    while store.add(f"ended {number}", 0) < RANKS:  # a rank may still wait in a collective of the group
        time.sleep(0.001)
    gc.collect()
    torch_groups.leave_all()
    torch_groups.destroy_all()
    gc.collect()
    of_part = dist.HashStore() if size == 1 else dist.PrefixStore(f"part {number}", store)
    dist.init_process_group("gloo", store=of_part, rank=rank if size > 1 else 0, world_size=size)
    yield

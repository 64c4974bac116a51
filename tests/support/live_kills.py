"""A training with a live state in which a plan kills ranks at random moments, and the checks of what it leaves.

`train` and what it needs run in workers; `make_plan` and the checks run in the test.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import raysgd
from raysgd.session import context
from raysgd.session.live.agreement import Agreement
from support.row_log import ends_of_attempts, rows_that_count
from support.runs import events_of, latest_run, once, quiet, travels_by_value

travels_by_value(__name__)

NUM_RANKS = 4
BATCH = 2
STEPS_PER_EPOCH = 10
NUM_ROWS = NUM_RANKS * BATCH * STEPS_PER_EPOCH
#: Two matrices of 512 x 512 with AdamW's moments: a state that takes some milliseconds to send.
WIDTH = 512
#: Calls of functions in a step, also of those written in C.
CALLS_OF_STEP = 1300
#: Waits for a line with seconds and a file, and then kills the process that started it. It needs no lock of that process.
_KILLER = 'read -r delay file && sleep "$delay" && date +%s.%N >"$file" && kill -9 $PPID'


@dataclass(frozen=True)
class Kill:
    """A kill of one rank.

    Attributes:
        group: Kills of one group belong together, such as those of two ranks at once. A group waits for the one before.
        step: The step in which it is due.
        rank: The rank.
        how: ``"clock"``: some seconds after the step's begin; ``"code"``: at one of the calls of functions in the step;
            ``"exchange"``: some seconds after the rank has begun the exchange before the changes of its piece; ``"entry"``: some
            seconds after the rank has entered train_func again, because of the other kill of its group.
        moment: The seconds, or the number of the call.
    """

    group: int
    step: int
    rank: int
    how: str
    moment: float

    @property
    def name(self) -> str:
        return f"{self.group}-{self.rank}-{self.how}"


@dataclass(frozen=True)
class Kind:
    """A way to hold a model on four ranks.

    Attributes:
        prepare: Makes the model of a rank and its optimizer, of the same model on all ranks.
        collect: Returns the whole tensors of both, by name. All ranks call it.
        norm: The module that normalizes; batch norm has buffers.
        num_pieces: Ranks whose numbers leave the same remainder hold the same piece of the state.
    """

    prepare: Callable[[Any], tuple[Any, Any]]
    collect: Callable[[Any, Any], dict[str, Any]]
    norm: str = "BatchNorm1d"
    num_pieces: int = 1

    @property
    def is_copied(self) -> bool:
        """Whether no two ranks hold the same piece, so that copies are made in memory from time to time."""
        return self.num_pieces == NUM_RANKS


def _prepare_ddp(model: Any) -> tuple[Any, Any]:
    import torch

    model = raysgd.torch.prepare_model(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _collect_replica(model: Any, optimizer: Any) -> dict[str, Any]:
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {**model.state_dict(), **{f"moment {number}": each for number, each in enumerate(moments)}}


def _prepare_hybrid(model: Any) -> tuple[Any, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(raysgd.world_rank())  # for dropout
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _collect_hybrid(model: Any, optimizer: Any) -> dict[str, Any]:
    return {name: tensor.full_tensor().detach() for name, tensor in _collect_replica(model, optimizer).items()}


def _prepare_zero(model: Any) -> tuple[Any, Any]:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = raysgd.torch.prepare_model(model)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)


def _collect_model(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(model.state_dict())


KINDS = {
    "ddp": Kind(_prepare_ddp, _collect_replica),
    "zero 1": Kind(_prepare_zero, _collect_model, num_pieces=NUM_RANKS),
    "hybrid": Kind(_prepare_hybrid, _collect_hybrid, "LayerNorm", 2),
}


def make_plan(seed: int, num_kills: int, num_pieces: int = 1) -> list[Kill]:
    """Return a plan of kills, each of which lets training continue from the memory of survivors: each piece has one."""
    chosen, plan, step, group = random.Random(seed), list[Kill](), 1, 0
    while len(plan) < num_kills:
        step, group = step + chosen.randint(1, 5), group + 1
        one, other = chosen.sample(range(NUM_RANKS), 2)
        if num_pieces > 1 and one % num_pieces == other % num_pieces:
            other = (other + 1) % NUM_RANKS
        moment = chosen.uniform(0, 0.1)
        first = Kill(group, step, one, "clock", moment)
        shape = chosen.choice(
            ["code"] * 6
            + ["clock"] * 4
            + ["two", "regroup", "copy"]
            + ["source"] * 2 * (num_pieces == 1)
            + ["exchange"] * 4 * (1 < num_pieces < NUM_RANKS)
        )
        match shape if len(plan) + 1 < num_kills else "code":
            case "code":
                plan.append(Kill(group, step, one, "code", chosen.randrange(CALLS_OF_STEP)))
            case "exchange":
                plan.append(Kill(group, step, one, "exchange", chosen.uniform(0, 0.003)))
            case "clock":
                plan.append(first)
            case "two":
                plan += [first, replace(first, rank=other)]
            case "regroup":  # while the next group forms
                plan += [first, replace(first, rank=other, moment=moment + chosen.uniform(0.01, 0.7))]
            case "source":  # of the state, around the time when it is sent
                plan += [first, Kill(group, step, 0 if one else 1, "entry", chosen.uniform(0, 0.03))]
            case "copy":  # the rank that gets it
                plan += [first, Kill(group, step, one, "entry", chosen.uniform(0, 0.03))]
    return plan


class Killer:
    """Carries out the kills of this rank. Runs in a worker.

    Args:
        folder: What has happened.
        plan: The kills of all ranks.
        rank: The rank.
        holders: The ranks that hold the same piece of the state as this one.
    """

    def __init__(self, folder: Path, plan: list[Kill], rank: int, holders: range = range(NUM_RANKS)) -> None:
        self._folder = folder
        self._plan = plan
        self._rank = rank
        self._holders = holders
        self._armed: list[Kill] = []
        self._entered_at = time.time()
        self._shell = subprocess.Popen(["sh", "-c", _KILLER], stdin=subprocess.PIPE)  # ends with this process

    def enter(self) -> None:
        """Train_func was entered: carry out what is due then."""
        for kill in self._plan:
            is_due = kill.how == "entry" and any(
                (self._folder / each.name).exists() for each in self._plan if each.group == kill.group and each != kill
            )
            if is_due and kill.rank == self._rank and self._is_first(kill):
                self._die_after(kill)

    def on_loaded(self) -> None:
        """This rank has its piece of the state."""
        self._loaded_file(self._rank).touch()

    def begin(self, step: int) -> None:
        """A step begins: carry out what is due in it."""
        for kill in self._plan:
            if kill.rank != self._rank or kill.how == "entry" or step < kill.step or kill in self._armed:
                continue
            # In an earlier attempt; else two ranks with the same piece of the state could die at once.
            if not all(self._happened_before(each) for each in self._plan if each.group < kill.group):
                continue
            if len(self._holders) < NUM_RANKS:
                self._wait_for_holders()
            # Another kill may end the attempt before that call is reached: it is due again then.
            happens_later = kill.how in ("code", "exchange")
            is_due = not (self._folder / kill.name).exists() if happens_later else self._is_first(kill)
            if is_due:
                self._armed.append(kill)
                match kill.how:
                    case "code":
                        self._die_in_call(kill)
                    case "exchange":
                        self._die_in_exchange(kill)
                    case _:
                        self._die_after(kill)

    def _wait_for_holders(self) -> None:
        """Wait until all that hold this rank's piece have it: it may be the only one from which a new rank can copy it."""
        while not all(self._loaded_file(rank).exists() for rank in self._holders):
            time.sleep(0.001)

    def _loaded_file(self, rank: int) -> Path:
        return self._folder / f"loaded {context.installed().attempt} {rank}"

    def _happened_before(self, kill: Kill) -> bool:
        """Whether a kill happened before this rank entered train_func."""
        path = self._folder / kill.name
        return path.exists() and path.stat().st_mtime < self._entered_at

    def _is_first(self, kill: Kill) -> bool:
        return once(str(self._folder), f"armed {kill.name}")

    def _die_after(self, kill: Kill) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{kill.moment:.4f} {self._folder / kill.name}\n".encode())
        self._shell.stdin.flush()

    def _die_in_exchange(self, kill: Kill) -> None:
        note, file = Agreement._note, self._folder / kill.name

        def die() -> None:
            time.sleep(kill.moment)
            file.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        def note_and_die(agreement: Agreement, step: str) -> None:
            note(agreement, step)
            threading.Thread(target=die, daemon=True).start()

        Agreement._note = note_and_die  # type: ignore[method-assign]

    def _die_in_call(self, kill: Kill) -> None:
        left, file = int(kill.moment), self._folder / kill.name

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal left
            if event in ("call", "c_call"):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    file.write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model with dropout and batch norm; log the rows of each step, and when it was complete."""
    import torch

    rank, kind, folder = raysgd.world_rank(), KINDS[config["kind"]], Path(config["folder"])
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, WIDTH), getattr(torch.nn, kind.norm)(WIDTH), torch.nn.Dropout(0.3)]
    layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)]
    model, optimizer = kind.prepare(torch.nn.Sequential(*layers))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    live = raysgd.live_state(model=model, optimizer=optimizer, scheduler=scheduler)
    holders = range(rank % kind.num_pieces, NUM_RANKS, kind.num_pieces)
    killer = Killer(folder / "kills", [Kill(*each) for each in config["plan"]], rank, holders)
    killer.enter()
    state = raysgd.load_checkpoint()
    step = 0
    if state is not None:
        live.load_state_dict(state)
        step = state["step"]
    killer.on_loaded()
    batches = raysgd.get_dataset().get_split().to_torch(batch_size=BATCH, shuffle="full")
    name = f"{context.installed().attempt}-{step}-{rank}"
    rows, done = (folder / "rows" / name).open("a"), (folder / "done" / name).open("a")
    for epoch in range(batches.epoch, config["num_epochs"]):
        for batch in batches:
            killer.begin(step + 1)
            rows.writelines(f"{step + 1} {epoch} {row}\n" for row in batch["row"].tolist())
            rows.flush()
            loss = (model(batch["x"].float()) - batch["row"][:, None]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            raysgd.report(step=step)
            live.step(step=step)
            done.write(f"{step} {time.time()}\n")
            done.flush()
            time.sleep(config["sleep_s"])
    return {name: tensor.numpy() for name, tensor in kind.collect(model, optimizer).items()}


@dataclass(frozen=True)
class Outcome:
    """What a run has left.

    Attributes:
        tensors: The final ones, by name.
        to_next_step_s: The seconds from each kill to the next step that all ranks had completed.
    """

    tensors: Mapping[str, Any]
    to_next_step_s: list[float]


def run(
    trainer: raysgd.Trainer, folder: Path, kind: str, plan: list[Kill], num_steps: int, sleep_s: float = 0.0
) -> Outcome:
    """Train with the kills of a plan, and check that each of them cost one step; each step sleeps for some seconds."""
    for name in ("kills", "rows", "done"):
        (folder / name).mkdir(parents=True)
    num_epochs = -(-num_steps // STEPS_PER_EPOCH)
    config = {"folder": str(folder), "kind": kind, "plan": [astuple(kill) for kill in plan], "num_epochs": num_epochs}
    config["sleep_s"] = sleep_s
    data = {"x": np.random.default_rng(0).normal(size=(NUM_ROWS, 4)), "row": np.arange(NUM_ROWS)}
    tensors = trainer.run(train, config, dataset=data, callbacks=quiet())
    missing = [kill for kill in plan if not (folder / "kills" / kill.name).exists()]
    assert not missing, f"did not happen: {missing}"
    _check_attempts(trainer, folder, KINDS[kind])
    rows = rows_that_count(folder / "rows")
    assert rows == Counter({(epoch, row): 1 for epoch in range(num_epochs) for row in range(NUM_ROWS)})
    return Outcome(tensors, _times_to_next_step(folder, plan))


def _check_attempts(trainer: raysgd.Trainer, folder: Path, kind: Kind) -> None:
    """Check that no attempt started from storage, and that at most one complete step was repeated in each.

    With copies, the complete steps since the newest one are repeated too.
    """
    kinds = ("attempt_start", "failure", "regroup", "continued", "warning")
    events = latest_run(trainer).events
    happened = "\n".join(
        f"{kind} {data}" for kind, data in zip(events["kind"], events["data"], strict=True) if kind in kinds
    )
    for first, start in enumerate(events_of(trainer, "attempt_start")):
        assert (start["checkpoint"], start["memory"]) == (None, None)
        assert start["live"] is not None or not first or start["iterations_before"] == 0, happened
    if kind.is_copied:
        return
    assert all(each["num_repeated"] == 1 for each in events_of(trainer, "continued"))
    ends = ends_of_attempts(folder / "rows")
    for path in (folder / "done").glob("*-*-*"):
        attempt, first, _ = map(int, path.name.split("-"))
        last = max((int(line.split()[0]) for line in path.read_text().splitlines()), default=first)
        assert last <= ends[attempt] + 1, f"attempt {attempt} had completed step {last}\n{happened}"


def _times_to_next_step(folder: Path, plan: list[Kill]) -> list[float]:
    began: dict[int, list[float]] = {}  # by attempt, when each rank completed its first step
    for path in (folder / "done").glob("*-*-*"):
        if lines := path.read_text().splitlines():
            began.setdefault(int(path.name.split("-")[0]), []).append(float(lines[0].split()[1]))
    whole = sorted(max(times) for times in began.values() if len(times) == NUM_RANKS)
    killed = [float((folder / "kills" / kill.name).read_text()) for kill in plan]
    return sorted(min(each for each in whole if each > at) - at for at in killed)

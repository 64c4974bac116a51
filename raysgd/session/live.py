"""`LiveState`: the training state that a rank holds anyway, from which the next attempt starts without a save. Worker side.

After each step train_func says that all its changes are made, and small things are recorded: random generators, positions of the
data, learning rates, buffers. Parameters and the optimizer's state are not copied. If the attempt ends before they are changed
again, they are the state after that step: `LiveState.take` puts both together, and the process keeps it until the next attempt.

An optimizer's step begins the changes, and `LiveState.step` ends them. The state of a rank that left train_func in between is
never taken, nor one whose tensors count other changes.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from raysgd._util.imports import imported
from raysgd.errors import UsageError
from raysgd.session.events import NUM_MARKS, HeldStep, Mark, add_mark


class Attempt(Protocol):
    """The part of a `raysgd.session.worker.WorkerSession` that a live state uses."""

    num_reports: int
    was_settled: bool
    send_mark: Callable[[Mark], None]

    def own_state(self) -> bytes: ...

    def held_step(self, step: int) -> HeldStep: ...

    def on_complete_step(self) -> None: ...

    def check_live(self) -> None: ...


#: Steps after which the parameters of the modules are the same objects.
_SETTLED_AFTER = 3

#: Optimizers of which each rank may hold a shard: torch's, and that of raysgd's engine.
_SHARDING = frozenset({"ZeroRedundancyOptimizer", "EngineOptimizer"})


@final
class KeptState:
    """The state of a complete step, in the memory of this process.

    Args:
        held: The step.
        state: As `LiveState.state_dict` returns it.
    """

    def __init__(self, held: HeldStep, state: dict[str, Any]) -> None:
        self.held = held
        self.state = state
        self._tensors = list(_tensors_in(state))
        self._versions = _versions(self._tensors)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed the tensors, as far as torch counts changes."""
        return _versions(self._tensors) == self._versions


@dataclass(frozen=True)
class _Complete:
    """What is recorded of a complete step."""

    held: HeldStep
    num_reports: int
    values: dict[str, Any]
    buffers: dict[int, Any]  # by the identity of the buffer
    groups: dict[str, list[dict[str, Any]]]  # of each optimizer, without parameters
    others: dict[str, Any]


@final
class LiveState:
    """The state of the training, from which it continues after a death. Made by `raysgd.live_state`.

    Args:
        session: The attempt; None outside a worker, where nothing continues.
        objects: What has a ``state_dict()``, by name.

    Attributes:
        is_changing: An optimizer has begun to change the state, which `step` ends.
        num_steps: Complete steps.
        marks: The newest marks of this rank, oldest first.
    """

    def __init__(self, session: Attempt | None, objects: Mapping[str, Any]) -> None:
        for name, given in objects.items():
            if not hasattr(given, "state_dict"):
                raise UsageError(
                    f"live_state({name}=...) got a {type(given).__name__}, which has no state_dict(): give values that change in "
                    f"each step to its step({name}=...)."
                )
        self._session = session
        self._objects = dict(objects)
        self._values: dict[str, Any] = {}
        self._complete: _Complete | None = None
        self._small = self._small_after_pass = self._small_at_change = b""
        self._reports_in_step = 0
        self._is_in_step = False
        self._is_settled = True
        self._hooks: list[Any] = []
        self._parameters: list[Any] = []
        self._tensors: list[Any] = []
        self._versions: list[int] | None = None
        self.is_changing = False
        self.num_steps = 0
        self.marks: deque[Mark] = deque(maxlen=NUM_MARKS)
        if session is not None and (torch := imported("torch")) is not None:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._hooks.append(register_optimizer_step_pre_hook(self._on_change))
            modules = [given for given in self._objects.values() if isinstance(given, torch.nn.Module)]
            self._hooks += [module.register_forward_hook(self._on_pass) for module in modules]

    # -- what train_func calls ----------------------------------------------------------------------------------------

    def step(self, **values: Any) -> None:
        """Declare that all changes of this step are made. Call it at the end of each step, on every rank.

        Where gradients of several batches make a step, a call after a batch that has changed nothing does nothing: training
        resumes from the last change, as gradients are not part of the state.

        Args:
            **values: Small values that belong to the state, such as ``epoch=epoch``. They are copied.

        Raises:
            UsageError: The ranks have shards of the state.
            SessionError: The attempt is over.
        """
        self._values, session = values, self._session
        if session is not None:
            if not self.num_steps:
                self._check_is_whole()
            if not (self._note_tensors() or self.is_changing) and self._tensors:
                session.check_live()
                return
            self._record(session, copy.deepcopy(values))
        self.num_steps += 1
        self.is_changing = self._is_in_step = False
        if session is not None:
            session.on_complete_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `raysgd.load_checkpoint` returns it: ``raysgd.save_checkpoint(live)`` saves it."""
        return {name: given.state_dict() for name, given in self._objects.items()} | self._values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `raysgd.load_checkpoint` returned into the objects; values of `step` are left to the caller."""
        for name, given in self._objects.items():
            given.load_state_dict(state[name])
        self._values = {name: value for name, value in state.items() if name not in self._objects}

    # -- what the worker calls ----------------------------------------------------------------------------------------

    def take(self) -> KeptState | None:
        """Return the state of the newest complete step; None if there is none, or if it was changed since."""
        complete, self._complete = self._complete, None
        if complete is None or self._session is None or self.is_changing:
            return None
        if self._note_tensors(lists_parameters=True):
            return None
        held = complete.held
        reports = self._reports_in_step if self._is_in_step else self._session.num_reports
        # What is reported after a step and before the next forward pass is about that step.
        held = replace(held, iteration=held.iteration + reports - complete.num_reports)
        state = {name: self._state_of(name, given, complete) for name, given in self._objects.items()}
        return KeptState(held, state | complete.values)

    def close(self) -> None:
        """Release the user's objects."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._objects.clear()
        self._parameters.clear()
        self._tensors.clear()
        self._complete = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _record(self, session: Attempt, values: dict[str, Any]) -> None:
        """Record what belongs to the step that is complete now, except for the tensors that are not copied."""
        step = self.num_steps + 1
        small = session.own_state()
        is_last_pass = small == self._small_after_pass and (not self.is_changing or small == self._small_at_change)
        self._is_settled = self._is_settled and self._is_in_step and is_last_pass
        optimizers = {name: given for name, given in self._objects.items() if _is_optimizer(given)}
        self._complete = _Complete(
            session.held_step(step),
            session.num_reports,
            values,
            {id(buffer): buffer.detach().clone() for buffer in self._buffers()},
            {name: [_settings(group) for group in given.param_groups] for name, given in optimizers.items()},
            {
                name: copy.deepcopy(given.state_dict())
                for name, given in self._objects.items()
                if name not in optimizers and not _is_module(given)
            },
        )
        self._mark(session, Mark(step, small, is_settled=self._is_settled))

    def _on_pass(self, module: Any, args: Any, output: Any) -> None:
        """A forward pass is over. One for a gradient begins the next step."""
        session, torch = self._session, imported("torch")
        if session is None or torch is None or not torch.is_grad_enabled():
            return
        if self._versions is None:
            self._note_tensors()
        if not self._is_in_step:
            self._reports_in_step, self._is_in_step = session.num_reports, True
        self._small_after_pass = session.own_state()
        is_settled = self._is_settled and (self.num_steps > 0 or session.was_settled)
        self._mark(session, Mark(self.num_steps, self._small_after_pass, True, is_settled))

    def _on_change(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer is about to change the state, if it has parameters of it."""
        session, torch = self._session, imported("torch")
        if self._parameters and not any(optimizer is given for given in self._objects.values()):
            given = {id(each) for group in optimizer.param_groups for each in group["params"]}
            if given.isdisjoint(map(id, self._parameters)):
                return
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # so that the gradients are those of all ranks, or the attempt is over
        if session is not None:
            session.check_live()
        self._small_at_change = (
            self._small_after_pass
        )  # the gradients are those of all ranks: all have made their passes
        self.is_changing = True

    def _mark(self, session: Attempt, mark: Mark) -> None:
        is_same = mark.small == self._small
        self._small = mark.small or b""
        add_mark(self.marks, mark)
        session.send_mark(replace(mark, small=None) if is_same else mark)

    def _note_tensors(self, *, lists_parameters: bool = False) -> bool:
        """Note the tensors that are not copied, and how often they were changed; return whether that is new.

        Optimizers may make the tensors of their states in any step.
        """
        given = list(self._objects.values())
        if lists_parameters or self.num_steps < _SETTLED_AFTER:
            self._parameters = [each for module in given if _is_module(module) for each in module.parameters()]
        states = [state for optimizer in given if _is_optimizer(optimizer) for state in optimizer.state.values()]
        now = [*self._parameters, *(each for state in states for each in state.values() if hasattr(each, "_version"))]
        versions, before = _versions(now), self._tensors
        is_same = versions == self._versions and all(map(operator.is_, now, before))
        self._tensors, self._versions = now, versions
        return not is_same

    def _buffers(self) -> Iterator[Any]:
        for given in self._objects.values():
            for module in given.modules() if _is_module(given) else ():
                named = module._buffers.items()
                computed = module._non_persistent_buffers_set
                yield from (buffer for name, buffer in named if buffer is not None and name not in computed)

    def _state_of(self, name: str, given: Any, complete: _Complete) -> Any:
        if name in complete.others:
            return complete.others[name]
        if _is_module(given):
            state = given.state_dict(keep_vars=True)
            for key, value in state.items():
                if hasattr(value, "detach"):
                    state[key] = complete.buffers.get(id(value), value).detach()
            return state
        state = given.state_dict()
        groups = zip(state["param_groups"], complete.groups[name], strict=False)  # one may have been added since
        return {**state, "param_groups": [{**group, **settings} for group, settings in groups]}

    def _check_is_whole(self) -> None:
        for name, given in self._objects.items():
            tensors = given.parameters() if _is_module(given) else ()
            is_shard = not _SHARDING.isdisjoint(base.__name__ for base in type(given).__mro__)
            if is_shard or any(hasattr(each, "to_local") for each in tensors):
                raise UsageError(
                    f"live_state({name}=...): each rank may hold a shard of it, and those of a dead rank are nowhere "
                    "else. Use save_checkpoint with CheckpointConfig(keep_in_memory=True), which copies them to another node."
                )


def _tensors_in(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        if hasattr(state, "_version"):
            yield state
        return
    for each in state:
        yield from _tensors_in(each)


def _versions(tensors: Any) -> list[int]:
    return [tensor._version for tensor in tensors]


def _is_module(given: Any) -> bool:
    return hasattr(given, "parameters") and hasattr(given, "buffers")


def _is_optimizer(given: Any) -> bool:
    return hasattr(given, "param_groups") and hasattr(given, "state")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a group of parameters has in addition to them. A rate may be a tensor."""
    given = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if hasattr(value, "clone") else copy.copy(value) for name, value in given.items()}

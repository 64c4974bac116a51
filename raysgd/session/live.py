"""`LiveState`: the training state that a rank holds anyway, from which the next attempt starts without a save. Worker side.

After each step train_func says that all its changes are made, and small things are recorded: random generators, positions of the
data, learning rates, buffers. Parameters and the optimizer's state are not copied. If the attempt ends before they are changed
again, they are the state after that step: `LiveState.take` puts both together, and the process keeps it until the next attempt.

An optimizer's step begins the changes, and `LiveState.step` ends them. The state of a rank that left train_func in between is
never taken, nor one whose tensors count other changes.

Loops of raysgd have one by themselves: `raysgd.train.loop.train` calls `LiveState.complete`.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

from raysgd._util.imports import imported
from raysgd.errors import UsageError
from raysgd.session.events import NUM_MARKS, HeldStep, Mark


class Attempt(Protocol):
    """The part of a `raysgd.session.worker.WorkerSession` that a live state uses."""

    num_reports: int
    send_mark: Callable[[Mark], None]

    def own_state(self) -> bytes: ...

    def held_step(self, step: int) -> HeldStep: ...

    def on_complete_step(self, *, needs_start: bool) -> None: ...

    def check_live(self) -> None: ...


@runtime_checkable
class Snapshots(Protocol):
    """An object of a live state that records its own state, in place of copies of its ``state_dict()``."""

    def snapshot(self) -> Callable[[], Any]:
        """Return a function that returns the state as it is now, also if it is called after further steps.

        The function raises `NotComputedError` if the state never came about.
        """


@runtime_checkable
class LiveParts(Protocol):
    """An object of several parts, such as `raysgd.Engine`, which loads and saves them itself."""

    def live_parts(self) -> Mapping[str, Any]:
        """Return the objects to hold, by name, or raise why their state cannot be held."""


class NotComputedError(Exception):
    """The device has not computed the state of a step, because ranks have left within it."""


#: Steps after which the tensors of the state are the same objects.
_SETTLED_AFTER = 3

#: Types of values that do not change.
_PLAIN = frozenset({int, float, bool, str, type(None)})
#: An optimizer of torch of which each rank holds a shard.
_SHARDING = "ZeroRedundancyOptimizer"


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
    values: Callable[[], Mapping[str, Any]]
    versions: list[int]
    buffers: dict[int, Any]  # by the identity of the buffer
    groups: dict[str, list[dict[str, Any]]]  # of each optimizer, without parameters
    others: dict[str, Any]


@final
class LiveState:
    """The state of the training, from which it continues after a death. Made by `raysgd.live_state`.

    Args:
        session: The attempt; None outside a worker, where nothing continues.
        objects: What has a ``state_dict()``, or is one of `Snapshots`, by name.
        has_own_state: Whether a rank has generators and positions that others do not have. If not, theirs are not part of the
            state.

    Attributes:
        is_changing: An optimizer has begun to change the state, which `step` ends.
        num_steps: Complete steps.
        marks: The newest marks of this rank, oldest first.
    """

    def __init__(self, session: Attempt | None, objects: Mapping[str, Any], *, has_own_state: bool = True) -> None:
        self._has_parts = any(isinstance(given, LiveParts) for given in objects.values())
        for name, given in list(objects.items()):
            if isinstance(given, LiveParts):
                objects = {**{key: each for key, each in objects.items() if key != name}, **given.live_parts()}
        for name, given in objects.items():
            if not hasattr(given, "state_dict") and not isinstance(given, Snapshots):
                raise UsageError(
                    f"live_state({name}=...) got a {type(given).__name__}, which has no state_dict(): give values that change in "
                    f"each step to its step({name}=...)."
                )
        self._session = session
        self._objects = dict(objects)
        # Decided once, as these are asked for in each step.
        self._optimizers = {name: given for name, given in objects.items() if _is_optimizer(given)}
        self._snapshots = {name: given for name, given in objects.items() if isinstance(given, Snapshots)}
        copied = [each for each in objects if each not in {*self._optimizers, *self._snapshots}]
        self._copied = {name: objects[name] for name in copied if not _is_module(objects[name])}
        self._has_own_state = has_own_state
        self._values: dict[str, Any] = {}
        #: The newest step, and the one before it if no object is changed in place.
        self._complete: deque[_Complete] = deque(maxlen=1 + (len(self._snapshots) == len(objects)))
        self._small = self._small_after_pass = b""
        self._reports_in_step = 0
        self._counts_reports = False
        self._is_in_step = False
        self._is_settled = True
        self._hooks: list[Any] = []
        self._tensors: list[Any] = []
        self._buffered: list[Any] = []  # modules
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

        Args:
            **values: Small values that belong to the state, such as ``epoch=epoch``. They are copied.

        Raises:
            UsageError: The ranks have shards of the state.
            SessionError: The attempt is over.
        """
        self._values = values
        copied = _copied(values) if self._session is not None else values
        self.complete(lambda: copied, counts_reports=True)

    def complete(
        self, values: Callable[[], Mapping[str, Any]], *, is_same_step: bool = False, counts_reports: bool = False
    ) -> None:
        """Declare that all changes of this step are made, for loops of raysgd.

        Args:
            values: Returns the values of this step that belong to the state, also if it is called after further steps.
            is_same_step: The newest step is recorded again, with what was done after it.
            counts_reports: What is reported afterwards, before the next forward pass, is about this step, and not reported again
                when training continues from it.
        """
        self._counts_reports = counts_reports
        if is_same_step and not self.num_steps:  # nothing was changed in this attempt
            return
        if self._session is not None:
            if not self.num_steps:
                self._check_is_whole()
            self._record(self._session, values, is_same_step=is_same_step)
        self.num_steps += not is_same_step
        self.is_changing = self._is_in_step = False
        if self._session is not None:
            # A step that the device computes later is computed, and all ranks are in it, when the next one is complete.
            self._session.on_complete_step(needs_start=self.num_steps < (self._complete.maxlen or 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `raysgd.load_checkpoint` returns it: ``raysgd.save_checkpoint(live)`` saves it."""
        self._check_objects("engine.save_checkpoint(...) saves")
        return {name: given.state_dict() for name, given in self._objects.items()} | self._values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `raysgd.load_checkpoint` returned into the objects; values of `step` are left to the caller."""
        self._check_objects("engine.load_checkpoint() loads")
        for name, given in self._objects.items():
            given.load_state_dict(state[name])
        self._values = {name: value for name, value in state.items() if name not in self._objects}

    # -- what the worker calls ----------------------------------------------------------------------------------------

    def take(self) -> KeptState | None:
        """Return the state of the newest complete step; None if there is none, or if it was changed since."""
        if not self._complete or self._session is None or self.is_changing:
            return None
        now = self._list_tensors()
        is_same = len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))
        is_same = is_same and self._list_buffered() == self._buffered
        if not is_same or _versions(now) != self._complete[-1].versions:
            return None
        num_reports = self._reports_in_step if self._is_in_step else self._session.num_reports
        while self._complete:
            complete = self._complete.pop()
            with suppress(NotComputedError):
                state = {name: self._state_of(name, given, complete) for name, given in self._objects.items()}
                more = num_reports - complete.num_reports if self._counts_reports else 0
                held = replace(complete.held, iteration=complete.held.iteration + more)
                return KeptState(held, {**state, **complete.values()})
        return None

    def close(self) -> None:
        """Release the user's objects."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._objects.clear()
        self._tensors.clear()
        self._complete.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_objects(self, what_does: str) -> None:
        if self._has_parts:
            raise UsageError(f"live_state(engine=...): {what_does} the state of an engine; call that instead.")

    def _record(self, session: Attempt, values: Callable[[], Mapping[str, Any]], *, is_same_step: bool) -> None:
        """Record what belongs to the step that is complete now, except for the tensors that are not copied."""
        step = self.num_steps + (not is_same_step)
        place = self._complete.pop().held.place + 1 if is_same_step and self._complete else 0
        small = self._own_state(session)
        if step <= _SETTLED_AFTER:  # an optimizer makes its state in its first steps
            self._tensors, self._buffered = self._list_tensors(), self._list_buffered()
        self._is_settled = self._is_settled and (is_same_step or self._is_in_step) and small == self._small_after_pass
        others = {name: _copied(given.state_dict()) for name, given in self._copied.items()}
        complete = _Complete(
            replace(session.held_step(step), place=place),
            session.num_reports,
            values,
            _versions(self._tensors),
            {id(buffer): buffer.detach().clone() for buffer in self._buffers()},
            {name: [_settings(group) for group in given.param_groups] for name, given in self._optimizers.items()},
            others | {name: given.snapshot() for name, given in self._snapshots.items()},
        )
        self._complete.append(complete)
        if not is_same_step or small != self._small:
            self._mark(session, Mark(step, small, is_settled=self._is_settled))

    def _own_state(self, session: Attempt) -> bytes:
        return session.own_state() if self._has_own_state else b"{}"

    def _on_pass(self, module: Any, args: Any, output: Any) -> None:
        """A forward pass is over. One for a gradient begins the next step."""
        torch = imported("torch")
        if torch is not None and torch.is_grad_enabled() and not self.is_changing:
            self.begin_step()

    def begin_step(self) -> None:
        """Record that this rank has read its rows of the next step, and drawn its random numbers: its exchange follows."""
        if (session := self._session) is None:
            return
        if not self._is_in_step:
            self._reports_in_step, self._is_in_step = session.num_reports, True
        self._small_after_pass = self._own_state(session)
        is_settled = self._is_settled and self.num_steps > 0
        self._mark(session, Mark(self.num_steps, self._small_after_pass, True, is_settled))

    def _on_change(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer is about to change the state."""
        session, torch = self._session, imported("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # so that the gradients are those of all ranks, or the attempt is over
        if session is not None:
            session.check_live()
        self.is_changing = True

    def _mark(self, session: Attempt, mark: Mark) -> None:
        self._small = mark.small or b""
        self.marks.append(mark)
        session.send_mark(mark)

    def _list_tensors(self) -> list[Any]:
        """Return the tensors that are not copied."""
        found: list[Any] = []
        for given in self._objects.values():
            if _is_optimizer(given):
                values = [value for state in given.state.values() for value in state.values()]
                found += [value for value in values if hasattr(value, "_version")]
            elif _is_module(given):
                found += given.parameters()
            elif hasattr(given, "live_tensors"):
                found += given.live_tensors()
        return found

    def _list_buffered(self) -> list[Any]:
        """Return the modules that have buffers."""
        modules = (module for given in self._objects.values() if _is_module(given) for module in given.modules())
        return [module for module in modules if module._buffers]

    def _buffers(self) -> Iterator[Any]:
        for module in self._buffered:
            computed = module._non_persistent_buffers_set
            named = module._buffers.items()
            yield from (buffer for name, buffer in named if buffer is not None and name not in computed)

    def _state_of(self, name: str, given: Any, complete: _Complete) -> Any:
        if name in complete.others:
            return complete.others[name]() if name in self._snapshots else complete.others[name]
        if _is_module(given):
            state = given.state_dict(keep_vars=True)
            for key, value in state.items():
                if hasattr(value, "detach"):
                    state[key] = complete.buffers.get(id(value), value).detach()
            return state
        state = given.state_dict()
        groups = zip(state["param_groups"], complete.groups[name], strict=True)
        return {**state, "param_groups": [{**group, **settings} for group, settings in groups]}

    def _check_is_whole(self) -> None:
        for name, given in self._objects.items():
            tensors = given.parameters() if _is_module(given) else ()
            is_shard = getattr(given, "is_sharded", False) or any(
                each.__name__ == _SHARDING for each in type(given).__mro__
            )
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
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    """Return a deep copy; of plain values several times faster than `copy.deepcopy`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if kind is list else copy.deepcopy(value)

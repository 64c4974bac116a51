"""`LiveState`: the training state that a rank holds anyway, from which the next attempt starts without a save. Worker side.

After each step train_func says that all its changes are made, and small things are recorded: random generators, positions of the
data, learning rates, buffers. Parameters and the optimizer's state are not copied. If the attempt ends before they are changed
again, they are the state after that step: `LiveState.take` puts both together, and the process keeps it until the next attempt.

An optimizer's step begins the changes, and `LiveState.step` ends them. The state of a rank that left train_func in between is
never taken, nor one whose tensors count other changes.

A rank may hold a piece of the state. Where other ranks hold the same piece, no rank begins the changes of a step before all ranks
have their gradients: otherwise one piece could be a step ahead of another. Where no other rank holds it, the state is copied to
the cluster's memory from time to time.

Loops of raysgd have one by themselves: `raysgd.train.loop.train` calls `LiveState.complete`.
"""

from __future__ import annotations

import copy
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

from raysgd._util.imports import imported
from raysgd.errors import UsageError
from raysgd.session.events import NUM_MARKS, HeldStep, Mark, add_mark
from raysgd.session.live.agreement import Agreement
from raysgd.session.live.copies import CopyInterval
from raysgd.session.live.kept import KeptState, counted, leave_room, versions
from raysgd.session.live.pieces import are_replicated, describe_piece, number_pieces


class Attempt(Protocol):
    """The part of a `raysgd.session.worker.WorkerSession` that a live state uses."""

    num_reports: int
    was_settled: bool
    known_pieces: tuple[int, ...] | None
    send_mark: Callable[[Mark], None]

    @property
    def world_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_ended(self) -> bool: ...

    def own_state(self) -> bytes: ...

    def held_step(self, step: int) -> HeldStep: ...

    def on_complete_step(self, *, needs_start: bool, is_whole: bool) -> None: ...

    def gather(self, obj: Any) -> list[Any]: ...

    def copy_to_memory(self, step: int, state: Any) -> None: ...

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
        """Return the objects to hold, by name."""

    def live_copy(self) -> Callable[[], Mapping[str, Any]] | None:
        """Return what returns this rank's part of a copy of the state; None: each rank holds all, by `live_parts`."""


@final
class CopiedParts:
    """Parts that are in the values of each step, and are copied to memory with them."""

    def live_parts(self) -> dict[str, Any]:
        """Return nothing to hold."""
        return {}

    def live_copy(self) -> Callable[[], dict[str, Any]]:
        """Return what adds nothing to the values."""
        return dict


class NotComputedError(Exception):
    """The device has not computed the state of a step, because ranks have left within it."""


#: Steps after which the parameters and the modules with buffers are the same objects.
_SETTLED_AFTER = 3
#: Types of values that do not change.
_PLAIN = frozenset({int, float, bool, str, type(None)})


@dataclass(frozen=True)
class _Complete:
    """What is recorded of a complete step."""

    held: HeldStep
    num_reports: int
    values: Callable[[], Mapping[str, Any]]
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
        is_copied: No other rank holds this rank's part, so that the state is copied to memory from time to time.
        is_changing: An optimizer has begun to change the state, which `step` ends.
        num_steps: Complete steps.
        marks: The newest marks of this rank, oldest first.
    """

    def __init__(self, session: Attempt | None, objects: Mapping[str, Any], *, has_own_state: bool = True) -> None:
        self._has_parts = any(isinstance(given, LiveParts) for given in objects.values())
        self._copies: list[Callable[[], Mapping[str, Any]]] = []
        for name, given in list(objects.items()):
            if isinstance(given, LiveParts):
                copy_of_parts = given.live_copy()
                parts = given.live_parts() if copy_of_parts is None else {}
                objects = {**{key: each for key, each in objects.items() if key != name}, **parts}
                self._copies += [] if copy_of_parts is None else [copy_of_parts]
        self.is_copied = bool(self._copies)
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
        self._small = self._small_after_pass = self._small_at_change = b""
        self._reports_in_step = 0
        self._counts_reports = False
        self._is_in_step = False
        self._is_settled = True
        self._hooks: list[Any] = []
        self._parameters: list[Any] = []
        self._buffered: list[Any] = []  # modules
        self._tensors: list[Any] = []
        self._versions: list[int] | None = None
        self._pieces: tuple[int, ...] | None = None  # not known
        self._interval: CopyInterval | None = None
        self._agreement: Agreement | None = None
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
            UsageError: No other rank holds this rank's piece of the state, and nothing is kept in memory.
            SessionError: The attempt is over.
        """
        self._values, session = values, self._session
        has_tensors = bool(self._tensors) or self.is_copied
        if session is not None and not (self._note_tensors() or self.is_changing) and has_tensors:
            session.check_live()
            return
        copied = _copied(values) if session is not None else values
        self._counts_reports = True
        self._on_complete(lambda: copied, is_same_step=False)

    def complete(self, values: Callable[[], Mapping[str, Any]], *, is_same_step: bool = False) -> None:
        """Declare that all changes of this step are made, for loops of raysgd.

        What is reported afterwards is reported again when training continues from this step.

        Args:
            values: Returns the values of this step that belong to the state, also if it is called after further steps.
            is_same_step: The newest step is recorded again, with what was done after it.
        """
        if is_same_step and not self.num_steps:  # nothing was changed in this attempt
            return
        if self._session is not None:
            self._note_tensors()
        self._on_complete(values, is_same_step=is_same_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `raysgd.load_checkpoint` returns it: ``raysgd.save_checkpoint(live)`` saves it.

        Where ranks hold pieces, give ``all_ranks=True``.
        """
        self._check_objects("engine.save_checkpoint(...) saves")
        return {name: _state_dict(given) for name, given in self._objects.items()} | self._values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `raysgd.load_checkpoint` returned into the objects; values of `step` are left to the caller.

        Raises:
            CheckpointError: The objects are distributed in another way than those of which this rank holds a piece.
        """
        self._check_objects("engine.load_checkpoint() loads")
        for name, given in self._objects.items():
            _load(given, state[name], f"state[{name!r}]")
        self._values = {name: value for name, value in state.items() if name not in self._objects}

    # -- what the worker calls ----------------------------------------------------------------------------------------

    def take(self) -> KeptState | None:
        """Return the state of the newest complete step; None if there is none, or if it was changed since."""
        if not self._complete or self._session is None or self.is_changing or self.is_copied:
            return None
        if self._note_tensors(lists_parameters=True):
            return None
        # What is reported after a step and before the next forward pass is about that step.
        num_reports = self._reports_in_step if self._is_in_step else self._session.num_reports
        while self._complete:
            complete = self._complete.pop()
            with suppress(NotComputedError):
                state = {name: self._state_of(name, given, complete) for name, given in self._objects.items()}
                more = num_reports - complete.num_reports if self._counts_reports else 0
                held = replace(complete.held, iteration=complete.held.iteration + more)
                return KeptState(held, leave_room({**state, **complete.values()}))
        return None

    def close(self) -> None:
        """Release the user's objects."""
        for hook in self._hooks:
            hook.remove()
        for holding in (self._hooks, self._objects, self._parameters, self._buffered, self._tensors, self._complete):
            holding.clear()
        for named in (self._optimizers, self._snapshots, self._copied):
            named.clear()
        self._copies.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_objects(self, what_does: str) -> None:
        if self._has_parts:
            raise UsageError(f"live_state(engine=...): {what_does} the state of an engine; call that instead.")

    def _on_complete(self, values: Callable[[], Mapping[str, Any]], *, is_same_step: bool) -> None:
        if self._session is not None:
            self._find_pieces(self._session)
            self._record(self._session, values, is_same_step=is_same_step)
        self.num_steps += not is_same_step
        self.is_changing = self._is_in_step = False
        if self._session is not None:
            # A step that the device computes later is computed, and all ranks are in it, when the next one is complete.
            needs_start = self.num_steps < (self._complete.maxlen or 1)
            self._session.on_complete_step(needs_start=needs_start, is_whole=not self._pieces)
            if not is_same_step:
                self._copy_to_memory(self._session, values)

    def _record(self, session: Attempt, values: Callable[[], Mapping[str, Any]], *, is_same_step: bool) -> None:
        """Record what belongs to the step that is complete now, except for the tensors that are not copied."""
        step = self.num_steps + (not is_same_step)
        place = self._complete.pop().held.place + 1 if is_same_step and self._complete else 0
        small = self._own_state(session)
        is_last_pass = small == self._small_after_pass and (not self.is_changing or small == self._small_at_change)
        self._is_settled = self._is_settled and (is_same_step or self._is_in_step) and is_last_pass
        others = {name: _copied(given.state_dict()) for name, given in self._copied.items()}
        complete = _Complete(
            replace(session.held_step(step), place=place, piece=self._own_piece, pieces=self._pieces or ()),
            session.num_reports,
            values,
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
        if torch is not None and torch.is_grad_enabled():
            if self._versions is None:
                self._note_tensors()
            self.begin_step()

    def begin_step(self) -> None:
        """Record that this rank has read its rows of the next step, and drawn its random numbers: its exchange follows."""
        if (session := self._session) is None:
            return
        if not self._is_in_step:
            self._reports_in_step, self._is_in_step = session.num_reports, True
        self._small_after_pass = self._own_state(session)
        is_settled = self._is_settled and (self.num_steps > 0 or session.was_settled)
        self._mark(session, Mark(self.num_steps, self._small_after_pass, True, is_settled))

    def _on_change(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer is about to change the state, if it has parameters of it."""
        session, torch = self._session, imported("torch")
        is_own = self._is_own(optimizer)
        if self._parameters and not is_own:
            given = {id(each) for group in optimizer.param_groups for each in group["params"]}
            if given.isdisjoint(map(id, self._parameters)):
                return
        self._small_at_change = self._small_after_pass  # gradients of all ranks are there: all have made their passes
        if session is not None and session.known_pieces is not None and is_own:
            self._find_pieces(session)
        if self._agreement is not None and session is not None and is_own:
            if not self.is_changing:
                self._agree(session, self._agreement)
            return
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # so that the gradients are those of all ranks, or the attempt is over
        if session is not None:
            session.check_live()
        self.is_changing = True

    def _is_own(self, optimizer: Any) -> bool:
        own = (
            each for given in self._objects.values() for each in (given, _inner(given), getattr(given, "inner", None))
        )
        return any(optimizer is each for each in own)

    def _agree(self, session: Attempt, agreement: Agreement) -> None:
        session.check_live()
        self.is_changing = True  # from here on the step is not interrupted
        try:
            agreement.reach(self.num_steps, lambda: session.is_ended)
        except BaseException:
            self.is_changing = False
            session.check_live()
            raise

    def _mark(self, session: Attempt, mark: Mark) -> None:
        self._small = mark.small or b""
        add_mark(self.marks, mark)
        session.send_mark(mark)

    def _note_tensors(self, *, lists_parameters: bool = False) -> bool:
        """Note the tensors that are not copied, and how often they were changed; return whether that is new.

        Optimizers may make the tensors of their states in any step.
        """
        given, modules = list(self._objects.values()), self._buffered
        if lists_parameters or self.num_steps < _SETTLED_AFTER:
            found = [each for module in given if _is_module(module) for _, each in _parameters(module)]
            found += [each for one in given if hasattr(one, "live_tensors") for each in one.live_tensors()]
            self._parameters = [each for value in found for each in counted(value)]
            self._buffered = [each for one in given if _is_module(one) for each in one.modules() if each._buffers]
        states = [state for each in self._optimizers.values() for state in _inner(each).state.values()]
        values = (each for state in states for each in state.values() if hasattr(each, "_version"))
        now = [*self._parameters, *(each for value in values for each in counted(value))]
        counts, before = versions(now), self._tensors
        is_same = counts == self._versions and all(map(operator.is_, now, before)) and self._buffered == modules
        self._tensors, self._versions = now, counts
        return not is_same

    def _named_tensors(self) -> Iterator[tuple[str, Any]]:
        for name, given in self._objects.items():
            if _is_optimizer(given):
                inner = _inner(given)
                parameters = (each for group in inner.param_groups for each in group["params"])
                for number, parameter in enumerate(parameters):
                    for key, value in inner.state.get(parameter, {}).items():
                        if hasattr(value, "_version"):
                            yield f"{name}.{number}.{key}", value
            elif _is_module(given):
                yield from ((f"{name}.{key}", value) for key, value in _parameters(given))
            elif hasattr(given, "live_tensors"):
                yield from ((f"{name}.{number}", value) for number, value in enumerate(given.live_tensors()))

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
                    value = complete.buffers.get(id(value), value)
                    # Changes are not counted in a detached DTensor.
                    state[key] = value if hasattr(value, "_local_tensor") else value.detach()
            return state
        state = _state_dict(given)
        groups = zip(state["param_groups"], complete.groups[name], strict=False)  # one may have been added since
        return {**state, "param_groups": [{**group, **settings} for group, settings in groups]}

    # -- pieces -------------------------------------------------------------------------------------------------------

    @property
    def _own_piece(self) -> int:
        return self._pieces[self._session.world_rank] if self._pieces and self._session is not None else 0

    def _find_pieces(self, session: Attempt) -> None:
        """Find out which ranks hold the same."""
        if self._pieces is not None:
            return
        if self.is_copied:
            self._pieces, self._interval = tuple(range(session.world_size)), CopyInterval()
            return
        torch = imported("torch")
        if torch is None or session.world_size == 1 or len(self._snapshots) == len(self._objects):
            self._pieces = ()
            return
        # An attempt that starts from a live state knows them: to ask in the middle of the changes would risk that state.
        known = session.known_pieces
        self._pieces = number_pieces(session.gather(describe_piece(self._named_tensors()))) if known is None else known
        if not are_replicated(self._pieces):
            self._interval = CopyInterval()
        elif self._pieces:
            device = next(iter(self._named_tensors()))[1].device
            self._agreement = Agreement(session.world_rank, session.world_size, device)

    def _copy_to_memory(self, session: Attempt, values: Callable[[], Mapping[str, Any]]) -> None:
        """Copy the state, if it is time to."""
        if self._interval is None or not self._interval.is_due(self.num_steps):
            return
        began = time.monotonic()
        state = {name: _state_dict(given) for name, given in self._objects.items()}
        for part in (*self._copies, values):
            state |= part()
        session.copy_to_memory(self.num_steps, state)
        times = self._interval.measure(self.num_steps, began, time.monotonic())
        self._interval.on_copied(self.num_steps, session.gather(times))


def _is_module(given: Any) -> bool:
    return hasattr(given, "parameters") and hasattr(given, "buffers")


def _is_optimizer(given: Any) -> bool:
    return hasattr(given, "param_groups") and hasattr(given, "state")


def _parameters(module: Any) -> Iterable[tuple[str, Any]]:
    module.state_dict()  # FSDP puts its shards in place
    named: Iterable[tuple[str, Any]] = module.named_parameters()
    return named


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a group of parameters has in addition to them. A rate may be a tensor."""
    given = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if hasattr(value, "clone") else _copied(value) for name, value in given.items()}


def _copied(value: Any) -> Any:
    """Return a deep copy; of plain values several times faster than `copy.deepcopy`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if kind is list else copy.deepcopy(value)


def _inner(given: Any) -> Any:
    """Return the optimizer with the state that this rank holds: torch's ZeroRedundancyOptimizer would gather that of all."""
    is_divided = any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(given).__mro__)
    return given.optim if is_divided else given


def _state_dict(given: Any) -> Any:
    inner = _inner(given)
    if inner is not given:  # it takes over the settings in the next step
        given._sync_param_groups(given.param_groups, inner.param_groups)
    return inner.state_dict()


def _load(given: Any, state: Any, place: str) -> None:
    """Load a state into an object, whose tensors may be distributed."""
    inner = _inner(given)
    if imported("torch") is not None and (_is_module(given) or _is_optimizer(given)):
        from raysgd.checkpoint.placing import place_optimizer_state, place_state

        if _is_module(given):
            place_state(given, state := copy.copy(state))
        elif any(hasattr(each, "_local_tensor") for group in given.param_groups for each in group["params"]):
            state = place_optimizer_state(state, inner, place)
    inner.load_state_dict(state)
    if inner is not given:
        given._sync_param_groups(inner.param_groups, given.param_groups)

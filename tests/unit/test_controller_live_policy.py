"""Which complete step the next attempt starts from: whenever processes die, no two steps mix, and no row is lost or doubled."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace

import pytest

from raysgd.controller.policies.live import LiveStart, choose_step
from raysgd.session.events import NUM_MARKS, HeldStep, LiveReport, Mark, StepId
from raysgd.transport import Endpoint

NUM_SCHEDULES = 2 * int(os.environ.get("RAYSGD_SCHEDULES", 1000))
NUM_STEPS = 9
#: What a rank does in a step. From "exchanged" on, the step has the rows of all ranks. Ranks exchange what belongs to their
#: piece, and then agree that all of them have it; with whole states, the first is with all ranks.
PHASES = ("read", "forward", "exchange", "exchanged", "agreed", "changing", "changed")
SAVED_EVERY = 4


@dataclass
class State:
    """A training state.

    Attributes:
        rows: The positions of the data whose rows made it.
        piece: The piece of the state.
        is_torn: It has some changes of a step and lacks others.
    """

    rows: tuple[int, ...] = ()
    piece: int = 0
    is_torn: bool = False

    @property
    def step(self) -> int:
        return len(self.rows)


@dataclass
class Process:
    """A worker's process, which trains as `raysgd.session.live.state` has it marked."""

    rank: int
    state: State
    drawn: int
    position: int
    attempt: int
    phase: int = 0
    complete: int = 0  # in this attempt
    draws: tuple[int, int] = (3, 0)  # in the forward pass of a step, and after it
    pieces: tuple[int, ...] = ()
    marks: list[Mark] = field(default_factory=list)
    unsettled: bool = False
    kept: tuple[HeldStep, State] | None = None
    is_alive: bool = True

    def mark(self, *, is_in_step: bool) -> None:
        settled = self.complete > 0 and not self.unsettled
        self.marks.append(Mark(self.complete, str(self.drawn).encode(), is_in_step, settled))

    def num_entered(self, exchange: str) -> int:
        """Return the number of exchanges that this rank has entered in this attempt."""
        return self.complete + (self.phase > PHASES.index(exchange))

    def can_move(self, others: list[Process]) -> bool:
        """Whether the exchange that this rank waits in, if it does, is complete."""
        phase = PHASES[self.phase]
        if phase == "exchanged":
            with_me = [each for each in others if each.state.piece == self.state.piece]
            return all(each.num_entered("exchange") >= self.num_entered("exchange") for each in with_me)
        return phase != "agreed" or all(
            each.num_entered("exchanged") >= self.num_entered("exchanged") for each in others
        )

    def move(self) -> None:
        match PHASES[self.phase]:
            case "read":
                self.position += 1
            case "forward":
                self.drawn += self.draws[0]
                self.mark(is_in_step=True)
            case "exchanged":
                self.drawn += self.draws[1]
                self.unsettled |= self.draws[1] > 0
            case "changing":
                self.state = replace(self.state, is_torn=True)
            case "changed":
                self.state = State((*self.state.rows, self.position), self.state.piece)
                self.complete += 1
                positions = {"data": self.position}
                held = HeldStep(
                    StepId(self.attempt, self.complete),
                    positions=positions,
                    piece=self.state.piece,
                    pieces=self.pieces,
                )
                self.kept = held, self.state
                self.phase = -1
                self.mark(is_in_step=False)
        self.phase += 1

    def report(self) -> LiveReport:
        if self.state.is_torn:
            self.kept = None
        held = None if self.kept is None else self.kept[0]
        return LiveReport(
            self.rank, self.attempt, tuple(self.marks[-NUM_MARKS:]), held, Endpoint(str(self.rank), 0, b"")
        )


class Run:
    """A run of some attempts, in which processes die at random moments."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.randint(2, 4)
        by_size = {4: [(), (), (0, 1, 0, 1), (0, 0, 2, 2), (0, 0, 2, 3)]}
        self.pieces = self.random.choice(by_size.get(self.size, [()]))
        self.draws = self.random.choice([(3, 0), (3, 0), (0, 0), (3, 2)])
        self.deaths_left = self.random.randint(1, 3)
        self.saved: dict[int, dict[int, int]] = {
            0: dict.fromkeys(range(self.size), 0)
        }  # what was drawn, by step and rank
        self.group = [self._new(rank, 1) for rank in range(self.size)]
        self.start: LiveStart | None = None
        self.outcomes: list[str] = []

    def _new(self, rank: int, attempt: int) -> Process:
        state = State((), self.pieces[rank] if self.pieces else 0)
        return Process(rank, state, 0, 0, attempt, draws=self.draws, pieces=self.pieces)

    def run(self) -> None:
        attempt = 1
        while not self._train():
            self._end_attempt()
            attempt += 1
            self._begin(attempt)
            assert attempt < 20

    def _train(self) -> bool:
        """Train until the run is over, or a process has died."""
        while any(each.state.step < NUM_STEPS for each in self.group):
            if self.deaths_left and self.random.random() < 0.01:
                for each in self.random.sample(self.group, self.random.choice([1, 1, 1, 2]) if self.size > 2 else 1):
                    each.is_alive = False
                self.deaths_left -= 1
                return False
            each = self.random.choice(self.group)
            if each.state.step < NUM_STEPS and each.can_move(self.group):
                each.move()
                self._save(each)
        return True

    def _save(self, moved: Process) -> None:
        """Save a checkpoint when all ranks have completed its step and none has begun the next one."""
        step = moved.state.step
        is_due = not moved.phase and not step % SAVED_EVERY
        if is_due and all((each.state.step, each.phase) == (step, 0) for each in self.group):
            self.saved[step] = {each.rank: each.drawn for each in self.group}

    def _end_attempt(self) -> None:
        """Have the survivors leave: each still makes some moves, and an exchange that all have entered may or may not end."""
        for each in self.group:
            others = [other for other in self.group if other is not each]
            for _ in range(self.random.randint(0, 4) if each.is_alive else 0):
                if each.state.step < NUM_STEPS and each.can_move(others):
                    each.move()

    def _begin(self, attempt: int) -> None:
        dead = [each for each in self.group if not each.is_alive]
        # With its node, a process may take its newest marks with it.
        lost = {each.rank: self.random.choice([0, 0, 0, 1]) for each in dead}
        of_dead = {each.rank: each.marks[-NUM_MARKS:][: len(each.marks) - lost[each.rank]] for each in dead}
        of_dead = {rank: marks for rank, marks in of_dead.items() if marks}
        reports = {each.rank: each.report() for each in self.group if each.is_alive}
        chosen = choose_step(attempt - 1, reports, of_dead, self.start, old_size=self.size, new_size=self.size)
        by_rank = {each.rank: each for each in self.group}
        self.outcomes.append("live" if isinstance(chosen, LiveStart) else chosen)
        group = [self._new(rank, attempt) for rank in range(self.size)]
        for each in group:
            if isinstance(chosen, LiveStart):
                order = chosen.order_for(each.rank)
                source = by_rank[each.rank if order.endpoint is None else int(order.endpoint.host)]
                assert source.is_alive and source.kept is not None
                held, state = source.kept
                assert (held.id, held.piece) == (order.held.id, order.held.piece), "the source holds something else"
                each.kept = source.kept if source is by_rank[each.rank] else None
                each.state, each.drawn, each.position = state, int(order.small or b""), order.held.positions["data"]
            else:
                step = max(self.saved)
                each.state = State(tuple(range(1, step + 1)), each.state.piece)
                each.drawn, each.position = self.saved[step][each.rank], step
        self.start = chosen if isinstance(chosen, LiveStart) else None
        if self.start is not None and self.deaths_left and self.random.random() < 0.3:
            self._die_in_transfer(group, self.start)
        else:
            for each in group:
                if self.start is not None:
                    each.kept = self.start.order_for(each.rank).held, each.state
        self.group = group
        self.check()

    def _die_in_transfer(self, group: list[Process], start: LiveStart) -> None:
        """Have the source die: some ranks have the whole state by then, and others a part of it."""
        self.deaths_left -= 1
        for each in group:
            if each.rank not in start.holders and self.random.random() < 0.5:
                each.kept = start.order_for(each.rank).held, each.state
        source, _ = self.random.choice(list(start.sources.values()))
        group[source].is_alive = False
        self.group = group
        self.check()
        self._begin(group[0].attempt + 1)
        group[:] = self.group

    def check(self) -> None:
        steps = {each.state.step for each in self.group}
        assert len(steps) == 1, "ranks start from different steps"
        (step,) = steps
        for each in self.group:
            assert not each.state.is_torn
            assert each.state.piece == (self.pieces[each.rank] if self.pieces else 0)
            assert each.state.rows == tuple(range(1, step + 1)), "rows were lost, or came twice"
            assert each.drawn == step * sum(self.draws), "a generator is at another place than in an undisturbed run"


def test_no_schedule_of_deaths_mixes_steps_or_loses_rows() -> None:
    outcomes: list[str] = []
    for seed in range(NUM_SCHEDULES):
        run = Run(seed)
        run.run()
        run.check()
        assert run.group[0].state.step == NUM_STEPS
        outcomes += run.outcomes
    num_live = outcomes.count("live")
    assert num_live > 0.5 * len(outcomes), f"{num_live} of {len(outcomes)} attempts started from a live state"
    assert {text.split()[0] for text in outcomes} == {"live", "no", "the"}, set(outcomes)


SMALL = b"{}"


def report(rank: int, step: int, attempt: int = 1, **more: object) -> LiveReport:
    return LiveReport(rank, attempt, (Mark(step, SMALL),), HeldStep(StepId(attempt, step)), **more)


def test_ranks_that_do_not_share_each_step_start_from_a_checkpoint() -> None:
    """A loop without an exchange in each step: what one rank holds lacks the rows of the others."""
    reports = {0: report(0, 9)}
    chosen = choose_step(1, reports, {1: (Mark(3, SMALL),)}, None, old_size=2, new_size=2)
    assert chosen == "ranks [1] had completed less than step 8 when others completed step 9"
    chosen = choose_step(1, {0: report(0, 3)}, {1: (Mark(9, SMALL),)}, None, old_size=2, new_size=2)
    assert chosen == "a rank had completed step 9, and those that are left hold step 3"


def test_group_of_another_size_needs_no_generators_of_the_dead() -> None:
    reports = {0: report(0, 4), 1: report(2, 4)}
    dead = {1: (Mark(3, SMALL),)}
    chosen = choose_step(1, reports, dead, None, old_size=3, new_size=2)
    assert isinstance(chosen, LiveStart)
    assert (chosen.held.id, chosen.holders, chosen.small, chosen.world_size) == (StepId(1, 4), (0, 1), {}, 3)
    assert choose_step(1, reports, dead, None, old_size=3, new_size=3) == (
        "the random number generators of rank 1 after step 4 are not known"
    )


@pytest.mark.parametrize(("attempt", "is_taken"), [(2, True), (1, False)])
def test_state_of_an_older_attempt_is_taken_only_if_the_last_attempt_started_from_it(
    attempt: int, is_taken: bool
) -> None:
    held = HeldStep(StepId(attempt, 7))
    start = LiveStart(HeldStep(StepId(2, 7)), (0,), 1, {0: SMALL})
    chosen = choose_step(3, {0: LiveReport(0, 3, (), held)}, {}, start, old_size=1, new_size=1)
    assert isinstance(chosen, LiveStart) == is_taken

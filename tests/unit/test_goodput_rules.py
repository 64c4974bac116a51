"""Which causes `raysgd why` names, from the events of a run in which each of them is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.goodput.evidence import Batches, Evidence, Pace, Window
from raysgd.goodput.findings import Finding, find_causes, list_unseen
from raysgd.goodput.ledger import Ledger
from raysgd.goodput.rules import RULES
from raysgd.goodput.rules.batches import traffic
from raysgd.result import Event
from raysgd.session.progress import BatchSizes, Uses
from support.run_events import RunEvents

#: What a sample adds to the uses, by rank: seconds per step of uses, and other values per step.
Rates = dict[str, float]


def find(run: RunEvents) -> list[Finding]:
    return find_causes(Evidence.of(run.events), RULES)


def make_run(size: int, rates: Callable[[int, int], Rates], *, samples: int = 2, steps: int = 100) -> RunEvents:
    """Return a run whose ranks make so many steps between two samples, by rates for each rank and sample."""
    run = RunEvents()
    run.start(size, joining_s=0.0)
    so_far: list[Rates] = [{} for _ in range(size)]
    for rank in range(size):
        run.enter(rank)
    for number in range(samples):
        made = steps if number else steps // 10
        for rank, sums in enumerate(so_far):
            given = rates(rank, number)
            for name, each in given.items():
                sums[name] = sums.get(name, 0.0) + each * made
        run.at += made * sum(seconds for name, seconds in given.items() if name not in MORE)
        for rank, sums in enumerate(so_far):
            uses = {name: seconds for name, seconds in sums.items() if name not in MORE}
            more = {name: value for name, value in sums.items() if name in MORE}
            run.sample(rank, number * steps + steps // 10, more, **uses)
    run.emit("run_end")
    return run


MORE = {"cpu_wait_s", "memory_wait_s", "sent_bytes"}


def stepping(size: int, **rates: Rates) -> list[Finding]:
    """Find the causes in a run whose steps take these seconds; ``rank1={...}`` differs from ``each={...}``."""
    return find(make_run(size, lambda rank, _: {**rates["each"], **rates.get(f"rank{rank}", {})}))


def test_a_healthy_run_has_no_cause() -> None:
    assert stepping(4, each={"training": 0.1, "waiting": 0.002, "data": 0.002, "checkpoint": 0.001}) == []


def test_all_ranks_wait_for_data() -> None:
    found = stepping(2, each={"training": 0.06, "data": 0.04})
    assert [each.cause for each in found] == ["data"]
    assert found[0].share == pytest.approx(0.4, abs=0.01)
    assert found[0].gain == pytest.approx(1 / 0.6, rel=0.02), "reading and computing at the same time"


def test_one_rank_waits_for_data() -> None:
    found = stepping(4, each={"training": 0.06, "data": 0.002, "waiting": 0.038}, rank3={"data": 0.04, "waiting": 0.0})
    assert [each.cause for each in found] == ["data"]
    assert "rank 3 on node3 waits 40% of its steps for batches, the others 2%." in found[0].text


@pytest.mark.parametrize("is_known", [True, False])
def test_what_follows_the_loop_belongs_to_no_step(is_known: bool) -> None:
    """Rank 0 writes the model for 2 s at the end; another rank is done."""
    run = RunEvents()
    run.start(2, joining_s=0.0)
    for rank in (0, 1):
        run.enter(rank)
    run.at += 3
    for rank in (0, 1):
        run.sample(rank, 30, {}, training=3.0)
    run.at += 5
    for rank, after_s in enumerate((2.0, 0.0)):
        more = {"after": {"training": after_s}} if is_known else {}
        run.emit("left", rank=rank, attempt=1, steps=60, uses={"training": 6.0 + after_s}, **more)
    run.emit("run_end")
    assert [each.cause for each in find(run)] == ([] if is_known else ["straggler"])


@pytest.mark.parametrize(("steps", "causes"), [(60, []), (600, ["straggler"])])
def test_a_rank_that_lost_less_than_half_a_second_is_not_slow(steps: int, causes: list[str]) -> None:
    """A burst of another process makes steps of a short run 7 % longer, as it happens on a machine without any load."""
    rates = [{"training": 0.065, "waiting": 0.005}, {"training": 0.07}]
    found = find(make_run(2, lambda rank, _: rates[rank], steps=steps))
    assert [each.cause for each in found] == causes


def test_one_rank_computes_longer() -> None:
    found = stepping(4, each={"training": 0.06, "waiting": 0.04}, rank2={"training": 0.1, "waiting": 0.0})
    assert [(each.cause, each.rank) for each in found] == [("straggler", 2)]
    assert "rank 2 on node2 computes 1.67x as long as the others" in found[0].text
    assert found[0].gain == pytest.approx(1 / 0.6, rel=0.02)


@pytest.mark.parametrize("first", [36, 38])
def test_a_run_of_hardly_more_than_a_sample_is_looked_at_whole(first: int) -> None:
    run = RunEvents()
    run.start(2, joining_s=0.0)
    for rank in (0, 1):
        run.enter(rank)
    for steps in (first, 40):
        run.at = 1000.0 + steps * 0.04
        for rank in (0, 1):
            run.sample(rank, steps, training=steps * (0.02 + rank * 0.02), waiting=steps * (0.02 - rank * 0.02))
    run.emit("run_end")
    assert [each.cause for each in find(run)] == ["straggler"]


def test_a_rank_without_a_processor_does_everything_longer() -> None:
    """The remedy brings all of its waiting for processors, not only that within the computing."""
    found = stepping(
        2,
        each={"training": 0.03, "waiting": 0.13, "callbacks": 0.001, "cpu_wait_s": 0.0},
        rank1={"training": 0.14, "waiting": 0.01, "callbacks": 0.011, "cpu_wait_s": 0.125},
    )
    assert found[0].cause == "straggler" and "had its processors" in found[0].text
    assert found[0].remedy == "give its node to this run alone, or exclude the node."
    assert found[0].gain == pytest.approx(0.161 / (0.161 - 0.125), rel=0.02)


@pytest.mark.parametrize(("nodes", "left_s"), [("ab", 0.034), ("aa", 0.03)])
def test_ranks_on_the_node_of_a_burner_lose_less_to_it_and_gain_too(nodes: str, left_s: float) -> None:
    rates = [
        {"training": 0.034, "waiting": 0.126, "cpu_wait_s": 0.004},
        {"training": 0.16, "waiting": 0.0, "cpu_wait_s": 0.1},
    ]
    run = make_run(2, lambda rank, _: rates[rank])
    for event, node in zip((each for each in run.events if each.kind == "worker_up"), nodes, strict=True):
        event.data["node"] = node
    assert find(run)[0].gain == pytest.approx(0.16 / left_s, rel=0.01)


@pytest.mark.parametrize(
    ("use", "cause"),
    [("compiling", "compiling"), ("callbacks", "callbacks"), ("garbage", "garbage collection")],
)
def test_overheads_are_named(use: str, cause: str) -> None:
    assert [each.cause for each in stepping(2, each={"training": 0.08, use: 0.02})] == [cause]


@pytest.mark.parametrize("use", ["callbacks", "checkpoint"])
def test_overhead_of_one_rank_costs_all_ranks(use: str) -> None:
    run = make_run(4, lambda rank, _: {"training": 0.08, use if rank == 0 else "waiting": 0.02})
    run.events.insert(-1, Event("checkpoint", run.at, {"iteration": 100, "seconds": 0.1}))
    (found,) = find(run)
    assert (found.cause, found.gain) == (f"{use.removesuffix('s')}s", pytest.approx(1.25))
    assert found.share == pytest.approx(0.2, abs=0.01)


def test_evaluation_of_one_rank_is_no_straggler() -> None:
    found = stepping(4, each={"training": 0.06, "waiting": 0.04}, rank0={"evaluation": 0.04, "waiting": 0.0})
    assert [(each.cause, each.rank) for each in found] == [("evaluation", 0)]
    assert found[0].gain == pytest.approx(1 / 0.7)
    assert stepping(4, each={"training": 0.06, "evaluation": 0.04}) == []


def test_a_first_compilation_belongs_to_the_start() -> None:
    run = RunEvents()
    run.start(1, joining_s=1.0)
    run.enter(0)
    run.at += 19
    run.emit("left", rank=0, attempt=1, steps=50, uses={"setup": 1.0, "compiling": 10.0, "training": 8.0})
    run.emit("run_end")
    (found,) = find(run)
    assert found.cause == "start" and found.share == pytest.approx(12 / 20)


def test_short_run_that_starts_as_fast_as_any_has_no_cause() -> None:
    run = RunEvents()
    run.start(1, joining_s=2.0)
    run.enter(0)
    run.at += 4
    run.emit("left", rank=0, attempt=1, steps=50, uses={"setup": 2.0, "training": 2.0})
    run.emit("run_end")
    assert find(run) == []


def test_waiting_for_the_script_is_no_cause() -> None:
    assert stepping(2, each={"training": 0.02, "script": 0.08}) == []


def test_gain_without_an_overhead_is_that_of_a_step() -> None:
    (found,) = stepping(2, each={"training": 0.02, "script": 0.06, "callbacks": 0.02})
    assert (found.cause, found.share) == ("callbacks", pytest.approx(0.2, abs=0.01))
    assert found.gain == pytest.approx(2)


# -- exchanging --------------------------------------------------------------------------------------------------------


def test_exchanging_that_takes_long_is_no_straggler() -> None:
    (found,) = stepping(4, each={"training": 0.02, "waiting": 0.03, "sent_bytes": 2e6})
    assert (found.cause, found.gain) == ("slow link", pytest.approx(0.05 / 0.035)), "3 MB in 30 ms from each of 4 nodes"


@given(st.integers(2, 8), st.floats(1e6, 1e9), st.floats(1e6, 6e7))
def test_a_slow_link_between_nodes_is_named_whatever_is_sent_on_it(size: int, sent: float, rate: float) -> None:
    exchange_s = traffic(sent, size) / rate
    found = stepping(size, each={"training": exchange_s, "waiting": exchange_s, "sent_bytes": sent})
    is_short = exchange_s < 2e-3 * 2 * (size - 1) * (1 + sent / 25e6)  # as many messages take that too
    assert [each.cause for each in found] == (["small batches"] if is_short else ["slow link"])


def test_a_fast_exchange_of_much_is_no_slow_link() -> None:
    (found,) = stepping(2, each={"training": 0.02, "waiting": 0.03, "sent_bytes": 400e6})
    assert (found.cause, found.gain) == ("collectives", pytest.approx(0.05 / 0.035))


def test_ranks_that_take_turns_in_being_late_do_not_exchange_long() -> None:
    turns = make_run(
        2,
        lambda rank, number: {"training": 0.06, "waiting": 0.04} if (rank + number) % 2 else {"training": 0.1},
        samples=10,
    )
    assert [each.cause for each in find(turns)] == []


def test_a_step_of_small_messages_is_for_larger_batches() -> None:
    (found,) = stepping(2, each={"training": 0.001, "waiting": 0.001, "sent_bytes": 4e3})
    assert (found.cause, found.gain) == ("small batches", pytest.approx(1 / 0.75))
    assert "50% of a step does not depend on its batch: 1.0 ms of messages between ranks." in found.text


# -- batches -----------------------------------------------------------------------------------------------------------


def read_batches(sizes: list[tuple[int, int]], took_s: Callable[[int], float]) -> list[float]:
    """Return what a worker measures of batches of so many rows and so long rows, each of which takes its time."""
    now = 0.0
    uses = Uses(lambda: now)
    counted = BatchSizes(uses, uses.base)
    for rows, length in [*sizes, (1, 1)]:
        counted.add("train", {"x": _Array((rows, length)), "y": _Array((rows,))})
        now += took_s(rows * (length + 1))
        uses.settle()
    return counted.sums["train"]


class _Array:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


LENGTHS = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512)), min_size=30, max_size=60)


@given(LENGTHS, st.floats(0, 0.1), st.floats(0, 1e-4), st.randoms())
def test_fixed_and_variable_seconds_of_computing_are_found(
    sizes: list[tuple[int, int]], fixed_s: float, value_s: float, chance: random.Random
) -> None:
    exact = Batches.of(read_batches(sizes, lambda values: fixed_s + value_s * values))
    assert exact is not None
    assert exact.rows == pytest.approx(sum(rows for rows, _ in sizes) / len(sizes))
    if exact.spread > 0.1 * exact.values:
        assert exact.fixed_s == pytest.approx(fixed_s, rel=1e-2, abs=1e-4)
        assert exact.value_s * exact.values == pytest.approx(value_s * exact.values, rel=1e-2, abs=1e-4)
    noisy = Batches.of(read_batches(sizes, lambda values: (fixed_s + value_s * values) * chance.uniform(0.7, 1.3)))
    assert noisy is not None
    # What is said to be certain is never above what is there, but for chance.
    assert noisy.fixed_s <= fixed_s + 0.5 * (fixed_s + value_s * noisy.values) * 1.3


def with_batches(rows: tuple[int, int], *, is_straggler: bool = False) -> list[Finding]:
    """Find the causes where two ranks have batches of these rows, which take 1 ms each; or rank 1 is slow, whatever it reads."""
    took_s = [0.001 * rows[0], 0.001 * rows[1] + is_straggler * 0.1]
    run = RunEvents()
    run.start(2, joining_s=0.0)
    for rank in (0, 1):
        run.enter(rank)
    for number in (10, 110):
        run.at = 1000.0 + number * max(took_s)
        for rank, seconds in enumerate(took_s):
            sums = read_batches([(rows[rank], 8)] * number, lambda _, each=seconds: each)  # type: ignore[misc]
            uses = {"training": number * seconds, "waiting": number * (max(took_s) - seconds)}
            run.sample(rank, number, {"batches": {"train": sums}}, **uses)
    run.emit("run_end")
    return find(run)


def test_a_rank_with_more_rows_is_no_straggler() -> None:
    (found,) = with_batches((20, 40))
    assert (found.cause, found.rank) == ("uneven batches", 1)
    assert "rank 1 on node1 gets 2.00x as many rows in a batch as the others, and computes 2.00x as long." in found.text
    assert found.gain == pytest.approx(40 / 30), "each rank gets 30 rows"


def test_a_slow_rank_with_few_more_rows_is_a_straggler() -> None:
    (found,) = with_batches((20, 21), is_straggler=True)
    assert found.cause == "straggler"


def reads_lengths(chance: random.Random, steps: int, lengths: Sequence[int]) -> list[Finding]:
    """Find the causes where two ranks compute 10 us for each value, in batches whose lengths are drawn for each step."""
    sizes = [[(8, chance.choice(lengths)) for _ in range(steps)] for _ in range(2)]
    run = RunEvents()
    run.start(2, joining_s=0.0)
    for rank in (0, 1):
        run.enter(rank)
    for number in (10, steps):
        values = [[rows * (length + 1) for rows, length in of_rank[:number]] for of_rank in sizes]
        longest_s = sum(1e-5 * max(pair) for pair in zip(*values, strict=True))
        run.at = 1000.0 + longest_s
        for rank in (0, 1):
            own_s = 1e-5 * sum(values[rank])
            sums = read_batches(sizes[rank][:number], lambda size: 1e-5 * size)
            run.sample(rank, number, {"batches": {"train": sums}}, training=own_s, waiting=longest_s - own_s)
    run.emit("run_end")
    return find(run)


def test_batches_of_other_lengths_in_each_step_are_waited_for() -> None:
    (found,) = reads_lengths(random.Random(5), 400, range(10, 500))
    assert found.cause == "uneven batches" and found.rank is None
    assert "from step to step" in found.text
    assert found.gain == pytest.approx(1.33, abs=0.06), (
        "the larger of two even numbers lies at two thirds, their mean at half"
    )


def test_no_rank_is_blamed_for_lengths_that_chance_gave_it() -> None:
    """In 60 steps, one of two ranks gets 1.4 times as many values by chance now and then."""
    chance = random.Random(5)
    found = [reads_lengths(chance, 60, [40, 120, 280, 360]) for _ in range(100)]
    assert all([each.cause for each in causes] == ["uneven batches"] for causes in found)
    assert sum(causes[0].rank is not None for causes in found) <= 1


def fixed_steps(cpu_wait_s: float = 0.0) -> RunEvents:
    """Return a run whose steps take 10 ms, whatever their batches; of these each waits so long for a processor."""
    chance = random.Random(3)
    sizes = [(8, chance.randrange(10, 500)) for _ in range(200)]
    run = RunEvents()
    run.start(1, joining_s=0.0)
    run.enter(0)
    for number in (10, 200):
        sums = read_batches(sizes[:number], lambda values: 0.01 + 1e-6 * values)
        run.at = 1000.0 + sums[3]
        run.sample(0, number, {"batches": {"train": sums}, "cpu_wait_s": cpu_wait_s * number}, training=sums[3])
    run.emit("run_end")
    return run


def test_a_step_that_hardly_depends_on_its_batch_is_for_larger_ones() -> None:
    (found,) = find(fixed_steps())
    assert found.cause == "small batches"
    assert found.gain == pytest.approx(12 / 7, rel=0.05), "two batches of 2 ms each, and 10 ms once"


def test_waiting_for_a_processor_is_not_for_larger_batches() -> None:
    assert [each.cause for each in find(fixed_steps(cpu_wait_s=0.009))] == ["processors"]


def test_a_gpu_that_waits_for_python_is_for_larger_batches() -> None:
    run = make_run(2, lambda rank, _: {"training": 0.01}, samples=3)
    for event in run.events:
        if event.kind == "sample":
            event.data["gpu_percent"] = 40
    (found,) = find(run)
    assert found.cause == "small batches" and found.gain == pytest.approx(1 / 0.7)
    assert list_unseen(Evidence.of(run.events)) == ["time that GPUs spend in collectives is not visible"]


# -- since when --------------------------------------------------------------------------------------------------------


def slow_from(first: int, samples: int = 12) -> Finding:
    """Return the finding of a run in which rank 1 is slow from this sample on."""
    run = make_run(
        2,
        lambda rank, number: {"training": 0.1} if number < first or rank else {"training": 0.05, "waiting": 0.05},
        samples=samples,
    )
    (found,) = find(run)
    return found


def test_a_cause_that_began_within_the_run_is_dated() -> None:
    found = slow_from(6)
    assert found.since == pytest.approx(1000.0 + 0.1 * (10 + 5 * 100), abs=11)
    assert time.strftime(", since %H:%M:%S.", time.localtime(found.since)) in found.text


def test_an_overhead_that_began_within_the_run_is_dated() -> None:
    run = make_run(1, lambda _, number: {"training": 0.1, "callbacks": 0.05 * (number > 6)}, samples=12)
    (found,) = find(run)
    assert found.cause == "callbacks"
    assert found.since == pytest.approx(1000.0 + 0.1 * (10 + 6 * 100), abs=16)


def test_a_cause_from_the_beginning_has_no_date() -> None:
    assert slow_from(0).since is None


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_date_divides_the_time_without_a_cause_from_the_time_with_it(shown: list[bool]) -> None:
    pace = Pace(100, 0.1, {})
    windows = [Window(float(number), {number: pace}) for number in range(len(shown))]

    def rule(evidence: Evidence) -> Finding | None:
        is_whole = bool(evidence.windows)
        return Finding("data", 0.5, "seen.", "") if is_whole or shown[next(iter(evidence.paces))] else None

    evidence = Evidence(Ledger(), windows=windows)
    found = find_causes(evidence, [rule])
    if (since := found[0].since) is not None:
        first = int(since)
        assert shown[first]
        assert not shown[first - 1]
        assert sum(shown[:first]) + shown[first:].count(False) <= len(shown) / 5


# -- machines ----------------------------------------------------------------------------------------------------------


def crowded(*, is_burnt: bool = True, write_s: float = 0.0, **readings: list[float]) -> list[Finding]:
    """Find the causes in a run of two ranks with these seconds so far at two samples, 10 s apart; a list of each rank's.

    Another process may burn processors, and a checkpoint be written for some seconds.
    """
    run = RunEvents()
    run.start(2, joining_s=0.0)
    for rank in (0, 1):
        run.enter(rank)
    for number, steps in enumerate((10, 110)):
        run.at = 1000.0 + 0.1 * steps
        for rank in (0, 1):
            own: dict[str, Any] = {name: number * values[rank] for name, values in readings.items()}
            busy = {"busy": {"name": "burner", "pid": 4711, "processors": 1.5}} if is_burnt else {}
            run.sample(rank, steps, {**busy, **own}, training=0.1 * steps)
    if write_s:
        run.emit("checkpoint", number=0, seconds=write_s)
    run.emit("run_end")
    return find(run)


def test_processors_that_all_ranks_wait_for() -> None:
    (found,) = crowded(cpu_wait_s=[3.0, 2.0])
    assert found.cause == "processors" and found.gain == pytest.approx(1.25)
    assert "20% of the time; most used by burner (pid 4711, 1.5 processors)" in found.text


@pytest.mark.parametrize(
    ("write_s", "is_burnt", "cause"),
    [(9.0, False, "checkpoints"), (9.0, True, "processors"), (3.0, False, "processors")],
)
def test_processors_that_write_checkpoints(write_s: float, is_burnt: bool, cause: str) -> None:
    found = crowded(cpu_wait_s=[6.0, 2.0], write_s=write_s, is_burnt=is_burnt)
    assert found[0].cause == cause
    if cause == "checkpoints":
        assert len(found) == 1 and found[0].gain == pytest.approx(1.25)
        assert "checkpoints were being written for" in found[0].text and "no processor for 20% of it" in found[0].text


def test_memory_that_a_node_waits_for() -> None:
    (found,) = crowded(memory_wait_s=[0.0, 4.0])
    assert found.cause == "memory" and "the node of rank 1, node1, waited 40%" in found.text


# -- failures and checkpoints ------------------------------------------------------------------------------------------


def failing(*, every: int, stall_s: float = 0.01, failures: int = 3) -> list[Finding]:
    """Find the causes in a run of 0.1 s a step, with a checkpoint every n-th step, that dies at each thousandth step."""
    run = RunEvents()
    step = 0
    for attempt in range(failures + 1):
        run.start(1)
        run.enter(0)
        began, first = run.at, step
        end = 1000 * (attempt + 1)
        while step < end:
            step += min(every, end - step)
            run.at = began + 0.1 * (step - first)
            saves = (step - first) // every
            run.sample(0, step - first, training=run.at - began - saves * stall_s, checkpoint=saves * stall_s)
            if step % every == 0:
                run.kept_s = 0.1 * step
                run.emit("checkpoint", iteration=step, seconds=0.05)
        step = step // every * every
        run.emit("failure" if attempt < failures else "run_end")
    return find(run)


def test_checkpoints_that_are_too_seldom_name_the_interval_that_costs_least() -> None:
    found = failing(every=450)[0]
    assert found.cause == "restarts" and "of it in repeated steps" in found.text
    # 155 s between failures and a stall of 0.01 s: sqrt(2 * 0.01 * 155 s) is 1.8 s.
    assert (
        "save_checkpoint every 18 steps instead of 450 steps: 3 s of repeated steps, for 0.6% of stall" in found.remedy
    )
    assert found.gain == pytest.approx(1.13, abs=0.01), "60 of 464 s were repeated"


def test_a_save_takes_as_long_as_on_the_rank_that_saves() -> None:
    run = make_run(4, lambda rank, _: {"training": 0.09, "checkpoint" if rank == 0 else "waiting": 0.01})
    for _ in range(11):
        run.events.insert(-1, Event("checkpoint", run.at, {"iteration": 100, "seconds": 0.1}))
    assert Evidence.of(run.events).stall_s == pytest.approx(0.1)


@pytest.mark.parametrize(("write_s", "left_s"), [(0.1, 0.034), (8.0, 0.03)])
def test_saving_less_often_brings_the_processor_of_the_thread_that_writes(write_s: float, left_s: float) -> None:
    rates = [{"training": 0.034, "checkpoint": 0.066, "cpu_wait_s": 0.004}, {"training": 0.03, "waiting": 0.07}]
    run = make_run(2, lambda rank, _: rates[rank])
    run.events.insert(-1, Event("checkpoint", run.at, {"iteration": 100, "seconds": write_s}))
    (found,) = find(run)
    assert (found.cause, found.gain) == ("checkpoints", pytest.approx(0.1 / left_s, rel=0.01))


def test_checkpoints_often_enough_are_not_blamed() -> None:
    assert all("save_checkpoint every" not in each.remedy for each in failing(every=10))


def test_a_run_without_checkpoints_gets_the_advice_to_save() -> None:
    found = failing(every=100_000, failures=1)
    assert "none was saved" in found[0].remedy


# -- what cannot be seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "waiting_s", "unseen"),
    [
        ("horovod", 0.0, ["time in collectives is not visible with Horovod"]),
        ("jax", 0.001, ["time in collectives is not visible with JAX"]),
        ("torch", 0.01, []),
        (
            "torch",
            0.0,
            ["no waiting for other ranks was seen; that in a DistributedDataParallel of your own is not visible"],
        ),
        ("none", 0.0, []),
    ],
)
def test_what_cannot_be_seen_is_named(backend: str, waiting_s: float, unseen: list[str]) -> None:
    run = make_run(2, lambda rank, _: {"training": 0.1, "waiting": waiting_s})
    run.events[0].data["backend"] = backend
    assert list_unseen(Evidence.of(run.events)) == unseen

"""The steps of ranks in detail, and `raysgd trace`: what is kept, on which clock, and that spans add up to the ledger."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cli.main import main
from raysgd.goodput.spans import FOLDER, MANY, RankSteps, Step, file_name, parse_name
from raysgd.result import Event
from raysgd.session.progress import MAX_CHANGES, USES, NodeClock, Progress, SpanRecorder, is_kept
from raysgd.viewer.trace import choose_steps, count_before, make_trace
from support.run_folders import RunFolder

BLOCKS = ("data", "checkpoint", "waiting", "garbage", "callbacks")


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def play(progress: Progress, clock: Clock, calls: Sequence[tuple[str, float]]) -> None:
    """Make the calls of a loop, each of which takes its time; blocks are entered and left in turn."""
    open_blocks: list[Any] = []
    for call, seconds in calls:
        clock.now += seconds
        if call == "leave" and open_blocks:
            open_blocks.pop().__exit__()
        elif call == "compiled":
            progress.compiling.add(seconds / 2)
        elif call in BLOCKS:
            open_blocks.append(getattr(progress, call))
            open_blocks[-1].__enter__()
        elif call != "leave":
            progress.mark(call)
    while open_blocks:
        open_blocks.pop().__exit__()


CALLS = st.tuples(
    st.sampled_from(["report", "batch", "leave", "leave", "compiled", *BLOCKS]),
    st.floats(0.001, 1).map(lambda s: round(s, 3)),
)


@given(st.lists(CALLS, max_size=80))
def test_kept_steps_add_up_to_the_uses_and_leave_no_gap(calls: list[tuple[str, float]]) -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now += 7
    progress.enter()
    play(progress, clock, calls)
    clock.now += 0.5
    steps = progress.steps(clock.now)
    assert [step.number for step in steps] == list(range(len(steps)))
    assert steps[0].start == round(57e6) and steps[-1].end == round(clock.now * 1e6)
    assert all(step.end == following.start for step, following in pairwise(steps))
    sums: Counter[str] = Counter()
    for step in steps:
        assert step.start == next(step.spans(), ("", step.start, 0))[1]
        for use, start, end in step.spans():
            sums[use] += end - start
    expected = progress.uses()
    assert sum(sums.values()) == steps[-1].end - steps[0].start
    for use in {*sums, *expected}:
        assert sums[use] / 1e6 == pytest.approx(expected.get(use, 0.0), abs=0.002)


def steps_of(recorder: SpanRecorder, now: float) -> list[Step]:
    return [Step.of(numbers, now, USES, MAX_CHANGES) for numbers in recorder.copy()]


def test_all_but_newest_steps_are_thinned_by_their_numbers() -> None:
    recorder = SpanRecorder(0.0, 0)
    most = 0
    for number in range(1, 40_000):
        recorder.begin_step(number, number, number / 100, 1)
        recorder.change(number / 100 + 0.002, 2)
        if number % 1000 == 0 or number < 300:
            steps = steps_of(recorder, number / 100 + 0.01)
            most = max(most, len(steps))
            numbers = {step.number for step in steps}
            assert numbers >= set(range(min(number, 255))) | set(range(max(0, number - 480), number + 1))
            assert all(step.end - step.start == 10_000 for step in steps), "a step ends with the next, kept or not"
    assert most < 16 * (16 + 64 + 33)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_what_is_dropped_is_not_needed_later(window: int, newest: int) -> None:
    if window <= newest and not is_kept(window, newest):
        assert not is_kept(window, newest + 1)


def test_a_step_with_many_changes_is_bounded() -> None:
    recorder = SpanRecorder(0.0, 1)
    for number in range(1000):
        recorder.change(number / 1000, 1 + number % 2)
    recorder.begin_step(1, 1, 1.0, 1)
    first, second = steps_of(recorder, 2.0)
    assert len(first.uses) == MAX_CHANGES and first.uses[-1][1] == MANY
    assert (first.end, second.start, second.end) == (10**6, 10**6, 2 * 10**6)


@st.composite
def rank_steps(draw: st.DrawFn) -> RankSteps:
    at, steps = draw(st.integers(0, 2**52)), []
    for number in sorted(draw(st.sets(st.integers(0, 10**6), max_size=5))):
        uses = []
        for use in draw(st.lists(st.sampled_from([*USES, MANY]), min_size=1, max_size=5)):
            uses.append((at, use))
            at += draw(st.integers(0, 10**9))
        steps.append(Step(number, draw(st.integers(0, 10**6)), tuple(uses), at))
    error_s = draw(st.none() | st.floats(0, 1))
    return RankSteps(
        2, 3, "node é (10.0.0.1)", 7, draw(st.floats(-1e10, 1e10)), error_s, draw(st.booleans()), tuple(steps)
    )


@given(rank_steps())
def test_a_file_holds_the_steps(steps: RankSteps) -> None:
    assert RankSteps.decode(steps.encode()) == steps


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_names_of_files_say_attempt_and_rank(attempt: int, rank: int) -> None:
    assert parse_name(file_name(attempt, rank)) == (attempt, rank)


@pytest.mark.parametrize(
    "name", ["attempt_1.json.gz", "attempt_x_rank_1.json.gz", "notes.txt", ".attempt_1_rank_1.json.gz"]
)
def test_other_files_are_not_read(name: str) -> None:
    assert parse_name(name) is None


# -- the clock ---------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1))
def test_clock_of_a_node_is_known_within_its_error(ahead_s: float, delays: list[tuple[float, float]]) -> None:
    now, best = 1000.0, None
    for there_s, back_s in delays:
        asked_s, now = now, now + there_s + back_s
        best = NodeClock.best(best, asked_s, now, asked_s + there_s - ahead_s)
        now += 2.5
        assert abs(best.ahead_s - ahead_s) <= best.error_s + 1e-6
    assert best is not None and best.error_s <= min(sum(each) for each in delays) / 2 + 2e-5 * (now - 1000)


# -- the trace ---------------------------------------------------------------------------------------------------------


def make_rank(
    rank: int, *, node: str = "n0", clock_s: float = 950.0, error_s: float | None = 0.001, **more: Any
) -> RankSteps:
    """Return the steps of a rank: set-up from 1002 to 1003 by the controller's clock, and then steps of 1 s."""
    number = int(more.pop("steps", 5))
    at = round((1002.0 - clock_s) * 1e6)
    steps = [Step(0, 0, ((at, "setup"),), at + 10**6)]
    for step in range(1, number + 1):
        start = at + step * 10**6
        uses = (
            (start, "training"),
            (start + 300_000, "data"),
            (start + 400_000, "training"),
            (start + 900_000, "waiting"),
        )
        steps.append(Step(step, step // int(more.get("every", 1)), uses, start + 10**6))
    return RankSteps(1, rank, node, more.get("before", 0), clock_s, error_s, more.get("is_over", True), tuple(steps))


def make_events(steps: int = 5, **failure: Any) -> list[Event]:
    end = 1003.0 + steps
    left = {"setup": 1.0, "training": 0.8 * steps, "data": 0.1 * steps, "waiting": 0.1 * steps}
    made: list[tuple[str, float, dict[str, Any]]] = [
        ("run_start", 1000.0, {}),
        ("attempt_start", 1001.0, {"attempt": 1, "world_size": 2}),
    ]
    made += [("entered", 1002.0, {"rank": rank, "attempt": 1, "timestamp": 1002.0}) for rank in range(2)]
    made += [("checkpoint", 1005.5, {"number": 1, "iteration": 2, "seconds": 0.7, "metrics": None})]
    made += [("warning", 1006.5, {"message": "it is slow", "rank": 1})]
    made += [("left", end, {"rank": rank, "attempt": 1, "uses": left}) for rank in range(2)]
    made += [("failure", end + 0.5, failure)] if failure else [("run_end", end + 0.5, {"kind": "done"})]
    return [Event(kind, at, data) for kind, at, data in made]


def check_format(trace: dict[str, Any]) -> None:
    """Assert that spans of each track nest, that they are sorted, and that everything has its process."""
    made = trace["traceEvents"]
    assert [each["ts"] for each in made] == sorted(each["ts"] for each in made)
    named = {each["pid"] for each in made if each["ph"] == "M" and each["name"] == "process_name"}
    assert {each["pid"] for each in made} == named
    open_spans: dict[tuple[int, int], list[int]] = {}
    for each in made:
        assert isinstance(each["ts"], int) and each["name"]
        if each["ph"] == "X":
            assert each["dur"] >= 0
            ends = open_spans.setdefault((each["pid"], each["tid"]), [])
            while ends and ends[-1] <= each["ts"]:
                ends.pop()
            assert not ends or each["ts"] + each["dur"] <= ends[-1], "it begins in another span and ends after it"
            ends.append(each["ts"] + each["dur"])
    begun = Counter((each["cat"], each["id"]) for each in made if each["ph"] == "b")
    assert begun == Counter((each["cat"], each["id"]) for each in made if each["ph"] == "e")


def spans_of(trace: dict[str, Any], pid: int) -> Iterator[tuple[str, float, float]]:
    for each in trace["traceEvents"]:
        if each["ph"] == "X" and each["pid"] == pid:
            yield each["name"], each["ts"] / 1e6, each["dur"] / 1e6


def test_all_ranks_are_on_the_clock_of_the_controller() -> None:
    trace = make_trace(make_events(), [make_rank(0), make_rank(1, node="n1", clock_s=-70.25, error_s=0.002)], {2, 3})
    check_format(trace)
    for pid in (1, 2):
        assert list(spans_of(trace, pid))[:5] == [
            ("step 2", 4.0, 1.0),
            ("training", 4.0, 0.3),
            ("waiting for data", 4.3, 0.1),
            ("training", 4.4, 0.5),
            ("waiting for other ranks", 4.9, 0.1),
        ]
    assert trace["otherData"]["clock_error_ms"] == {"n0": 1.0, "n1": 2.0}


def test_ranks_of_one_node_have_one_clock() -> None:
    own, asked = make_rank(0, clock_s=950.0, error_s=None), make_rank(1, clock_s=950.0)
    better = RankSteps(**{**vars(make_rank(2)), "clock_s": 950.004, "error_s": 0.0001})
    trace = make_trace(make_events(), [own, asked, better], {2})
    starts = [start for pid in (1, 2, 3) for name, start, _ in spans_of(trace, pid) if name == "step 2"]
    assert starts == [4.004] * 3


def test_a_trace_of_a_whole_run_has_all_its_time_and_events() -> None:
    trace = make_trace(make_events(), [make_rank(0), make_rank(1)], set(range(6)))
    check_format(trace)
    names = [(name, start, length) for name, start, length in spans_of(trace, 1) if name in ("start", "set-up", "end")]
    assert names == [("start", 0.0, 2.0), ("set-up", 2.0, 1.0), ("set-up", 2.0, 1.0), ("end", 8.0, 0.5)]
    texts = {each["name"]: each["args"]["text"] for each in trace["traceEvents"] if each["ph"] == "i"}
    assert texts == {"run start": "", "warning": "rank 1: it is slow", "run end": "done"}
    (saved,) = [each["ts"] for each in trace["traceEvents"] if each["ph"] == "b"]
    assert saved == 4_800_000


def test_last_steps_before_a_failure_come_with_it() -> None:
    events = [
        *make_events(ranks=[1], error="rank 1 died", action="retry"),
        Event("entered", 1009.5, {"rank": 0, "attempt": 2}),
    ]
    trace = make_trace(events, [make_rank(0), make_rank(1, is_over=False)], {4, 5})
    check_format(trace)
    assert [each["name"] for each in trace["traceEvents"] if each["ph"] == "i"] == ["warning", "failure"]
    assert list(spans_of(trace, 2))[-1] == ("recovering", 8.5, 1.0)


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(0, 600), st.integers(0, 30))
def test_steps_that_are_not_kept_are_replaced_by_the_nearest(kept: set[int], first: int, more: int) -> None:
    chosen = choose_steps(sorted(kept), first, first + more)
    inside = [step for step in sorted(kept) if first <= step <= first + more]
    assert chosen == inside or (not inside and 1 <= len(chosen) <= more + 1)
    assert set(chosen) <= kept and chosen == sorted(chosen)


@pytest.mark.parametrize(("every", "before", "steps"), [(1, 40, 40), (2, 40, 80), (1, 0, 0)])
def test_steps_are_counted_from_the_beginning_of_the_run(every: int, before: int, steps: int) -> None:
    rank = make_rank(0, every=every, before=before)
    reports = tuple(Step(step.number, max(0, (step.number - 1) // every), step.uses, step.end) for step in rank.steps)
    assert count_before([RankSteps(**{**vars(rank), "steps": reports})]) == steps


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run of two ranks, whose second attempt began from the 3rd of 5 steps."""
    folder = RunFolder(tmp_path / "exp" / "run_001")
    folder.describe()
    for event in make_events():
        folder.line("events.jsonl", attempt=1, kind=event.kind, timestamp=event.timestamp, data=event.data)
    (folder.path / FOLDER).mkdir()
    for rank in range(2):
        first = make_rank(rank)
        place: dict[str, Any] = {"node": f"n{rank}", "error_s": None if rank else 0.001}
        second = RankSteps(**{**vars(make_rank(rank, before=3, steps=4, **place)), "attempt": 2})
        for each in (first, second):
            (folder.path / FOLDER / file_name(each.attempt, rank)).write_bytes(each.encode())
    return folder.path


@pytest.mark.parametrize(
    ("words", "attempt", "steps"),
    [
        ((), 2, [3, 4, 5, 6, 7]),
        (("--steps", "1-2"), 1, [1, 2]),
        (("--steps", "4-5"), 2, [4, 5]),
        (("--steps", "4-5", "--attempt", "1"), 1, [4, 5]),
        (("--steps", "100-102"), 2, [5, 6, 7]),
        (("--steps", "6"), 2, [6]),
    ],
)
def test_command_chooses_the_attempt_and_the_steps(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    attempt: int,
    steps: list[int],
) -> None:
    path = tmp_path / "out.json"
    assert main(["trace", str(run_dir), "-o", str(path), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attempt"], found["steps"], found["ranks"]) == (attempt, steps, [0, 1])
    check_format(json.loads(path.read_text()))


def test_command_says_which_steps_are_kept(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(run_dir), "--steps", "90-91"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Of steps 90-91, none are kept. Kept in attempt 2: 3-7."
    assert lines[1] == "steps 6-7 of attempt 2 on 2 ranks; clocks: n0 ±1.0 ms, n1 by its own clock"
    with gzip.open(tmp_path / "exp-run_001-steps-6-7.json.gz") as file:
        check_format(json.load(file))


@pytest.mark.parametrize("steps", ["5-3", "a", "-5", "1-2-3", ""])
def test_command_refuses_what_is_not_a_range(run_dir: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir), "--steps", steps]) == 2
    assert "give 100-110, or 100 for one step" in capsys.readouterr().err


def test_command_says_that_a_run_has_no_steps(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run_dir / FOLDER).iterdir():
        path.unlink()
    assert main(["trace", str(run_dir)]) == 2
    assert "has no steps: its workers write them after each minute" in capsys.readouterr().err

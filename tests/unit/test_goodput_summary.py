"""What the page, the command and programs are given of a run's time: it adds up, whatever is left out, and stays small."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.goodput.evidence import Evidence
from raysgd.goodput.kept_events import KeptEvents
from raysgd.goodput.ledger import Ledger, Slice
from raysgd.goodput.summary import NUM_PERIODS, divide, summarize
from raysgd.result import Event

TIMES = st.floats(0, 1000)
LENGTH_S = 1000.0


@st.composite
def slices(draw: st.DrawFn) -> list[Slice]:
    found = []
    for rank in range(draw(st.integers(0, 5))):
        start, end = sorted((draw(TIMES), draw(TIMES)))
        part = draw(st.floats(0, 1))
        found.append(Slice(rank, start, end, {"training": (end - start) * part, "data": (end - start) * (1 - part)}))
    return found


@given(slices())
def test_periods_add_up_to_the_whole_and_none_has_more_than_its_workers_time(given: list[Slice]) -> None:
    periods = divide(given, 0.0, LENGTH_S)
    assert len(periods) == NUM_PERIODS
    for use in ("training", "data"):
        whole = sum(each.uses[use] for each in given)
        assert sum(period.get(use, 0.0) for period in periods) == pytest.approx(whole, abs=1e-6)
    width = LENGTH_S / NUM_PERIODS
    for place, period in enumerate(periods):
        overlaps = (min(each.end, (place + 1) * width) - max(each.start, place * width) for each in given)
        assert sum(period.values()) == pytest.approx(sum(max(0.0, overlap) for overlap in overlaps), abs=1e-6)


def test_a_run_without_length_has_no_periods() -> None:
    assert divide([], 0.0, 0.0) == []
    assert summarize(Evidence.of([]))["goodput"] is None


def sampled(num_ranks: int, num_samples: int) -> list[Event]:
    """Return the events of a run whose ranks wait for data more and more."""
    events = [Event("run_start", 1.0), Event("attempt_start", 1.0, {"attempt": 1, "world_size": num_ranks})]
    events += [Event("entered", 2.0, {"rank": rank, "attempt": 1, "timestamp": 2.0}) for rank in range(num_ranks)]
    for number in range(1, num_samples + 1):
        spent = number * number / num_samples
        uses = {"data": spent, "training": 2 * number - spent}
        events += [
            Event("sample", 2 + 2 * number, {"rank": rank, "steps": number, "uses": uses}) for rank in range(num_ranks)
        ]
    return [*events, Event("run_end", 2.0 + 2 * num_samples)]


@pytest.mark.parametrize(("num_ranks", "num_samples"), [(1, 3), (2, 2000)])
def test_samples_that_are_left_out_change_no_sum(num_ranks: int, num_samples: int) -> None:
    kept, all_events = KeptEvents(), sampled(num_ranks, num_samples)
    for event in all_events:
        kept.add(event)
    few = list(kept)
    assert len(few) <= 600 * num_ranks
    assert [each.timestamp for each in few] == sorted(each.timestamp for each in few)
    assert [each for each in few if each.kind != "sample"] == [each for each in all_events if each.kind != "sample"]
    assert few[-2] == all_events[-2], "the newest sample"
    assert Ledger.of(few).totals() == pytest.approx(Ledger.of(all_events).totals())
    halves = [Counter[str](), Counter[str]()]
    for place, period in enumerate(summarize(Evidence.of(few))["periods"]):
        halves[place >= NUM_PERIODS / 2].update(period)
    assert halves[1]["data"] > 2.5 * halves[0]["data"] or num_samples == 3, "and little when it was"


def test_a_thousand_ranks_and_a_day_are_a_small_summary_of_few_events() -> None:
    kept = KeptEvents()
    for event in sampled(1000, 100):  # a day has 43,200, of which as many are kept
        kept.add(event)
    assert sum(event.kind == "sample" for event in kept) <= 66_000
    assert len(json.dumps(summarize(Evidence.of(list(kept))))) < 200_000


def test_events_may_be_added_while_another_thread_adds_up() -> None:
    ledger = Ledger.of([*sampled(2, 5)[:-1], Event("failure", 20.0)])
    pieces = ledger.slices()
    first = next(pieces)
    ledger.add(Event("attempt_start", 25.0, {"attempt": 2, "world_size": 2}))
    assert {each.rank for each in [first, *pieces]} == {0, 1}


def test_a_run_begins_with_its_first_event_though_it_is_asked_before() -> None:
    ledger = Ledger()
    ledger.add(Event("now", 0.5))
    for event in sampled(2, 5):
        ledger.add(event)
    assert ledger.totals() == Ledger.of(sampled(2, 5)).totals()


def test_time_without_events_counts_while_a_run_is_live() -> None:
    ledger = Ledger.of([*sampled(2, 5)[:-1], Event("failure", 20.0)])
    before = ledger.goodput()
    ledger.add(Event("now", 120.0))
    assert before is not None and ledger.totals()["recovering"] == pytest.approx(2 * 100)
    assert ledger.goodput() == pytest.approx(before * 19 / 119)
    paused = Ledger.of([*sampled(2, 5)[:-1], Event("paused", 12.0)])
    before = paused.goodput()
    paused.add(Event("now", 120.0))
    assert paused.totals()["paused"] == pytest.approx(2 * 108) and paused.goodput() == before
    ended = Ledger.of([*sampled(2, 5), Event("warning", 60.0, {"message": "the last checkpoint was not deleted"})])
    ended.add(Event("now", 120.0))
    assert (ended.now, ended.length_s) == (12.0, 11.0)

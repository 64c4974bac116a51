"""The ranks that a hanging collective waits for are found from each rank's last collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.backends.flight_recorder import Collective, explain_hang, last_of_each_group, read_collectives


def last(number: int, *, is_done: bool = False, operation: str = "gloo:all_reduce", group: str = "world") -> Collective:
    return Collective(group, number, operation, ((3,),), is_done)


def entry(number: int, group: str = "default_pg", **changes: Any) -> dict[str, Any]:
    """An entry of torch's flight recorder."""
    return {
        "process_group": ("0", group),
        "collective_seq_id": number,
        "time_created_ns": 1000 + number,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4, 2]],
        "state": "scheduled",
        "retired": True,
        **changes,
    }


def test_last_collective_of_each_group_is_read() -> None:
    sent = entry(9, is_p2p=True)
    dump = {"entries": [entry(1), entry(1, "rows"), entry(2, retired=False), entry(2, "rows", state="completed"), sent]}
    world, rows = last_of_each_group(read_collectives(dump))
    assert world == Collective("default_pg", 2, "gloo:all_reduce", ((4, 2),), False, began_ns=1002)
    assert (rows.group, rows.number, rows.is_done) == ("rows (0)", 2, True)
    assert read_collectives({}) == ()
    assert world.to_json()["sizes"] == [[4, 2]]


def test_collectives_of_earlier_attempts_are_left_out() -> None:
    dump = {"entries": [entry(9, retired=False, time_created_ns=1), entry(1, "rows")]}
    assert [collective.group for collective in read_collectives(dump, since_ns=1000)] == ["rows (0)"]


def test_collective_has_the_ranks_of_its_group() -> None:
    dump = {"entries": [entry(1, "rows"), entry(1)]}
    found = read_collectives(dump, ranks={"rows (0)": [0, 2]})
    assert [collective.ranks for collective in found] == [(0, 2), ()]


def test_groups_with_the_same_description_are_distinguished() -> None:
    """torch describes all groups of `new_group` alike, and all groups of a mesh axis."""
    dump = {"entries": [entry(1, process_group=(name, "undefined")) for name in ("1", "2")]}
    assert [collective.group for collective in read_collectives(dump)] == ["1", "2"]
    dump = {"entries": [entry(1, process_group=(name, "mesh_dp")) for name in ("1", "2")]}
    assert [collective.group for collective in read_collectives(dump)] == ["mesh_dp (1)", "mesh_dp (2)"]


def test_ranks_that_have_not_begun_the_collective_are_named() -> None:
    message = explain_hang({0: [last(57)], 1: [last(57)], 2: [last(56, is_done=True)]}, range(3))
    assert message == "ranks 0, 1 wait in collective 57 of world (gloo:all_reduce), which rank 2 has not begun"
    message = explain_hang({0: [last(3)], 1: [last(1)], 2: [last(2, is_done=True)]}, range(3))
    assert message == "rank 0 waits in collective 3 of world (gloo:all_reduce), which ranks 1, 2 have not begun"


def test_rank_without_an_answer_is_named_if_no_other_rank_is_behind() -> None:
    message = explain_hang({0: [last(57)], 2: [last(57)]}, range(3))
    assert message == "ranks 0, 2 wait in collective 57 of world (gloo:all_reduce); rank 1 has not answered"
    assert explain_hang({0: [last(57, is_done=True)]}, range(2)) is None


def test_different_collectives_on_ranks_are_reported() -> None:
    message = explain_hang({0: [last(5)], 1: [last(5, operation="gloo:broadcast")]}, range(2))
    assert (
        message
        == "collective 5 of world is not the same on all ranks: rank 0 gloo:all_reduce of 3, rank 1 gloo:broadcast of 3"
    )
    message = explain_hang({0: [last(5)], 1: [replace(last(5), sizes=((4,),))], 2: [last(5)]}, range(3))
    assert message is not None and message.endswith("rank 2 gloo:all_reduce of 3, rank 1 gloo:all_reduce of 4")


@pytest.mark.parametrize(
    ("changes", "do_match"),
    [
        ({"sizes": ((8,),)}, True),
        ({"sizes": ((2,), (6,))}, True),
        ({"sizes": ((9,),)}, False),
        ({"dtypes": ("Double",)}, False),
        ({"operation": "gloo:broadcast"}, False),
        ({"operation": "", "sizes": ()}, True),
        ({"sizes": (), "dtypes": ()}, True),
    ],
)
def test_collectives_match_if_operation_elements_and_dtype_are_the_same(
    changes: dict[str, Any], do_match: bool
) -> None:
    one = Collective("world", 5, "gloo:all_reduce", ((4, 2),), False, dtypes=("Float",))
    other = replace(one, **changes)
    assert one.matches(other) is do_match and other.matches(one) is do_match


def test_splits_of_an_all_to_all_may_differ() -> None:
    one = Collective("world", 5, "gloo:all_to_all", ((8,),), False, dtypes=("Float",))
    assert one.matches(replace(one, sizes=((3,),)))


def test_rank_without_an_input_to_scatter_matches_by_the_output() -> None:
    sizes = {"input_dtypes": ["Float"], "output_dtypes": ["Float"], "output_sizes": [[4]]}
    root = entry(1, profiling_name="gloo:scatter", input_sizes=[[2, 4]], **sizes)
    dump = {"entries": [root, {**root, "input_sizes": [], "input_dtypes": []}]}
    first, second = read_collectives(dump)
    assert first.matches(second) and first.content == second.content == "gloo:scatter of 4 float32"


def test_hanging_group_is_found_among_others() -> None:
    fine = last(9, is_done=True, group="rows")
    message = explain_hang({0: [fine, last(2)], 1: [fine, last(1, is_done=True)], 2: []}, range(3))
    assert message is not None and "collective 2 of world" in message


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, 5), st.integers(1, 4)), st.booleans())
def test_no_rank_is_named_if_no_rank_or_every_rank_waits(numbers: dict[int, int], all_wait: bool) -> None:
    alike = {rank: [last(3 if all_wait else number, is_done=not all_wait)] for rank, number in numbers.items()}
    assert explain_hang(alike, alike) is None


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, 5), st.tuples(st.integers(1, 4), st.booleans()), min_size=1))
def test_named_ranks_are_behind_a_waiting_rank(collectives: dict[int, tuple[int, bool]]) -> None:
    message = explain_hang(
        {rank: [last(number, is_done=is_done)] for rank, (number, is_done) in collectives.items()}, collectives
    )
    newest = max((number for number, is_done in collectives.values() if not is_done), default=0)
    behind = [str(rank) for rank, (number, _) in sorted(collectives.items()) if number < newest]
    assert (message is not None) == bool(behind)
    if message is not None:
        assert f"which rank{'s' if len(behind) > 1 else ''} {', '.join(behind)} ha" in message

"""Which rank is behind, by what each did last."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raysgd.backends.flight_record import Collective, last_collectives, who_is_behind


def last(number: int, *, is_done: bool = False, operation: str = "gloo:all_reduce", group: str = "world") -> Collective:
    return Collective(group, number, operation, ((3,),), is_done)


def entry(number: int, group: str = "default_pg", **changes: Any) -> dict[str, Any]:
    """As torch's flight recorder has it."""
    return {
        "process_group": ("0", group),
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4, 2]],
        "state": "scheduled",
        "retired": True,
        **changes,
    }


def test_the_last_of_each_group_is_looked_at() -> None:
    sent = entry(9, is_p2p=True)
    dump = {"entries": [entry(1), entry(1, "rows"), entry(2, retired=False), entry(2, "rows", state="completed"), sent]}
    world, rows = last_collectives(dump)
    assert world == Collective("default_pg", 2, "gloo:all_reduce", ((4, 2),), False)
    assert (rows.group, rows.number, rows.is_done) == ("rows (0)", 2, True)
    assert last_collectives({}) == ()
    assert world.shown()["sizes"] == [[4, 2]]


def test_groups_of_one_description_are_told_apart() -> None:
    """torch gives that of all groups that `new_group` makes, and one to those of a mesh's dimension."""
    dump = {"entries": [entry(1, process_group=(name, "undefined")) for name in ("1", "2")]}
    assert [each.group for each in last_collectives(dump)] == ["1", "2"]
    dump = {"entries": [entry(1, process_group=(name, "mesh_dp")) for name in ("1", "2")]}
    assert [each.group for each in last_collectives(dump)] == ["mesh_dp (1)", "mesh_dp (2)"]


def test_who_has_not_come_is_named() -> None:
    told = who_is_behind({0: [last(57)], 1: [last(57)], 2: [last(56, is_done=True)]}, range(3))
    assert told == "ranks 0, 1 wait in collective 57 of world (gloo:all_reduce), which rank 2 has not begun"
    told = who_is_behind({0: [last(3)], 1: [last(1)], 2: [last(2, is_done=True)]}, range(3))
    assert told == "rank 0 waits in collective 3 of world (gloo:all_reduce), which ranks 1, 2 have not begun"


def test_who_does_not_answer_is_named_where_nobody_else_is_behind() -> None:
    told = who_is_behind({0: [last(57)], 2: [last(57)]}, range(3))
    assert told == "ranks 0, 2 wait in collective 57 of world (gloo:all_reduce), and rank 1 does not say where"
    assert who_is_behind({0: [last(57, is_done=True)]}, range(2)) is None


def test_ranks_that_do_different_things_are_told() -> None:
    told = who_is_behind({0: [last(5)], 1: [last(5, operation="gloo:broadcast")]}, range(2))
    assert told == "collective 5 of world is not the same on all ranks: rank 0 gloo:all_reduce, rank 1 gloo:broadcast"


def test_the_group_that_hangs_is_found_among_others() -> None:
    fine = last(9, is_done=True, group="rows")
    told = who_is_behind({0: [fine, last(2)], 1: [fine, last(1, is_done=True)], 2: []}, range(3))
    assert told is not None and "collective 2 of world" in told


@given(st.dictionaries(st.integers(0, 5), st.integers(1, 4)), st.booleans())
def test_where_nobody_waits_or_all_wait_together_nobody_is_behind(numbers: dict[int, int], all_wait: bool) -> None:
    alike = {rank: [last(3 if all_wait else number, is_done=not all_wait)] for rank, number in numbers.items()}
    assert who_is_behind(alike, alike) is None


@given(st.dictionaries(st.integers(0, 5), st.tuples(st.integers(1, 4), st.booleans()), min_size=1))
def test_whoever_is_named_is_behind_one_who_waits(there: dict[int, tuple[int, bool]]) -> None:
    told = who_is_behind({rank: [last(number, is_done=is_done)] for rank, (number, is_done) in there.items()}, there)
    newest = max((number for number, is_done in there.values() if not is_done), default=0)
    behind = [str(rank) for rank, (number, _) in sorted(there.items()) if number < newest]
    assert (told is not None) == bool(behind)
    if told is not None:
        assert f"which rank{'s' if len(behind) > 1 else ''} {', '.join(behind)} ha" in told

"""It is computed whether workers fit onto a cluster, and the message says why they do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.config import ScalingConfig
from raysgd.workers.placement.capacity import (
    Holding,
    Node,
    describe_bundle,
    explain_busy,
    explain_full,
    explain_infeasible,
    explain_wait,
    list_slots,
    slot_bundle,
)


def node(total: dict[str, float], free: dict[str, float] | None = None, name: str = "n") -> Node:
    return Node(f"id of {name}", name, total, total if free is None else free)


def why(nodes: list[dict[str, float]], num_workers: Any = 2, **settings: Any) -> str | None:
    scaling = ScalingConfig(num_workers=num_workers, **settings)
    return explain_infeasible(scaling, [node(total) for total in nodes])


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        ([{"CPU": 2}], {}),
        ([{"CPU": 1}, {"CPU": 1}], {}),
        ([{"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}], {"gpus_per_worker": 1}),
        ([{"CPU": 2, "GPU": 1}], {"gpus_per_worker": 0.5}),
        ([{"CPU": 2, "TPU": 8}], {"resources_per_worker": {"TPU": 4}}),
        ([{"CPU": 2}], {"placement_strategy": "STRICT_PACK"}),
        ([{"CPU": 1}, {"CPU": 1}], {"placement_strategy": "STRICT_SPREAD"}),
        ([{"CPU": 2}], {"placement_strategy": "SPREAD"}),
        ([{}], {"cpus_per_worker": 0}),
    ],
)
def test_workers_that_fit_need_no_explanation(nodes: list[dict[str, float]], settings: dict[str, Any]) -> None:
    assert why(nodes, **settings) is None


@pytest.mark.parametrize(
    ("nodes", "settings", "text"),
    [
        ([{"CPU": 1}], {}, "needs 2 x 1 CPU = 2, the cluster has 1"),
        ([], {}, "needs 2 x 1 CPU = 2, the cluster has 0"),
        ([{"CPU": 8}], {"gpus_per_worker": 2}, "needs 2 x 2 GPU = 4, the cluster has 0"),
        ([{"CPU": 8, "GPU": 1}], {"gpus_per_worker": 0.75}, "needs 2 x 0.75 GPU = 1.5, the cluster has 1"),
        ([{"CPU": 8}], {"resources_per_worker": {"TPU": 1}}, "needs 2 x 1 TPU = 2, the cluster has 0"),
        (
            [{"CPU": 3}, {"CPU": 1}],
            {"cpus_per_worker": 2},
            "needs room for 2 workers of 2 CPU; the nodes hold 1 + 0 = 1",
        ),
        (
            [{"CPU": 8}, {"GPU": 2}],
            {"gpus_per_worker": 1},
            "needs room for 2 workers of 1 CPU + 1 GPU; the nodes hold 0 + 0 = 0",
        ),
        (
            [{"CPU": 1}, {"CPU": 1}],
            {"placement_strategy": "STRICT_PACK"},
            "STRICT_PACK needs one node for 2 workers of 1 CPU; the largest holds 1",
        ),
        (
            [{"CPU": 8}],
            {"placement_strategy": "STRICT_SPREAD"},
            "STRICT_SPREAD needs 2 nodes for 2 workers of 1 CPU; 1 can hold one",
        ),
    ],
)
def test_message_shows_the_arithmetic_of_workers_that_do_not_fit(
    nodes: list[dict[str, float]], settings: dict[str, Any], text: str
) -> None:
    assert why(nodes, **settings) == text


def test_resources_in_use_do_not_make_workers_infeasible() -> None:
    scaling, nodes = ScalingConfig(num_workers=2), [node({"CPU": 4}, free={"CPU": 1})]
    assert explain_infeasible(scaling, nodes) is None
    assert explain_busy(scaling, nodes) == "needs 2 x 1 CPU = 2, free now are 1"


def test_elastic_workers_need_room_for_the_minimum_only() -> None:
    assert why([{"CPU": 2}], (2, math.inf)) is None
    assert why([{"CPU": 1}], (2, 8)) == "needs 2 x 1 CPU = 2, the cluster has 1"


@pytest.mark.parametrize("share", [0.1, 0.2, 1 / 3])
def test_fractions_that_add_up_to_the_whole_fit(share: float) -> None:
    count = round(1 / share)
    assert why([{"CPU": count, "GPU": count * share}], count, gpus_per_worker=share) is None
    taken = 1.0
    for _ in range(count):
        taken -= share  # as Ray counts: what is left may be a little below nothing
    assert explain_busy(
        ScalingConfig(num_workers=1, gpus_per_worker=share), [node({"CPU": 9, "GPU": 1}, {"CPU": 9, "GPU": taken})]
    )


def test_fractions_on_many_nodes_fit_despite_rounding_errors() -> None:
    assert sum([0.1] * 8) < 8 * 0.1
    assert why([{"CPU": 1, "GPU": 0.1}] * 8, 8, gpus_per_worker=0.1) is None


AMOUNTS = st.sampled_from([0, 0.5, 1, 2, 3, 4, 7.5])


@given(
    cpus=st.sampled_from([0.5, 1, 2]),
    gpus=st.sampled_from([0, 0.25, 1]),
    held=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    spare=st.lists(st.sampled_from([0, 0.4, 0.9]), min_size=4, max_size=4),
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
)
def test_nodes_hold_exactly_the_workers_they_were_built_for(
    cpus: float, gpus: float, held: list[int], spare: list[float], strategy: str
) -> None:
    """Each node is built to hold a number of workers and a part of one more."""
    nodes = [
        {"CPU": cpus * (count + part), "GPU": gpus * (count + part)} for count, part in zip(held, spare, strict=False)
    ]
    most = {
        "STRICT_PACK": max(held),
        "STRICT_SPREAD": sum(count > 0 for count in held),
    }.get(strategy, sum(held))
    for num_workers in range(1, most + 3):
        text = why(nodes, num_workers, cpus_per_worker=cpus, gpus_per_worker=gpus, placement_strategy=strategy)
        assert (text is None) == (num_workers <= most)


@given(
    st.lists(st.fixed_dictionaries({"CPU": AMOUNTS, "GPU": AMOUNTS}), max_size=4),
    st.fixed_dictionaries({"CPU": AMOUNTS, "GPU": AMOUNTS}),
    st.integers(1, 6),
    st.sampled_from(["PACK", "STRICT_PACK", "STRICT_SPREAD"]),
)
def test_additional_node_never_makes_workers_infeasible(
    nodes: list[dict[str, float]], more: dict[str, float], num_workers: int, strategy: str
) -> None:
    settings = {"gpus_per_worker": 0.5, "placement_strategy": strategy}
    if why(nodes, num_workers, **settings) is None:
        assert why([*nodes, more], num_workers, **settings) is None


def test_bundle_is_described_in_words() -> None:
    assert describe_bundle({"CPU": 2, "GPU": 0.5, "TPU": 4}) == "2 CPU + 0.5 GPU + 4 TPU"
    assert describe_bundle({}) == "no resources"


def test_message_shows_the_free_bundles_of_a_placement_group_that_is_too_small() -> None:
    scaling = ScalingConfig(num_workers=2, cpus_per_worker=2)
    assert explain_full(scaling, [{"CPU": 0.0}, {"CPU": 2.0}, {"CPU": 2.0}]) is None
    message = explain_full(scaling, [{"CPU": 0.0}, {"CPU": 3.0}], num_spares=1)
    assert message == (
        "needs room for 3 x (2 CPU) (2 workers, 1 spare), and its bundles have no resources | 3 CPU free, room for 1"
    )
    assert explain_full(ScalingConfig(num_workers=2, cpus_per_worker=0), [{"memory": 2}]) is None


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 3))
def test_each_bundle_has_as_many_slots_as_workers_fit(free: list[int], cpus: int) -> None:
    found = list_slots([{"CPU": float(amount)} for amount in free], {"CPU": float(cpus)})
    assert [found.count(index) for index in range(len(free))] == [amount // cpus for amount in free]
    assert found == sorted(found)
    assert slot_bundle(ScalingConfig(cpus_per_worker=cpus)) == {"CPU": cpus}


@pytest.mark.parametrize(
    ("each", "free", "count"),
    [(0.4, 4, 8), (0.5, 1.5, 3), (0.3, 1, 3), (0.6, 3.4, 3), (1, 2.5, 2), (2, 5, 2), (0.1, 2, 20)],
)
def test_fraction_of_a_gpu_never_spans_two_gpus(each: float, free: float, count: int) -> None:
    assert len(list_slots([{"GPU": free}], {"GPU": each})) == count


def waits(nodes: list[Node], count: int = 2, holdings: list[Holding] | None = None, **settings: Any) -> str | None:
    return explain_wait(ScalingConfig(num_workers=9, **settings), count, nodes, holdings or [])


def test_wait_is_explained_by_what_is_missing_and_who_holds_it() -> None:
    full = node({"CPU": 4}, free={})
    holdings = [Holding("a", {"CPU": 1.0}), Holding("b", {"CPU": 2.0, "GPU": 1.0}), Holding("c", {})]
    assert waits([full], holdings=holdings) == "waiting for 2 CPUs; 2 are held by b, 1 by a, 1 by others"
    assert waits([full], 1) == "waiting for 1 CPU; 4 are held by others"
    assert (
        waits([full, node({"CPU": 8}, free={"CPU": 1})], 2) == "waiting for 2 CPUs (1 CPU free); 11 are held by others"
    )
    assert waits([full, node({"CPU": 8})], 2) is None


def test_wait_for_several_resources_is_explained_for_each() -> None:
    nodes = [node({"CPU": 4, "GPU": 2, "licence": 1}, free={"CPU": 4, "GPU": 1})]
    settings: dict[str, Any] = {"gpus_per_worker": 1, "resources_per_worker": {"licence": 0.5}}
    assert waits(nodes, 2, [Holding("a", {"GPU": 1.0})], **settings) == (
        "waiting for 2 GPUs and 1 licence (1 GPU free); of GPU: 1 is held by a; of licence: 1 is held by others"
    )


def test_wait_for_room_on_one_node_is_explained() -> None:
    nodes = [node({"CPU": 2}, free={"CPU": 1}), node({"CPU": 2}, free={"CPU": 1})]
    held = "2 are held by others"
    assert waits(nodes, 1, cpus_per_worker=2) == f"waiting for room for 1 worker of 2 CPU; {held}"
    assert waits(nodes, 2, placement_strategy="STRICT_PACK") == f"waiting for room for 2 workers of 1 CPU; {held}"


def test_workers_wait_for_nodes_that_are_yet_to_come() -> None:
    assert waits([node({"CPU": 1})]) == "waiting for 2 CPUs (1 CPU free); the cluster has 1 CPU"


def test_workers_without_resources_wait_for_none() -> None:
    assert waits([node({"CPU": 1}, free={})], cpus_per_worker=0) is None
    assert "CPU" not in slot_bundle(ScalingConfig(cpus_per_worker=0))

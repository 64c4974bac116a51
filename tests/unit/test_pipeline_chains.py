"""Sharding of chains of kernels, as in MLPs: the plan follows the flow of data, whatever the keys of the tree are."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

from jax.sharding import PartitionSpec as P  # noqa: E402

from raysgd.pipeline.sharding.plan import plan_sharding  # noqa: E402

COLUMN, ROW, WHOLE = P(None, "model"), P("model", None), P()
SIZES = st.sampled_from([8, 12, 16, 24, 32, 40, 64])
#: Words that have a meaning elsewhere, and others.
NAMES = "up down head query out output dense_0 dense_1 0 1 10 kernel w weight aa b2 zz".split()


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)


def chain(widths: list[int]) -> list[Any]:
    return [array(*pair) for pair in pairwise(widths)]


def plan_of(params: Any, shards: int = 2) -> dict[str, Any]:
    return {each.path: each for each in plan_sharding(params, {"data": 2, "model": shards}).parameters}


def specs_of(params: Any, shards: int = 2) -> dict[str, Any]:
    return {path: each.spec for path, each in plan_of(params, shards).items()}


def named(kernels: list[Any], names: list[str], *, in_modules: bool) -> dict[str, Any]:
    return {name: {"kernel": kernel} if in_modules else kernel for name, kernel in zip(names, kernels, strict=True)}


@st.composite
def renamed_chains(draw: Any, widths: Any) -> tuple[list[int], dict[str, Any], list[str]]:
    """Return the widths of a chain, its tree under random names, and the path of each kernel in the order of the chain."""
    sizes = draw(widths)
    names = draw(st.permutations(NAMES))[: len(sizes) - 1]
    in_modules = draw(st.booleans())
    suffix = "/kernel" if in_modules else ""
    return sizes, named(chain(sizes), names, in_modules=in_modules), [name + suffix for name in names]


def test_plain_dict_is_sharded_in_the_order_of_the_data_and_not_of_the_alphabet() -> None:
    params = {"up": array(16, 64), "down": array(64, 16), "head": array(16, 10)}
    assert specs_of(params) == {"up": COLUMN, "down": ROW, "head": COLUMN}
    assert specs_of({"embed": array(100, 16), **params, "head": array(16, 100)}) == {
        "embed": ROW,  # by the vocabulary, as the head
        "up": COLUMN,
        "down": ROW,
        "head": COLUMN,
    }


@given(renamed_chains(st.lists(SIZES, min_size=3, max_size=7, unique=True)))
def test_chain_of_different_sizes_alternates_whatever_its_keys(given_chain: Any) -> None:
    _, params, paths = given_chain
    specs = specs_of(params)
    assert [specs[path] for path in paths] == [ROW if number % 2 else COLUMN for number in range(len(paths))]


@given(blocks=st.integers(1, 4), factor=st.integers(2, 4), names=st.permutations(NAMES))
def test_blocks_that_lead_back_to_their_width_are_pairs_whatever_their_keys(
    blocks: int, factor: int, names: list[str]
) -> None:
    widths = [16, 16 * factor] * blocks + [16, 10]
    specs = specs_of(named(chain(widths), names[: len(widths) - 1], in_modules=False))
    assert [*specs.values()].count(ROW) == blocks
    for name, kernel in named(chain(widths), names[: len(widths) - 1], in_modules=False).items():
        assert specs[name] == (ROW if kernel.shape[0] == 16 * factor else COLUMN)


@given(renamed_chains(st.lists(SIZES, min_size=3, max_size=9)), st.permutations(NAMES), st.sampled_from([2, 4, 8]))
def test_names_change_nothing_but_what_the_plan_says_that_they_decide(
    given_chain: Any, other_names: list[str], shards: int
) -> None:
    widths, params, paths = given_chain
    kernels = chain(widths)
    other = plan_of(named(kernels, other_names[: len(kernels)], in_modules=True), shards)
    one = plan_of(params, shards)
    pairs = [(one[path], other[f"{name}/kernel"]) for path, name in zip(paths, other_names, strict=False)]
    for a, b in pairs:
        assert a.reason.partition(";")[2] == b.reason.partition(";")[2]
    if any("shapes do not decide" in a.reason for a, _ in pairs):
        return
    assert Counter((a.shape, a.spec) for a, _ in pairs) == Counter((b.shape, b.spec) for _, b in pairs)
    for a, b in pairs:
        if "order of the names" not in a.reason:
            assert a.spec == b.spec


def test_plan_says_where_names_decide_and_own_rules_override() -> None:
    squares = {"first": array(8, 16), "b": array(16, 16), "a": array(16, 16), "last": array(16, 4)}
    plan = plan_of(squares)
    assert {path: each.spec for path, each in plan.items()} == {"first": COLUMN, "a": ROW, "b": COLUMN, "last": ROW}
    assert plan["a"].reason.endswith("; among kernels of this shape by the order of the names (own rules override it)")
    assert ";" not in plan["first"].reason + plan["last"].reason
    branches = {**squares, "other": array(16, 7), "third": array(16, 3)}
    plan = plan_of(branches)
    assert all("since shapes do not decide" in each.reason for each in plan.values())
    assert [plan[path].spec for path in ("first", "a", "b", "last")] == [COLUMN, ROW, COLUMN, ROW]
    own = plan_sharding(squares, {"data": 1, "model": 2}, [("^b$", ROW), ("^a$", COLUMN)])
    assert {each.path: each.spec for each in own.parameters if each.path in "ab"} == {"a": COLUMN, "b": ROW}


def test_networks_side_by_side_are_chains_of_their_own() -> None:
    def network(outputs: int) -> Any:
        return {"out": array(64, outputs), "hidden": array(64, 64), "begin": array(8, 64)}

    specs = specs_of({"critic": network(3), "actor": network(2)}, shards=2)
    assert specs == {
        "actor/begin": COLUMN,
        "actor/hidden": ROW,
        "actor/out": COLUMN,
        "critic/begin": COLUMN,
        "critic/hidden": ROW,
        "critic/out": ROW,  # 3 outputs do not divide
    }
    assert specs_of({"critic": network(1)}) == {"critic/begin": COLUMN, "critic/hidden": ROW, "critic/out": WHOLE}


def test_heads_of_one_trunk_are_alike() -> None:
    specs = specs_of({"value": array(32, 2), "policy": array(32, 6), "body": array(64, 32), "begin": array(10, 64)})
    assert specs == {"begin": COLUMN, "body": ROW, "value": COLUMN, "policy": COLUMN}


def test_chain_begins_again_after_outputs_that_do_not_divide() -> None:
    specs = specs_of({"d": array(8, 30), "c": array(30, 16), "b": array(16, 4)}, shards=4)
    assert specs == {"d": ROW, "c": COLUMN, "b": ROW}


def test_one_name_does_not_change_how_kernels_are_stored() -> None:
    params = {"weight": array(16, 64), "down": array(64, 24), "head": array(24, 10)}
    assert specs_of(params) == {"weight": COLUMN, "down": ROW, "head": COLUMN}
    stored = {name: {"weight": array(*kernel.shape[::-1])} for name, kernel in params.items()}  # as torch does
    assert specs_of(stored) == {"weight/weight": ROW, "down/weight": COLUMN, "head/weight": ROW}


def test_plans_of_long_networks_are_found_fast() -> None:
    params = {f"layer_{number:03d}": array(64, 64 if number % 3 else 32) for number in range(300)}
    params |= {f"back_{number:03d}": array(32, 64) for number in range(100)}
    assert len(plan_of(params)) == 400

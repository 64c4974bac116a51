"""Metrics are found by name, flat and nested ones, in one way everywhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._util.metric_names import find_keys, find_metric, flatten, listed, nearest, set_at

NAMES = st.sampled_from(["a", "b", "a/b", "b/a", "a/a/b"])
METRICS = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)


@pytest.mark.parametrize(
    ("metrics", "name", "keys"),
    [
        ({"loss": 1}, "loss", ("loss",)),
        ({"val": {"acc": 1}}, "val/acc", ("val", "acc")),
        ({"val": {"acc": 1}, "val/acc": 2}, "val/acc", ("val/acc",)),
        ({"val/acc": 2, "val": {"acc": 1}}, "val/acc", ("val/acc",)),
        ({"val": {"top/5": 1}}, "val/top/5", ("val", "top/5")),
        ({"val/top": {"5": 1}, "val": {"top": {"5": 2}}}, "val/top/5", ("val/top", "5")),
        ({"loss": 1}, "los", None),
        ({"loss": 1}, "loss/x", None),
        ({"val": {"acc": 1}}, "val", None),
        ({"val": {"acc": 1}}, "val/", None),
        ({"val": None}, "val", ("val",)),
        ({"/": 1}, "/", ("/",)),
    ],
)
def test_name_leads_to_its_metric(metrics: dict[str, Any], name: str, keys: tuple[str, ...] | None) -> None:
    assert find_keys(metrics, name) == keys


@given(st.dictionaries(NAMES, METRICS, max_size=4))
def test_every_flat_name_finds_its_value(metrics: dict[str, Any]) -> None:
    for name, value in flatten(metrics).items():
        assert find_metric(metrics, name, "missing") == value


@given(st.dictionaries(NAMES, METRICS, max_size=4))
def test_metric_that_is_set_is_found(metrics: dict[str, Any]) -> None:
    for name in flatten(metrics):
        keys = find_keys(metrics, name)
        assert keys is not None
        copy, before = dict(metrics), repr(metrics)
        set_at(copy, keys, "new")
        assert find_metric(copy, name) == "new"
        assert {**flatten(copy), name: 0} == {**flatten(metrics), name: 0}
        assert repr(metrics) == before


def test_metric_is_set_in_a_group_that_is_made() -> None:
    metrics: dict[str, Any] = {"loss": 1}
    set_at(metrics, ("val", "acc"), 2)
    assert metrics == {"loss": 1, "val": {"acc": 2}}


def test_metric_whose_group_has_the_name_of_a_metric_gets_a_flat_name() -> None:
    metrics: dict[str, Any] = {"val": 1}
    set_at(metrics, ("val", "acc"), 2)
    assert metrics == {"val": 1, "val/acc": 2}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("los", " (did you mean 'loss'?)"),
        ("acc", " (did you mean 'val/acc'?)"),
        ("val", " (did you mean 'val/acc'?)"),
        ("val/ac", " (did you mean 'val/acc'?)"),
        ("accuracy", " (did you mean 'val/acc'?)"),
        ("val_loss", " (did you mean 'loss'?)"),
        ("absent", ""),
        ("lo", " (did you mean 'loss'?)"),
        ("zzz", ""),
        ("val/", " (did you mean 'val/acc'?)"),
    ],
)
def test_nearest_name_is_suggested(name: str, hint: str) -> None:
    assert nearest(name, ["loss", "val/acc"]) == hint


def test_long_lists_of_names_are_cut() -> None:
    assert listed([]) == "no metrics"
    assert listed("abc") == "a, b, c"
    assert listed(map(str, range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"

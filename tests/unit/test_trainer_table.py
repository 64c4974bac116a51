"""The table a Trainer prints: what each worker gets, and what of the cluster that takes."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from raysgd._util.tables import as_html, as_text
from raysgd.trainer.table import resource_table


def text_of(**fields: object) -> str:
    given = {"bundle": {"CPU": 2.0}, "nodes": ["a", "b"], "cluster": None}
    return as_text(resource_table(**{**given, **fields}))  # type: ignore[arg-type]


def cells(text: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in text.splitlines() if set(line) != {"-"}]


def test_a_row_for_each_worker_and_the_totals() -> None:
    rows = cells(text_of(bundle={"CPU": 2, "GPU": 0.5}, nodes=["node-1 (10.0.0.1)", "-"]))
    assert rows[0] == ["worker", "node", "CPU", "GPU"]
    assert rows[1:3] == [["0", "node-1 (10.0.0.1)", "2", "0.5"], ["1", "-", "2", "0.5"]]
    assert rows[-1] == ["total", "4", "1"]


def test_totals_are_shown_with_the_cluster_resources() -> None:
    rows = cells(text_of(bundle={"CPU": 2, "GPU": 1}, cluster={"CPU": 16.0, "memory": 1e9}))
    assert rows[-1] == ["total", "of the cluster", "4 of 16", "2 of 0"]


def test_each_further_resource_has_a_column() -> None:
    rows = cells(text_of(bundle={"CPU": 1, "TPU": 4, "Acc": 1}))
    assert rows[0] == ["worker", "node", "CPU", "GPU", "Acc", "TPU"]
    assert rows[-1] == ["total", "2", "0", "2", "8"]


def test_columns_are_aligned_in_plain_text() -> None:
    text = text_of(bundle={"CPU": 10, "GPU": 1}, nodes=["a", "a much longer name of a node " * 5])
    head, _, first, second, *_ = text.splitlines()
    assert head.index("CPU") + 3 == first.index("10") + 2 == second.index("10") + 2
    assert text.isascii(), "any terminal and any log can hold it"
    assert all(line == line.rstrip() for line in text.splitlines())


def test_html_has_the_same_cells_and_names_are_escaped() -> None:
    given = {"nodes": ["<script>alert(1)</script>", "[red]b"], "bundle": {"CPU": 2, "<b>": 1}, "cluster": {"CPU": 8}}
    shown = as_html("a title", resource_table(**given))  # type: ignore[arg-type]
    root = ElementTree.fromstring(shown)
    assert not list(root.iter("script")) and not list(root.iter("b"))
    title, *lines = html.unescape("".join(root.itertext())).splitlines()
    assert title.strip() == "a title" and cells("\n".join(map(str.rstrip, lines))) == cells(text_of(**given))

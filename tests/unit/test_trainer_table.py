"""The table a Trainer prints: what each worker gets, and what of the cluster that takes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from raysgd.trainer.table import ResourceTable


def table(**fields: object) -> ResourceTable:
    given = {"title": "Trainer: 2 x torch worker", "bundle": {"CPU": 2.0}, "nodes": ["a", "b"], "cluster": None}
    return ResourceTable(**{**given, **fields})  # type: ignore[arg-type]


def cells(text: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def test_a_row_for_each_worker_and_the_totals() -> None:
    rows = cells(table(bundle={"CPU": 2, "GPU": 0.5}, nodes=["node-1 (10.0.0.1)", "-"]).text())
    assert rows[0] == ["Trainer: 2 x torch worker"]
    assert rows[2] == ["worker", "node", "CPU", "GPU"]
    assert rows[4:6] == [["0", "node-1 (10.0.0.1)", "2", "0.5"], ["1", "-", "2", "0.5"]]
    assert rows[-1] == ["total", "4", "1"]


def test_totals_are_shown_with_the_cluster_resources() -> None:
    rows = cells(table(bundle={"CPU": 2, "GPU": 1}, cluster={"CPU": 16.0, "memory": 1e9}).text())
    assert rows[-1] == ["total", "of the cluster", "4 of 16", "2 of 0"]


def test_each_further_resource_has_a_column() -> None:
    rows = cells(table(bundle={"CPU": 1, "TPU": 4, "Acc": 1}).text())
    assert rows[2] == ["worker", "node", "CPU", "GPU", "Acc", "TPU"]
    assert rows[-1] == ["total", "2", "0", "2", "8"]


def test_columns_are_aligned() -> None:
    text = table(bundle={"CPU": 10, "GPU": 1}, nodes=["a", "a much longer name of a node"]).text()
    lines = [line for line in text.splitlines()[2:] if not line.startswith("-")]
    ends = {line.index("CPU") + 3 for line in lines if "CPU" in line} | {
        line.index("10") + 2 for line in lines if " 10 " in line
    }
    assert len(ends) == 1
    assert {len(line) for line in text.splitlines() if set(line) == {"-"}} == {max(map(len, lines))}


def test_lines_have_no_trailing_blanks() -> None:
    assert all(line == line.rstrip() for line in table().text().splitlines())


def test_html_table_has_the_same_cells() -> None:
    given = table(bundle={"CPU": 2, "GPU": 1}, cluster={"CPU": 8, "GPU": 2})
    root = ElementTree.fromstring(given.html())
    rows = [[cell.text or "" for cell in row] for row in root.iter("tr")]
    assert rows[0] == ["worker", "node", "CPU", "GPU"]
    assert rows[1:3] == [["0", "a", "2", "1"], ["1", "b", "2", "1"]]
    assert rows[3] == ["total", "of the cluster", "4 of 8", "2 of 2"]
    caption = root.find("caption")
    assert caption is not None and caption.text == given.title


def test_names_are_escaped_in_html() -> None:
    root = ElementTree.fromstring(table(nodes=["<script>alert(1)</script>", "b"], bundle={"<b>": 1}).html())
    assert not list(root.iter("script")) and not list(root.iter("b"))
    assert "<script>alert(1)</script>" in [cell.text for cell in root.iter("td")]

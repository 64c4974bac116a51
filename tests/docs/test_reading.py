"""The reader of the documents' code finds what is there: a block it overlooked would be a block nobody runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from support.snippets import run_snippets, snippets

PAGE = """\
# A page

```python
value = 1
```

Text.

<!-- no-run: it needs a cluster -->

```python
raise RuntimeError("must not run")
```

1. In a list:

    ```python
    value += 1
    ```

```console
$ make test
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_all_blocks_of_the_language_are_found(page: Path) -> None:
    assert [(block.line, block.runs) for block in snippets(page, "python")] == [(3, True), (11, False), (17, True)]
    assert [block.code for block in snippets(page, "console")] == ["$ make test\n"]


def test_blocks_run_in_one_namespace_and_no_run_ones_do_not(page: Path) -> None:
    assert run_snippets(snippets(page, "python"))["value"] == 2


def test_a_block_that_does_not_run_must_compile(page: Path) -> None:
    page.write_text("<!-- no-run: an example -->\n```python\nthis does not compile\n```\n")
    with pytest.raises(SyntaxError):
        run_snippets(snippets(page, "python"))


def test_an_error_points_at_the_line_of_the_document(page: Path) -> None:
    page.write_text(
        textwrap.dedent("""
        ```python
        a = 1
        b = 1 / 0
        ```
        """)
    )
    with pytest.raises(ZeroDivisionError) as caught:
        run_snippets(snippets(page, "python"))
    assert caught.traceback[-1].lineno + 1 == 4
    assert str(caught.traceback[-1].path) == str(page)


def test_a_block_without_an_end_is_an_error(page: Path) -> None:
    page.write_text("```python\nvalue = 1\n")
    with pytest.raises(ValueError, match="has no end"):
        snippets(page, "python")

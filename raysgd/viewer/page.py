"""Writes the HTML of the page: as a file with runs in it, or for the server.

Scripts, styles and data are in the document itself. A content security policy with their hashes lets the browser run and load
nothing else. What comes from a run is JSON, in elements that the browser does not run, and reaches the page as text.

``static/`` has the page's scripts and page.css, and uPlot as the npm package uplot 1.6.32 has it, with its licence.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import os
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from raysgd._util.media import FOLDER
from raysgd._util.metric_names import FIRST, LAST
from raysgd._version import __version__
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import RaySGDError
from raysgd.runs.state import read_state
from raysgd.viewer.rows import row_of
from raysgd.viewer.run_data import RunData

_BODY = """\
<header><h1>{title}</h1><span class="soft small" id="folder">{folder}</span>
<nav id="navigation" aria-label="Views"></nav><span id="tools"></span></header>
<main>
<div class="banner" id="banner" role="alert" hidden></div>
<div id="views"></div>
</main>
<footer class="soft small"><p>raysgd {version}. Curves: uPlot, MIT licence.</p></footer>
"""
#: The scripts of the page, in their order; each sees what those before it declare. A view is declared as state.js says.
_SCRIPTS = (
    "uPlot.iife.min.js",
    "base.js",
    "state.js",
    "data.js",
    "chart.js",
    "rows.js",
    "metrics.js",
    "tables.js",
    "timeline.js",
    "overview.js",
    "grid.js",
    "media.js",
    "charts_view.js",
    "time_view.js",
    "table_view.js",
    "search_view.js",
    "logs_view.js",
    "keys.js",
    "start.js",
)
_HEAD_SCRIPT = "theme.js"
_MAX_TITLE = 120
#: A notebook's file keeps the outputs of its cells.
_MAX_FRAME_CHARACTERS = 4_000_000
#: Images in a file, over all runs.
_MAX_IMAGE_CHARACTERS = 20_000_000


def write_file(runs: Sequence[RunData], *, is_frame: bool = False) -> Iterator[str]:
    """Yield the text of a page that holds these runs.

    Args:
        runs: The runs.
        is_frame: The page is part of another one that has a header: only curves, timeline and tables are shown.

    Raises:
        CheckpointNotFoundError: A folder is not a run's folder.
    """
    answers = [run.read(is_final=True) for run in runs]
    names = [str(answer["facts"]["name"]) for answer in answers]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    yield _head("file", title, ' data-frame="1"' if is_frame else "")
    yield _body(title, "")
    for place, (run, answer) in enumerate(zip(runs, answers, strict=True)):
        columns = answer.get("results", {}).get("columns", {})
        for number, (metric, column) in enumerate(columns.items()):
            reference = f"column-{place}-{number}"
            data = column.pop("data")
            yield f'<script type="text/plain" id="{reference}">{data}</script>\n'
            column["ref"] = reference
            found = run.rank_curves(metric, step=run.rank_step())
            for curve in found["curves"].values():
                if curve["y"]["data"] == data:  # rank 0's, mostly: the file has these numbers once
                    curve["y"] = {"type": column["type"], "ref": reference}
            if len(found["curves"]) > 1:
                column["ranks"] = f"ranks-{place}-{number}"
                yield f'<script type="application/json" id="{column["ranks"]}">{_json(found)}</script>\n'
        if not is_frame:
            answer["time"] = run.time_used()
        yield f'<script type="application/json" data-run="{place}">{_json(answer)}</script>\n'
    rows = [
        {"id": place, "name": run.name, "ranges": run.ranges(), **row_of(read_state(run.folder))}
        for place, run in enumerate(runs)
    ]
    yield f'<script type="application/json" id="rows">{_json(rows)}</script>\n'
    yield from _images(runs)
    yield _scripts()


def _images(runs: Sequence[RunData]) -> Iterator[str]:
    """Yield elements with the images of runs, newest first, as far as there is room."""
    room = _MAX_IMAGE_CHARACTERS
    for place, run in enumerate(runs):
        for name in run.image_names():
            try:
                data = base64.b64encode(run.folder.child(FOLDER).read_bytes(name)).decode("ascii")
            except RaySGDError:  # the page says that it is missing
                continue
            room -= len(data)
            if room < 0:
                return
            yield f'<script type="text/plain" id="image-{place}-{name}">{data}</script>\n'


def write_frame(run_dir: str) -> str:
    """Return the page of a run as an element of a notebook's output: curves and timeline.

    Args:
        run_dir: The run's folder. That of a run on object storage is not read again.

    Returns:
        A line with the command that writes the page, if the page is too large for a notebook; nothing, if the run's files are
        not on this machine.
    """
    if not os.path.isdir(run_dir):
        return ""
    try:
        text = "".join(write_file([RunData(Storage.from_uri(run_dir))], is_frame=True))
    except RaySGDError:
        return ""
    if len(text) > _MAX_FRAME_CHARACTERS:
        return f"<p>Curves and timeline: <code>raysgd report {html.escape(run_dir)}</code></p>"
    look = 'style="width:100%;height:640px;border:1px solid #8884" title="Page of the run"'
    return f'<iframe sandbox="allow-scripts allow-downloads allow-modals" {look} srcdoc="{html.escape(text)}"></iframe>'


def live_page(folder: str, token: str, *, is_editable: bool) -> str:
    """Return the text of the page that asks a server for its runs, and with ``is_editable`` also to change them."""
    data = f' data-token="{html.escape(token)}"' + " data-editable" * is_editable
    return _head("live", f"Runs in {folder}", data) + _body("Runs", folder) + _scripts()


def content_security_policy(*, is_live: bool) -> str:
    """Return the policy: the page's own scripts and styles, and for the live page its own server; nothing else."""
    scripts = " ".join(f"'sha256-{_hash(_static(name))}'" for name in (_HEAD_SCRIPT, *_SCRIPTS))
    policy = f"default-src 'none'; img-src data:; script-src {scripts}; style-src 'sha256-{_hash(_style())}'"
    policy += "; base-uri 'none'; form-action 'none'"
    return policy + ("; connect-src 'self'" if is_live else "")


def _head(mode: str, title: str, data: str = "") -> str:
    policy = content_security_policy(is_live=mode == "live")
    return (
        f'<!doctype html>\n<html lang="en" data-mode="{mode}"{data} data-first-metrics="{html.escape(_json(FIRST))}"'
        f' data-last-metrics="{html.escape(LAST)}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f'<title>{html.escape(title[:_MAX_TITLE])}: raysgd</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_style()}</style>\n<script>{_static(_HEAD_SCRIPT)}</script>\n</head>\n<body>\n"
    )


def _body(title: str, folder: str) -> str:
    return _BODY.format(title=html.escape(title), folder=html.escape(folder), version=html.escape(__version__))


def _scripts() -> str:
    licence = f"<!-- uPlot, below:\n{_static('uPlot.LICENSE')}-->\n"
    return licence + "".join(f"<script>{_static(name)}</script>\n" for name in _SCRIPTS) + "</body>\n</html>\n"


def _json(value: Any) -> str:
    """Encode a value so that no text in it ends the element that it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@functools.cache
def _static(name: str) -> str:
    return resources.files("raysgd.viewer").joinpath("static", name).read_text(encoding="utf-8")


def _style() -> str:
    return "\n".join(map(_static, ("uPlot.min.css", "page.css", "views.css")))


@functools.cache
def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")

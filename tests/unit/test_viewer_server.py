"""The server of the live page answers those who know its token, about runs in its list, and changes those alone."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from raysgd.checkpoint.storage.storage import Storage
from raysgd.viewer.catalog import Catalog
from raysgd.viewer.server import TOKEN_HEADER, ViewerServer
from support.journals import WrittenRun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ViewerServer]:
    run = WrittenRun(folder / "runs" / "run_001", config={"lr": 0.1})
    run.begin_attempt([11, 12])
    for rank in (0, 1):
        run.report({"loss": 1.0, "</script><script>alert(1)</script>": 2.0}, rank=rank)
    run.end()
    (folder / "secret.txt").write_text("secret")
    server = ViewerServer(Catalog(Storage.from_uri(folder / "runs")))
    server.start()
    yield server
    server.close()


def ask(
    server: ViewerServer, path: str, token: str | None = "", method: str = "GET", body: bytes | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Send a request; ``token``: ``""`` is the right one, None is none. Returns status, body and headers."""
    address = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    headers = {} if token is None else {TOKEN_HEADER: token or server.token}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(body) if is_json else body, dict(answer.headers)
    finally:
        connection.close()


def test_server_lists_runs_and_answers_with_what_is_new(server: ViewerServer) -> None:
    status, listed, _ = ask(server, "/api/runs")
    (run,) = [run for run in listed["runs"] if run["state"] != "unreadable"]
    assert (status, run["name"], run["state"]) == (200, "runs/run_001", "done")
    status, answer, _ = ask(server, f"/api/runs/{run['id']}?after=-1")
    assert status == 200 and answer["facts"]["config"] == {"lr": "0.1"} and "loss" in answer["results"]["columns"]
    _, again, _ = ask(server, f"/api/runs/{run['id']}?after={answer['cursor']}")
    assert again.keys() == {"cursor", "state", "is_closed", "is_behind", "updated"}
    _, ranks, _ = ask(server, f"/api/runs/{run['id']}/ranks?metric=loss")
    assert ranks["curves"].keys() == {"0", "1"}
    assert ask(server, f"/api/runs/{run['id']}/ranks?metric=unknown")[1]["curves"] == {}
    _, used, _ = ask(server, f"/api/runs/{run['id']}/time")
    assert used["is_final"] and used["goodput"] is None and used["words"]["data"] == "waiting for data"


@pytest.mark.parametrize("token", [None, "wrong", "x" * 10_000, "\u00e4"])
def test_request_without_the_token_gets_nothing(server: ViewerServer, token: str | None) -> None:
    for path in ("/", "/api/runs", "/api/runs/0", "/api/runs/0/ranks?metric=loss", "/api/runs/0/time", "/nothing"):
        status, body, _ = ask(server, path, token)
        assert status == 403 and "token" in body and "run_001" not in body, path


def test_address_has_the_token_and_names_the_loopback(server: ViewerServer) -> None:
    address = urlsplit(server.address)
    assert address.hostname == "127.0.0.1"
    status, page, headers = ask(server, f"/?{address.query}", token=None)
    assert status == 200 and page.startswith("<!doctype html>")
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert len(server.token) >= 32 and ViewerServer(Catalog(Storage.from_uri("."))).token != server.token


def test_other_addresses_and_methods_give_no_file(server: ViewerServer) -> None:
    ask(server, "/api/runs")
    refused = {
        "/api/runs/0?after=x": 400,
        "/api/runs/0?after=" + "9" * 400: 400,
        "/api/runs/1": 404,
        "/api/runs/-1": 404,
        "/api/runs/..%2f..%2fsecret.txt": 404,
        "/../secret.txt": 404,
        "//secret.txt": 404,
        "/api/runs/0/../../secret.txt": 404,
        "/static/chart.js": 404,
    }
    for path, status in refused.items():
        found, body, _ = ask(server, path)
        assert found == status and body.strip() != "secret", path
    address = urlsplit(server.address)
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=10) as connection:
        connection.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
        assert b" 400 " in connection.recv(100)
    for method in ("PUT", "PATCH", "OPTIONS"):
        assert ask(server, "/api/runs", method=method)[0] == 501
    for method in ("POST", "DELETE"):
        assert ask(server, "/api/runs", method=method)[0] == 404


def test_damaged_run_is_an_error_of_that_run_alone(server: ViewerServer, folder: Path) -> None:
    damaged = folder / "runs" / "run_002"
    damaged.mkdir()
    (damaged / "events.jsonl").write_text("not JSON\n")
    names = {run["name"]: run for run in ask(server, "/api/runs")[1]["runs"]}
    assert names["runs/run_002"]["state"] == "unreadable"
    status, body, _ = ask(server, f"/api/runs/{names['runs/run_002']['id']}")
    assert status == 500 and "cannot be read" in body
    (damaged / "events.jsonl").write_text('{"seq":0,"attempt":0,"kind":"run_start","timestamp":1.0,"data":{}}\n')
    assert ask(server, f"/api/runs/{names['runs/run_002']['id']}")[0] == 200, "a run that was repaired is read again"
    assert ask(server, f"/api/runs/{names['runs/run_001']['id']}")[0] == 200


def test_client_that_sends_nothing_does_not_block_others_or_the_end(server: ViewerServer) -> None:
    address = urlsplit(server.address)
    silent = [socket.create_connection((str(address.hostname), address.port or 0)) for _ in range(3)]
    assert ask(server, "/api/runs")[0] == 200
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 5, "the end waited for requests"
    for connection in silent:
        connection.close()


def number_of_run(server: ViewerServer) -> int:
    (run,) = ask(server, "/api/runs")[1]["runs"]
    return int(run["id"])


def test_run_gets_title_tags_and_notes_and_is_deleted(server: ViewerServer, folder: Path) -> None:
    address = f"/api/runs/{number_of_run(server)}"
    body = json.dumps({"title": "<b>best</b>", "tags": ["a", "b"], "notes": "n"}).encode()
    assert ask(server, address, method="POST", body=body)[:2] == (
        200,
        {"title": "<b>best</b>", "tags": ["a", "b"], "notes": "n"},
    )
    (row,) = ask(server, "/api/runs")[1]["runs"]
    assert (row["title"], row["tags"], row["notes"]) == ("<b>best</b>", ["a", "b"], "n")
    assert ask(server, address, method="DELETE")[0] == 200
    assert not (folder / "runs" / "run_001").exists() and ask(server, "/api/runs")[1]["ids"] == []
    assert ask(server, address, method="DELETE")[0] == 404


def test_live_run_is_not_deleted(server: ViewerServer, folder: Path) -> None:
    live = WrittenRun(folder / "runs" / "run_002")
    live.now = time.time()
    live.begin_attempt([21])
    live.write()
    number = next(run["id"] for run in ask(server, "/api/runs")[1]["runs"] if run["name"] == "runs/run_002")
    status, text, _ = ask(server, f"/api/runs/{number}", method="DELETE")
    assert status == 409 and "stop it first" in text and live.path.exists()


@pytest.mark.parametrize(
    "body", [None, b"", b"[]", b"{", b'{"title": 1}', b'{"tags": [1]}', b'{"tags": 1}', b'{"x": "y"}']
)
def test_wrong_annotations_are_refused(server: ViewerServer, body: bytes | None) -> None:
    assert ask(server, f"/api/runs/{number_of_run(server)}", method="POST", body=body)[0] == 400


def test_pages_of_other_sites_cannot_change_anything(server: ViewerServer, folder: Path) -> None:
    """A form or an image of another site cannot set a header, so a token in the address changes nothing."""
    number = number_of_run(server)
    for method in ("POST", "DELETE"):
        for path in (f"/api/runs/{number}", f"/api/runs/{number}?token={server.token}"):
            assert ask(server, path, None, method, b'{"title": "stolen"}')[0] == 403
    status, _, headers = ask(server, f"/api/runs/{number}", method="OPTIONS")
    assert status == 501 and not [name for name in headers if name.lower().startswith("access-control")]
    assert (folder / "runs" / "run_001").exists() and ask(server, "/api/runs")[1]["runs"][0]["title"] == ""


def test_page_that_other_machines_can_reach_changes_nothing(folder: Path) -> None:
    WrittenRun(folder / "runs" / "run_001").end()
    server = ViewerServer(Catalog(Storage.from_uri(folder / "runs")), is_editable=False)
    server.start()
    try:
        status, text, _ = ask(server, f"/api/runs/{number_of_run(server)}", method="DELETE")
        assert status == 409 and "other machines" in text and (folder / "runs" / "run_001").exists()
        assert "data-editable" not in ask(server, "/")[1].partition("<head>")[0]
    finally:
        server.close()


def test_images_of_a_run_are_sent_and_no_other_file(server: ViewerServer, folder: Path) -> None:
    name = "0123456789abcdef0123456789abcdef.png"
    media = folder / "runs" / "run_001" / "media"
    media.mkdir()
    (media / name).write_bytes(b"\x89PNG")
    (media / "notes.txt").write_text("secret")
    address = f"/api/runs/{number_of_run(server)}/media"
    status, _, headers = ask(server, f"{address}/{name}")
    assert status == 200 and headers["Content-Type"] == "image/png"
    for other in ("notes.txt", f"../run.json#{name}", f"x{name}", name.replace("0", "f")):
        assert ask(server, f"{address}/{other}")[0] == 404


def test_output_of_a_rank_is_sent_from_any_place(server: ViewerServer, folder: Path) -> None:
    log = folder / "worker.out"
    log.write_text("of an earlier run\nfirst\nsecond\nunfinished")
    run = WrittenRun(folder / "runs" / "run_002")
    run.event("worker_up", rank=0, node=f"{socket.gethostname()} (192.0.2.1)", node_id="n", pid=1, gpus=[])
    run.event("entered", rank=0, attempt=1, timestamp=run.now, output=[[str(log), 18], [str(folder / "gone.err"), 0]])
    run.event("sample", rank=0, output_bytes=[24, 0])
    run.write()
    number = next(run["id"] for run in ask(server, "/api/runs")[1]["runs"] if run["name"] == "runs/run_002")
    address = f"/api/runs/{number}/output"
    known = ask(server, address)[1]
    assert [(part["rank"], part["stream"], part["begin"], part["end"]) for part in known["parts"]] == [
        (0, "stderr", 0, None),
        (0, "stdout", 18, None),
    ]
    assert [sizes[1:] for sizes in known["sizes"]["0"]] == [[1, 18, 0], [1, 24, 0]]
    assert ask(server, f"{address}?part=1")[1] == {"lines": [[18, "first"], [24, "second"]], "end": 31, "problem": ""}
    assert ask(server, f"{address}?part=1&from=0")[1]["lines"][0] == [18, "first"], "not what an earlier run printed"
    assert ask(server, f"{address}?part=1&from=20&align")[1]["lines"] == [[24, "second"]]
    assert "is gone" in ask(server, f"{address}?part=0")[1]["problem"]
    assert ask(server, f"{address}?part=2")[0] == ask(server, f"{address}?part=x")[0] == 400

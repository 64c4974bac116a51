"""The server of the live page answers those who know its token, about runs in its list, and changes nothing."""

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
    server: ViewerServer, path: str, token: str | None = "", method: str = "GET"
) -> tuple[int, Any, dict[str, str]]:
    """Send a request; ``token``: ``""`` is the right one, None is none. Returns status, body and headers."""
    address = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    headers = {} if token is None else {TOKEN_HEADER: token or server.token}
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
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


@pytest.mark.parametrize("token", [None, "wrong", "x" * 10_000, "\u00e4"])
def test_request_without_the_token_gets_nothing(server: ViewerServer, token: str | None) -> None:
    for path in ("/", "/api/runs", "/api/runs/0", "/api/runs/0/ranks?metric=loss", "/nothing"):
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
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/api/runs", method=method)[0] == 501


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

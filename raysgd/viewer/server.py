"""Serves the live page and the data of runs over HTTP. Standard library only; one thread for each request that is answered.

A request needs the server's token, and names a run by its number in the list, never by a path. What changes something needs the
token in a header, which pages of other sites cannot send, and a server that only this machine can reach.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from raysgd._util.logs import get_logger
from raysgd._util.media import FOLDER
from raysgd.errors import CheckpointNotFoundError, RaySGDError, UsageError
from raysgd.runs.annotations import annotate
from raysgd.runs.deleting import delete_run
from raysgd.runs.output import GoneError, OutputTimes, ReadPart, read_here, read_lines
from raysgd.viewer.catalog import Catalog, RunTable
from raysgd.viewer.page import content_security_policy, live_page

TOKEN_HEADER = "X-Raysgd-Token"
#: Threads; browsers hold connections open, ahead of requests, and each of them takes one.
_MAX_CONNECTIONS = 32
#: Seconds until the end of the server is noticed.
_POLL_S = 0.1
#: Seconds that a client may take to send its request.
_TIMEOUT_S = 10.0
_RUN = re.compile(r"/api/runs/([0-9]{1,9})")
_RANKS = re.compile(r"/api/runs/([0-9]{1,9})/ranks")
_TIME = re.compile(r"/api/runs/([0-9]{1,9})/time")
_ANY_RUN = re.compile(r"/api/runs/([0-9]{1,9})(?:/|$)")
_IMAGE = re.compile(r"/api/runs/([0-9]{1,9})/media/([0-9a-f]{32}\.png)")
_OUTPUT = re.compile(r"/api/runs/([0-9]{1,9})/output")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
#: Bytes of a request's body.
_MAX_BODY_BYTES = 1 << 20
_MAX_IMAGE_BYTES = 64 << 20


class ViewerServer:
    """The server of ``raysgd ui``. It answers from `start` until `close`, in threads of its own.

    Args:
        catalog: The runs to show.
        host: The address to listen at. Other addresses than the loopback let other machines connect.
        port: 0: any free one.
        read_output: Reads what workers printed.
        is_editable: The page can delete and annotate runs.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(
        self,
        catalog: Catalog,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        read_output: ReadPart = read_here,
        is_editable: bool = True,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self._server = _Server((host, port), catalog, self.token, read_output, is_editable=is_editable)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="raysgd-ui", daemon=True
        )

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/?token={quote(self.token)}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop to listen, and wait for the requests that are being answered."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """A server whose requests are answered by a few threads. `http.server.HTTPServer` would look up the name of the host."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        catalog: Catalog,
        token: str,
        read_output: ReadPart,
        *,
        is_editable: bool,
    ) -> None:
        self.catalog = catalog
        self.table = RunTable(catalog)
        self.read_output = read_output
        self.token = token
        self.is_editable = is_editable
        self._connections: set[socket.socket] = set()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="raysgd-ui-request")
        super().__init__(address, _Handler)  # closes itself if the address cannot be used

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        self._pool.submit(self._answer, request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RD)  # no request is awaited any more
        self._pool.shutdown(wait=True, cancel_futures=True)
        for connection in list(self._connections):  # those whose turn never came
            self.shutdown_request(connection)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:  # the client has closed its connection, or sent nothing in time
            pass
        except Exception:
            get_logger().exception("a request to raysgd ui failed")
        finally:
            self._connections.discard(request)
            self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    """Answers requests."""

    server: _Server
    timeout = _TIMEOUT_S
    server_version = "raysgd"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(self._show)

    def do_POST(self) -> None:
        self._answer(self._change)

    def do_DELETE(self) -> None:
        self._answer(self._change)

    def _answer(self, route: Callable[[str, dict[str, list[str]]], None]) -> None:
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, keep_blank_values=True)
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"This is not an address: {error}\n")
            return
        by_address = query.get("token", [""])[0] if self.command == "GET" else ""
        given = self.headers.get(TOKEN_HEADER) or by_address
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode()):
            self._send(
                HTTPStatus.FORBIDDEN,
                "text/plain",
                "The token is missing or wrong: open the address that `raysgd ui` printed.\n",
            )
            return
        try:
            route(address.path, query)
        except _BadRequest as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"{error}\n")
        except CheckpointNotFoundError as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"{error}\n")
        except UsageError as error:
            self._send(HTTPStatus.CONFLICT, "text/plain", f"{error}\n")
        except (RaySGDError, ValueError, LookupError, TypeError) as error:  # such as damaged files
            get_logger().debug("a run cannot be read", exc_info=True)
            if match := _ANY_RUN.match(address.path):
                self.server.catalog.close_run(int(match[1]))  # the next request reads it from the beginning
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"The run cannot be read: {error}\n")

    def _show(self, path: str, query: dict[str, list[str]]) -> None:
        catalog = self.server.catalog
        folder = catalog.folder.path_of("")
        if path == "/":
            page = live_page(folder, self.server.token, is_editable=self.server.is_editable)
            self._send(HTTPStatus.OK, "text/html", page)
        elif path == "/api/runs":
            after, with_ranges = _number(query, "after", -1), "ranges" in query
            self._send_json({"folder": folder, **self.server.table.read(after, with_ranges=with_ranges)})
        elif match := _RUN.fullmatch(path):
            self._send_json(catalog.open_run(int(match[1])).read(_number(query, "after", -1)))
        elif match := _RANKS.fullmatch(path):
            self._send_json(catalog.open_run(int(match[1])).rank_curves(query.get("metric", [""])[0]))
        elif match := _TIME.fullmatch(path):
            self._send_json(catalog.open_run(int(match[1])).time_used())
        elif match := _IMAGE.fullmatch(path):
            image = catalog.folder_of(int(match[1])).child(FOLDER).read_bytes(match[2], _MAX_IMAGE_BYTES)
            self._send(HTTPStatus.OK, "image/png", image)
        elif match := _OUTPUT.fullmatch(path):
            self._show_output(catalog.open_run(int(match[1])).output(), query)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing at this address.\n")

    def _show_output(self, output: OutputTimes, query: dict[str, list[str]]) -> None:
        """Send which parts there are; with ``part`` the lines of one, from the place ``from`` on."""
        parts = output.parts()
        if "part" not in query:
            shown = ("attempt", "rank", "stream", "node", "begin", "end")
            listed = [{name: getattr(part, name) for name in shown} for part in parts]
            self._send_json({"parts": listed, "sizes": output.sizes})
            return
        place = _number(query, "part", 0)
        if not 0 <= place < len(parts):
            raise _BadRequest(f"part={place} is not allowed: the output has {len(parts)} parts.")
        part = parts[place]
        begin = max(part.begin, _number(query, "from", part.begin))
        try:
            lines, end = read_lines(
                self.server.read_output, part, begin, aligns="align" in query and begin > part.begin
            )
        except GoneError as error:
            self._send_json({"lines": [], "end": begin, "problem": str(error)})
            return
        self._send_json({"lines": lines, "end": end, "problem": ""})

    def _change(self, path: str, query: dict[str, list[str]]) -> None:
        match = _RUN.fullmatch(path)
        if match is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing at this address.\n")
            return
        if not self.server.is_editable:
            raise UsageError("this page changes nothing, because other machines can reach it.")
        run = self.server.catalog.folder_of(int(match[1]))
        if self.command == "DELETE":
            delete_run(run)
            self._send_json({})
            return
        length = self.headers.get("Content-Length", "")
        if not _NUMBER.fullmatch(length) or not 0 <= int(length) <= _MAX_BODY_BYTES:
            raise _BadRequest("the body of the request is missing or too long.")
        self._send_json(vars(annotate(run, **_annotations(self.rfile.read(int(length))))))

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, "application/json", json.dumps(value, allow_nan=False))

    def _send(self, status: HTTPStatus, kind: str, content: str | bytes) -> None:
        data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind if isinstance(content, bytes) else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        policy = content_security_policy(is_live=True)
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses have the token."""


class _BadRequest(Exception):
    """A request that asks for something that cannot be."""


def _number(query: dict[str, list[str]], name: str, default: int) -> int:
    text = query.get(name, [str(default)])[0]
    if not _NUMBER.fullmatch(text):
        raise _BadRequest(f"{name}={text!r:.50} is not a whole number.")
    return int(text)


def _annotations(body: bytes) -> dict[str, Any]:
    """Return the arguments of `annotate` that a request gives."""
    try:
        given = json.loads(body)
        texts = [*(given[name] for name in ("title", "notes") if name in given), *given.get("tags", [])]
    except (ValueError, TypeError, AttributeError):
        raise _BadRequest("the body of the request is not a JSON object.") from None
    if not given.keys() <= {"title", "tags", "notes"} or not all(isinstance(text, str) for text in texts):
        raise _BadRequest("the body of the request has title, tags and notes, which are texts.")
    return dict(given)

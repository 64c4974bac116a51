"""Serves the live page and the data of runs over HTTP. Standard library only; one thread for each request that is answered.

A request needs the server's token, and names a run by its number in the list, never by a path. Nothing can be changed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from raysgd._util.logs import get_logger
from raysgd.errors import CheckpointNotFoundError, RaySGDError
from raysgd.viewer.catalog import Catalog
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
_ANY_RUN = re.compile(r"/api/runs/([0-9]{1,9})(?:/|$)")
_NUMBER = re.compile(r"-?[0-9]{1,18}")


class ViewerServer:
    """The server of ``raysgd ui``. It answers from `start` until `close`, in threads of its own.

    Args:
        catalog: The runs to show.
        host: The address to listen at. Other addresses than the loopback let other machines connect.
        port: 0: any free one.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, catalog: Catalog, host: str = "127.0.0.1", port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._server = _Server((host, port), catalog, self.token)
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

    def __init__(self, address: tuple[str, int], catalog: Catalog, token: str) -> None:
        self.catalog = catalog
        self.token = token
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
    """Answers GET requests."""

    server: _Server
    timeout = _TIMEOUT_S
    server_version = "raysgd"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, keep_blank_values=True)
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"This is not an address: {error}\n")
            return
        given = self.headers.get(TOKEN_HEADER) or query.get("token", [""])[0]
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode()):
            self._send(
                HTTPStatus.FORBIDDEN,
                "text/plain",
                "The token is missing or wrong: open the address that `raysgd ui` printed.\n",
            )
            return
        try:
            self._route(address.path, query)
        except CheckpointNotFoundError as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"{error}\n")
        except (RaySGDError, ValueError, LookupError, TypeError) as error:  # such as damaged files
            get_logger().debug("a run cannot be read", exc_info=True)
            if match := _ANY_RUN.match(address.path):
                self.server.catalog.close_run(int(match[1]))  # the next request reads it from the beginning
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"The run cannot be read: {error}\n")

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        catalog = self.server.catalog
        folder = catalog.folder.path_of("")
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", live_page(folder, self.server.token))
        elif path == "/api/runs":
            self._send_json({"folder": folder, "runs": catalog.list_runs()})
        elif match := _RUN.fullmatch(path):
            after = query.get("after", ["-1"])[0]
            if not _NUMBER.fullmatch(after):
                self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"after={after!r:.50} is not a whole number.\n")
                return
            self._send_json(catalog.open_run(int(match[1])).read(int(after)))
        elif match := _RANKS.fullmatch(path):
            self._send_json(catalog.open_run(int(match[1])).rank_curves(query.get("metric", [""])[0]))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing at this address.\n")

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, "application/json", json.dumps(value, allow_nan=False))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
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

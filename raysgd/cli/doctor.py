"""``raysgd doctor``: find what is wrong with this machine and with the cluster, and what to do about it. Driver side."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from raysgd._util.text import in_bytes
from raysgd.cli import cluster
from raysgd.cli.console import FAILED, SUCCEEDED, address_flag, json_flag, print_json, print_table, storage_flag
from raysgd.errors import ConfigError, RaySGDError

OK, WARNING, WRONG = "ok", "warning", "wrong"
_PACKAGES = ("raysgd", "ray", "torch", "pyarrow", "numpy")
#: The oldest version of Ray, as in setup.py.
_OLDEST_RAY = (2, 60)
#: Bytes that must be free on the disk of runs and of Ray's files.
_MIN_FREE_BYTES = 2 << 30
#: Below this, Ray puts its objects into files in /tmp, which is slow.
_MIN_SHM_BYTES = 1 << 30
_MIN_OPEN_FILES = 4096
#: Clocks that differ by more make times in the files of a run misleading.
_MAX_CLOCK_S = 1.0
#: Packages that a cluster's processes may have imported before they get work: Ray's setting ``preload_python_modules``.
_PRELOADED = ("torch", "tensorflow", "jax")
_NODE_TIMEOUT_S = 60.0
_WRITES_S = 1.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: What was checked.
        state: ``"ok"``, ``"warning"`` or ``"wrong"``.
        what: What was found.
        advice: What to do; empty if nothing is.
    """

    check: str
    state: str
    what: str
    advice: str = ""


# -- this machine ------------------------------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """Check the versions of Python and of the packages that a run needs."""
    found = installed_versions()
    yield Finding("versions", OK, ", ".join(f"{name} {version}" for name, version in found.items()))
    ray = tuple(int(part) for part in found.get("ray", "0.0").split(".")[:2] if part.isdigit())
    if ray < _OLDEST_RAY:
        oldest = ".".join(map(str, _OLDEST_RAY))
        yield Finding("versions", WRONG, f"Ray is {found.get('ray', 'missing')}", f"install ray>={oldest}")
    if "torch" not in found:
        advice = "install raysgd[torch], or give another backend"
        yield Finding("versions", WARNING, "torch, the default backend's package, is missing", advice)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_loopback() -> Finding:
    """Check that processes of this machine can reach each other, by the loopback and by the machine's own name."""
    for host in ("127.0.0.1", socket.gethostname()):
        try:
            with Listener(host) as listener:
                error = try_port(host, listener.port)
        except OSError as problem:
            error = str(problem)
        if error is not None:
            advice = "let the firewall pass local connections, and give the machine's name in /etc/hosts its address"
            return Finding("ports", WRONG, f"a port of {host} cannot be reached from this machine: {error}", advice)
    return Finding("ports", OK, f"127.0.0.1 and {socket.gethostname()} can be reached")


class Listener:
    """Accepts connections at a free port until the end of the block."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="raysgd-doctor", daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:  # closed
                return


def try_port(host: str, port: int) -> str | None:
    """Connect to a port; return what is wrong, or None."""
    try:
        socket.create_connection((host, port), 3.0).close()
    except OSError as error:
        return str(error)
    return None


def check_storage(storage_path: str) -> Iterator[Finding]:
    """Check that runs can write to their folder, that what they write stays, and that there is room."""
    from raysgd.checkpoint.storage.storage import Retry, Storage

    name, data = f".raysgd-doctor-{uuid.uuid4().hex[:8]}", os.urandom(1 << 20)
    try:
        storage = Storage.from_uri(storage_path, retry=Retry(tries=1))
        place = storage.path_of("")
        storage.make_dirs()
        begin = time.monotonic()
        storage.write_bytes(name, data)
        took_s = time.monotonic() - begin
        is_same = storage.read_bytes(name) == data
        storage.delete_file(name)
    except (RaySGDError, OSError) as error:
        advice = "give --storage-path a folder or URI that you can write to"
        yield Finding("storage", WRONG, f"{storage_path} cannot be written: {error}", advice)
        return
    if not is_same:
        yield Finding("storage", WRONG, f"{place} returns other bytes than were written", "use another storage")
        return
    yield Finding("storage", OK, f"{place} can be written; 1 MiB was durable after {took_s:.3f} s")
    if took_s > _WRITES_S:
        advice = "save less often, or use faster storage: `CheckpointConfig(storage_interval=...)`"
        yield Finding("storage", WARNING, f"{place} took {took_s:.1f} s for 1 MiB", advice)
    if storage.is_local:
        yield from _check_disk(storage.uri)


def _check_disk(path: str) -> Iterator[Finding]:
    kind = file_system(path)
    if kind in ("tmpfs", "ramfs"):
        advice = "give --storage-path a folder on a disk"
        yield Finding("storage", WARNING, f"{path} is in memory ({kind}): it is lost with the machine", advice)
    free = shutil.disk_usage(path).free
    if free < _MIN_FREE_BYTES:
        yield Finding("storage", WRONG, f"{path} has {in_bytes(free)} free", "delete old runs, or use another disk")


def file_system(path: str) -> str:
    """Return the type of the file system that holds a path, such as ``ext4``; empty if it is not known."""
    try:
        with open("/proc/mounts", encoding="utf-8") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    real = os.path.realpath(path)
    holding = [(folder, kind) for folder, kind in mounts if f"{real}/".startswith(f"{folder.rstrip('/')}/")]
    return max(holding, key=lambda mount: len(mount[0]), default=("", ""))[1]


def check_limits() -> Iterator[Finding]:
    """Check the shared memory, which holds Ray's objects, and the number of files that may be open."""
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        advice = "docker run --shm-size 8g; in Kubernetes, mount an emptyDir with medium: Memory at /dev/shm"
        if size < _MIN_SHM_BYTES:
            yield Finding("shared memory", WRONG, f"/dev/shm has {in_bytes(size)}", advice)
        else:
            yield Finding("shared memory", OK, f"/dev/shm has {in_bytes(size)}")
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_OPEN_FILES:
        advice = f"run `ulimit -n {_MIN_OPEN_FILES if hard < 0 else min(hard, 65536)}` before Ray starts"
        yield Finding("open files", WARNING, f"a process may open {soft} files", advice)
    else:
        yield Finding("open files", OK, f"a process may open {soft if soft >= 0 else 'any number of'} files")


def check_gpus() -> Iterator[Finding]:
    """Check that torch can use the GPUs that this machine has."""
    names = list_gpus()
    visible = _visible_to_torch()
    if visible is None:
        yield Finding("GPUs", OK if not names else WARNING, f"{len(names)} found; torch is not installed")
    elif len(names) > visible:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={given}" if given is not None else "torch has no CUDA, or its driver is too old"
        advice = "unset CUDA_VISIBLE_DEVICES, or install torch for CUDA: https://pytorch.org/get-started"
        yield Finding("GPUs", WARNING, f"the machine has {len(names)} GPUs, and torch sees {visible}: {why}", advice)
    else:
        yield Finding("GPUs", OK, f"{visible}: {', '.join(names)}" if names else "none")


def list_gpus() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs."""
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        words = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def _visible_to_torch() -> int | None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return int(torch.cuda.device_count())


# -- the cluster -------------------------------------------------------------------------------------------------------


def examine_node(folder: str, token: str, address: tuple[str, int]) -> dict[str, Any]:
    """Return what a node finds; runs in a task on that node.

    Args:
        folder: The storage path.
        token: A name in it that the command has made.
        address: A port of the command's machine.
    """
    preloaded = [name for name in _PRELOADED if name in sys.modules]
    from raysgd.checkpoint.storage.storage import Storage

    try:
        sees_file = Storage.from_uri(folder).exists(token)
    except RaySGDError:
        sees_file = False
    return {
        "time": time.time(),
        "hostname": socket.gethostname(),
        "versions": installed_versions(),
        "limits": list(check_limits()),
        "gpus": len(list_gpus()),
        "sees_file": sees_file,
        "port": try_port(*address),
        "preloaded": preloaded,
    }


def check_cluster(address: str | None, storage_path: str) -> Iterator[Finding]:
    """Check the running cluster and each of its nodes."""
    try:
        found = cluster.connect(address)
    except ConfigError as error:
        yield Finding("cluster", WRONG, str(error), "see the log of `ray start` on the head node")
        return
    if found is None:
        yield Finding("cluster", OK, "none runs here; `raysgd run` starts one of its own")
        return
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    cpus = ray.cluster_resources().get("CPU", 0)
    yield Finding("cluster", OK, f"{found} has {len(nodes)} node{'s' * (len(nodes) > 1)} and {cpus:g} CPUs")
    yield from _check_nodes(nodes, storage_path)


def _check_nodes(nodes: Sequence[dict[str, Any]], storage_path: str) -> Iterator[Finding]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from raysgd.checkpoint.storage.storage import Storage

    token = f".raysgd-doctor-{uuid.uuid4().hex[:8]}"
    storage = Storage.from_uri(storage_path)
    storage.write_bytes(token, b"")
    here = ray.util.get_node_ip_address()
    task = ray.remote(num_cpus=0, max_retries=0)(examine_node)
    try:
        with Listener(here) as listener:
            for node in nodes:
                name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                pinned = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
                try:
                    ray.get(pinned.remote(storage.uri, token, (here, listener.port)), timeout=_NODE_TIMEOUT_S)
                    sent = time.time()  # now the node's process runs, so that the answer is quick
                    answer = ray.get(pinned.remote(storage.uri, token, (here, listener.port)), timeout=_NODE_TIMEOUT_S)
                except RayError as error:
                    advice = "see the node's raylet.out; raysgd must be installed on every node"
                    yield Finding(name, WRONG, f"it runs no task: {type(error).__name__}: {error}", advice)
                    continue
                expected_gpus = int(node["Resources"].get("GPU", 0))
                findings = list(judge_node(answer, (sent, time.time()), storage.path_of(""), expected_gpus))
                yield from (Finding(name, each.state, each.what, each.advice) for each in findings)
                if not findings:
                    yield Finding(name, OK, "versions, clock, ports, shared folder and limits are right")
                yield describe_preloading(name, answer["preloaded"])
    finally:
        storage.delete_file(token)


def describe_preloading(node: str, preloaded: Sequence[str]) -> Finding:
    """Return what the processes of a node have imported before they get work; nothing is not wrong, but runs start later."""
    if preloaded:
        return Finding(node, OK, f"its processes import {', '.join(preloaded)} before they get work")
    advice = "for torch runs that start sooner: RAY_preload_python_modules=torch in the environment of `ray start`"
    return Finding(node, OK, "its processes import a framework when they get work", advice)


def judge_node(
    answer: dict[str, Any], asked_s: tuple[float, float], storage_path: str, expected_gpus: int
) -> Iterator[Finding]:
    """Yield what is wrong with a node.

    Args:
        answer: What `examine_node` returned there.
        asked_s: When it was asked and when it answered, by the clock of this machine.
        storage_path: The storage path.
        expected_gpus: The GPUs that Ray has on the node.
    """
    own = installed_versions()
    for package in sorted({*own, *answer["versions"]}):
        here, there = own.get(package), answer["versions"].get(package)
        if here != there:
            state = WRONG if package in ("python", "ray", "raysgd") and here and there else WARNING
            yield Finding(
                "",
                state,
                f"{package} is {there or 'missing'} there and {here or 'missing'} here",
                f"install the same {package} on all nodes",
            )
    begin, end = asked_s
    off_s = max(begin - answer["time"], answer["time"] - end, 0.0)
    if off_s > _MAX_CLOCK_S:
        yield Finding("", WARNING, f"its clock differs by {off_s:.1f} s", "run chrony or ntpd on all nodes")
    if answer["port"] is not None:
        advice = "let the firewall pass all ports between nodes: workers connect to ports that they choose"
        yield Finding("", WRONG, f"it cannot reach a port of this machine: {answer['port']}", advice)
    if not answer["sees_file"]:
        advice = "give --storage-path a folder that all nodes mount, or a URI such as s3://bucket/runs"
        yield Finding("", WRONG, f"it does not see the files in {storage_path}", advice)
    if answer["gpus"] < expected_gpus:
        yield Finding(
            "",
            WRONG,
            f"Ray counts {expected_gpus} GPUs, and nvidia-smi {answer['gpus']}",
            "start Ray again on the node, without --num-gpus",
        )
    yield from (finding for finding in answer["limits"] if finding.state != OK)  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------------


@click.command("doctor")
@storage_flag
@address_flag
@json_flag
def command(storage_path: str, address: str | None, as_json: bool) -> int:
    """Check this machine, and a running cluster with all its nodes: what is wrong, and what to do.

    Checked are versions, ports, the storage path, shared memory, limits and GPUs; and on each node of a running cluster its
    versions, clock, ports, and whether it sees the storage path. Exit status 1 if something is wrong; warnings are not.
    """
    checks: list[Callable[[], Iterator[Finding] | Finding]] = [
        check_versions,
        check_loopback,
        lambda: check_storage(storage_path),
        check_limits,
        check_gpus,
        lambda: check_cluster(address, storage_path),
    ]
    findings: list[Finding] = []
    for check in checks:
        found = check()
        findings += [found] if isinstance(found, Finding) else list(found)
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        print_table(("check", "", "found", "what to do"), [(f.check, f.state, f.what, f.advice) for f in findings])
    return FAILED if any(finding.state == WRONG for finding in findings) else SUCCEEDED

"""The checks of one machine, made here or, by `raysgd.cli.doctor.probe`, on each node of a cluster."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from raysgd._util.text import in_bytes

OK, WARNING, WRONG = "ok", "warning", "wrong"
_PACKAGES = ("raysgd", "ray", "torch", "pyarrow", "numpy")
#: The oldest version of Ray, as in setup.py.
_OLDEST_RAY = (2, 60)
#: Bytes that must be free on the disk of runs and of Ray's files.
_MIN_FREE_BYTES = 2 << 30
#: Below this, Ray puts its objects into files in /tmp, which is slow.
_MIN_SHM_BYTES = 1 << 30
_MIN_OPEN_FILES = 4096
#: Processes and threads of a user: each process of Ray has some 30 threads, and a framework adds some for each core.
_MIN_PROCESSES = 4096
#: Time for a connection to be accepted, and for the program that lists GPUs.
_CONNECT_S = 3.0
_LIST_GPUS_S = 4.0
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


def check_machine(storage_path: str) -> Iterator[Finding]:
    """Make all checks of this machine."""
    yield from check_versions()
    yield check_loopback()
    yield from check_storage(storage_path)
    yield from check_limits()
    yield check_gpus()


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
            with socket.create_server((host, 0)) as listener:
                error = try_port(*listener.getsockname()[:2])
        except OSError as problem:
            error = str(problem)
        if error is not None:
            advice = "let the firewall pass local connections, and give the machine's name in /etc/hosts its address"
            return Finding("ports", WRONG, f"a port of {host} cannot be reached from this machine: {error}", advice)
    return Finding("ports", OK, f"127.0.0.1 and {socket.gethostname()} can be reached")


def try_port(host: str, port: int, timeout_s: float = _CONNECT_S) -> str | None:
    """Connect to a port; return what is wrong, or None."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return str(error)
    return None


def check_storage(storage_path: str) -> Iterator[Finding]:
    """Check that runs can write to their folder, that what they write stays, and that there is room."""
    try:
        from raysgd.checkpoint.storage.storage import Retry, Storage
        from raysgd.errors import RaySGDError
    except ImportError as error:  # on a node
        yield Finding("storage", WRONG, f"it was not tried: {error}", "install the same raysgd on all nodes")
        return
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
    """Check the shared memory, which holds Ray's objects, and the limits of a process."""
    if os.path.isdir("/dev/shm"):
        disk = shutil.disk_usage("/dev/shm")
        what = f"/dev/shm has {in_bytes(disk.total)}, {in_bytes(disk.free)} free"
        if disk.total < _MIN_SHM_BYTES:
            advice = "docker run --shm-size 8g; in Kubernetes, mount an emptyDir with medium: Memory at /dev/shm"
            yield Finding("shared memory", WRONG, what, advice)
        elif disk.free < _MIN_SHM_BYTES // 4:
            advice = "remove what programs that have ended left there: `ls -l /dev/shm`"
            yield Finding("shared memory", WARNING, what, advice)
        else:
            yield Finding("shared memory", OK, what)
    try:
        import resource
    except ImportError:  # not a Unix
        return
    for check, limit, least, flag in (
        ("open files", resource.RLIMIT_NOFILE, _MIN_OPEN_FILES, "-n"),
        ("processes", resource.RLIMIT_NPROC, _MIN_PROCESSES, "-u"),
    ):
        soft, hard = resource.getrlimit(limit)
        what = f"the limit of {check} is {soft}" if soft >= 0 else f"{check} are not limited"
        if 0 <= soft < least:
            advice = f"run `ulimit {flag} {least if hard < 0 else min(hard, 65536)}` before Ray starts"
            yield Finding(check, WARNING, what, advice)
        else:
            yield Finding(check, OK, what)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    what = f"{in_bytes(soft)} of memory may be locked" if soft >= 0 else "locked memory is not limited"
    if soft >= 0 and os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        yield Finding(
            "locked memory", WARNING, what, "for NCCL over InfiniBand, `ulimit -l unlimited` before Ray starts"
        )
    else:
        yield Finding("locked memory", OK, what)


def check_gpus() -> Finding:
    """Check that torch can use the GPUs that this machine has."""
    if not (names := list_gpus()):  # nor is torch imported, which takes seconds
        return Finding("GPUs", OK, "no GPU")
    if (visible := _visible_to_torch()) is None:
        return Finding("GPUs", WARNING, f"{len(names)} GPUs; torch is not installed", "install raysgd[torch]")
    if len(names) > visible:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={given}" if given is not None else "torch has no CUDA, or its driver is too old"
        advice = "unset CUDA_VISIBLE_DEVICES, or install torch for CUDA: https://pytorch.org/get-started"
        return Finding("GPUs", WARNING, f"the machine has {len(names)} GPUs, and torch sees {visible}: {why}", advice)
    return Finding("GPUs", OK, f"{visible} GPUs: {', '.join(names)}")


def list_gpus() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs."""
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        words = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIST_GPUS_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def _visible_to_torch() -> int | None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return int(torch.cuda.device_count())

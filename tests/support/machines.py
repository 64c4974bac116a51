"""Several machines on one: namespaces for network, mounts, processes, IPC and host name, joined by a bridge.

Each machine has its own address, ``/tmp``, ``/dev/shm``, home and host name. The disk is shared. A cable can be pulled: packets
are dropped, and no connection closes. All traffic stays in the namespaces. This needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from support.leftovers import MARK
from support.poll import until
from support.project import ROOT

_NETWORK = "10.99.7"
_BOOT_S = 20.0
_START_S = 90.0
#: The init process of a machine: it sets the machine up and then sleeps. Arguments: host name, private folder, folders to keep.
_INIT = """
set -e
hostname "$1"; private="$2"; shift 2
mount --make-rprivate /
mount --bind "$private/hosts" /etc/hosts
mount -t tmpfs -o size=1g none /dev/shm
for kept in "$@"; do mkdir -p "$private${kept#/tmp}"; mount --bind "$kept" "$private${kept#/tmp}"; done
mount --rbind "$private" /tmp
touch /tmp/ready
exec sleep infinity
"""


@functools.cache
def why_impossible() -> str | None:
    """Return why this process cannot make machines, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"it needs {', '.join(missing)} (iproute2, util-linux)"
    name = f"raysgd-probe-{os.getpid()}"
    tried = _call("ip", "netns", "add", name, check=False)
    _call("ip", "netns", "del", name, check=False)
    return f"no network namespace can be made here: {tried.stderr.strip()}" if tried.returncode else None


class Machines:
    """Machines 0 to ``count`` - 1, each with some logical CPUs for Ray; the first one is the cluster's head.

    Args:
        folder: A folder for the machines' private files, which is not below /tmp on the machines.
        count: The number of machines.
        num_cpus: The CPUs of each.

    Attributes:
        folder: As above; all machines see it.
    """

    def __init__(self, folder: Path, count: int, num_cpus: int = 2) -> None:
        self.folder = folder
        self._count = count
        self._num_cpus = num_cpus
        self._prefix = f"rs{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self._inits: dict[int, int] = {}
        self._parents: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._nodes: set[int] = set()

    def __enter__(self) -> Machines:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "br0", "up")
        for machine in range(self._count):
            self._connect(machine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        for process in self._started:
            process.kill()
            process.wait()
        for name in (self._switch, *[self._name(machine) for machine in range(self._count)]):
            _call("ip", "netns", "del", name, check=False)

    def boot(self, machine: int) -> None:
        """Start a machine, with an empty ``/tmp``."""
        private = self.folder / f"machine-{machine}"
        shutil.rmtree(private, ignore_errors=True)
        (private / "home").mkdir(parents=True)
        private.chmod(0o1777)
        names = [f"{self.address(each)} machine-{each}" for each in range(self._count)]
        (private / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        kept = [str(path) for path in (ROOT, self.folder, Path(sys.prefix)) if path.is_relative_to("/tmp")]
        namespaces = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
        init = ["bash", "-c", _INIT, "init", f"machine-{machine}", str(private), *kept]
        command = ["ip", "netns", "exec", self._name(machine), *namespaces, *init]
        self._parents[machine] = parent = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        assert until((private / "ready").exists, _BOOT_S), f"machine {machine} did not start"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        self._inits[machine] = int(children[0])

    def kill(self, machine: int) -> None:
        """Kill all processes of a machine at once."""
        self._nodes.discard(machine)
        os.kill(self._inits.pop(machine), signal.SIGKILL)
        self._parents.pop(machine).wait()

    def kill_all(self) -> None:
        """Kill all processes of all machines."""
        for machine in list(self._inits):
            self.kill(machine)

    def start_ray(self, *machines: int, environment: Mapping[str, str] | None = None) -> None:
        """Make the machines nodes of the cluster, the head first; without arguments, all of them."""
        wanted = list(machines or range(self._count))
        for together in ([0] if 0 in wanted else [], [machine for machine in wanted if machine != 0]):
            missing = {machine: self._start_node(machine, environment or {}) for machine in together}
            for is_last in (False, True):  # on a busy machine, Ray may not wait long enough for its own processes
                outputs = {machine: process.communicate(timeout=_START_S)[0] for machine, process in missing.items()}
                failed = [machine for machine, process in missing.items() if process.returncode != 0]
                assert not (failed and is_last), outputs[failed[0]]
                for machine in failed:
                    self.run(machine, "ray", "stop", "--force", timeout_s=_START_S)
                missing = {machine: self._start_node(machine, environment or {}) for machine in failed}
            self._nodes.update(together)

    def start_pod(self, machine: int, output: Path, environment: Mapping[str, str] | None = None) -> None:
        """Make a machine a node by ``ray start --block``, as a pod does; return when the command says that it is one."""
        command = [*self.ray_command(machine), "--block"]
        self.start(machine, *command, output=output, environment=environment)
        assert until(lambda: b"Ray runtime started" in output.read_bytes(), _START_S, 0.2), output.read_text()
        self._nodes.add(machine)

    def make_whole(self) -> None:
        """Plug all cables in, and start the machines again that are not nodes; without the head, all of them."""
        for machine in range(self._count):
            self.plug(machine, is_in=True)
        # Ray ends the raylet of a node that it counted as lost during a cut.
        self._nodes = {machine for machine in self._nodes if self.run(machine, "pgrep", "-f", "/raylet/raylet ")}
        if 0 not in self._nodes:
            self._nodes.clear()
        missing = [machine for machine in range(self._count) if machine not in self._nodes]
        for machine in missing:
            if machine in self._inits:
                self.kill(machine)
            self.boot(machine)
        if missing:
            self.start_ray(*missing)

    def ray_command(self, machine: int) -> list[str]:
        """Return the command that makes a machine a node of the cluster."""
        where = ["--head", "--port=6379", "--include-dashboard=false"]
        if machine != 0:
            where = [f"--address={self.address(0)}:6379"]
        common = [f"--node-ip-address={self.address(machine)}", f"--num-cpus={self._num_cpus}"]
        return ["ray", "start", *where, *common, "--object-store-memory=150000000", "--disable-usage-stats"]

    def _start_node(self, machine: int, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [*self._enter(machine, environment), *self.ray_command(machine)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def plug(self, machine: int, *, is_in: bool) -> None:
        """Plug a machine's cable in, or pull it."""
        _call("ip", "-n", self._switch, "link", "set", f"v{machine}", "up" if is_in else "down")

    @contextlib.contextmanager
    def slow_cable(self, machine: int, megabits: int) -> Iterator[None]:
        """Let a machine's cable pass so many Mbit/s in each direction."""
        ends = [(self._switch, f"v{machine}"), (self._name(machine), "eth0")]
        for namespace, device in ends:
            limit = ["tbf", "rate", f"{megabits}mbit", "burst", "128kb", "latency", "50ms"]
            _call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)
        try:
            yield
        finally:
            for namespace, device in ends:
                _call("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def signal(self, machine: int, name: str, number: signal.Signals) -> None:
        """Send a signal to the processes of a machine whose command lines contain a name."""
        self.run(machine, "pkill", f"-{number.value}", "-f", name)

    def run(self, machine: int, *command: str, timeout_s: float = 30.0) -> str:
        """Run a command on a machine; return what it wrote."""
        done = subprocess.run(
            [*self._enter(machine), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
        )
        return done.stdout

    def start(
        self, machine: int, *command: str, output: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on a machine, which writes to a file."""
        entered = [*self._enter(machine, environment or {}), *command]
        with output.open("wb") as file:
            started = subprocess.Popen(entered, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self._started.append(started)
        return started

    @contextlib.contextmanager
    def small_disk(self, here: Path, size_mb: int, there: Mapping[int, str]) -> Iterator[Path]:
        """Give machines one small disk; yield its folder here.

        Args:
            there: The folder of the disk on each machine.
        """
        image = self.folder / f"{here.name}.image"
        with image.open("wb") as file:
            file.truncate(size_mb << 20)
        _call("mkfs.ext4", "-q", "-m", "0", str(image))
        here.mkdir(exist_ok=True)
        _call("mount", "-o", "loop", str(image), str(here))
        try:
            device = _call("findmnt", "-no", "SOURCE", str(here)).stdout.strip()
            for machine, folder in there.items():
                made = self.run(
                    machine, "sh", "-c", f"mkdir -p {folder} && mount {device} {folder} && chmod 1777 {folder}"
                )
                assert not made, made
            yield here
        finally:
            for machine, folder in there.items():
                if machine in self._inits:
                    self.run(machine, "umount", "-l", folder)
            _call("umount", "-l", str(here), check=False)
            image.unlink()

    def _enter(self, machine: int, more: Mapping[str, str] = MappingProxyType({})) -> Sequence[str]:
        environment = {
            "PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",  # what else this machine does shall not slow workers more than the controller
            "PYTHONUNBUFFERED": "1",
            MARK: os.environ.get(MARK, ""),
            **more,
        }
        variables = [f"{name}={value}" for name, value in environment.items()]
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return ["nsenter", f"--target={self._inits[machine]}", *namespaces, "env", "-i", "-C", "/tmp/home", *variables]

    def _connect(self, machine: int) -> None:
        name, cable = self._name(machine), f"v{machine}"
        _call("ip", "netns", "add", name)
        _call("ip", "-n", self._switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _call("ip", "-n", self._switch, "link", "set", cable, "master", "br0", "up")
        _call("ip", "-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _call("ip", "-n", name, "link", "set", device, "up")

    def _name(self, machine: int) -> str:
        return f"{self._prefix}m{machine}"

    @staticmethod
    def address(machine: int) -> str:
        """Return the IP address of a machine."""
        return f"{_NETWORK}.{machine + 1}"


@contextlib.contextmanager
def freeze(disk: Path) -> Iterator[None]:
    """Let each write to a disk wait until the context ends."""
    _call("fsfreeze", "--freeze", str(disk))
    try:
        yield
    finally:
        _call("fsfreeze", "--unfreeze", str(disk))


def _call(*command: str, check: bool = True) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(command, check=check, capture_output=True, text=True)

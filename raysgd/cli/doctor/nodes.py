"""Examines the nodes of a cluster and the network between them, for `raysgd doctor --cluster`. Driver side.

A probe on each node does the work, and all of them work at the same time. Each step has a time limit: a node that does not
answer is named and left out of the following steps, so the whole takes no longer than `LIMIT_S`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd._util import text
from raysgd._util.text import in_bytes
from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli.doctor import checks, probe
from raysgd.cli.doctor.checks import OK, WARNING, WRONG, Finding, installed_versions
from raysgd.cli.doctor.links import (
    SLOW_FACTOR,
    Pair,
    clock_difference,
    find_cut,
    find_slow,
    first_ones,
    pair_rounds,
    usual_seconds,
)
from raysgd.errors import RaySGDError

#: The time for everything after the connection to the cluster, and for its steps: to start a process, to make the checks of a
#: machine, and to measure pairs.
LIMIT_S = 26.0
_START_S = 10.0
_EXAMINE_S = 8.0
_PAIRS_S = 6.0
#: The time for one pair, and its share of it in a large cluster; what takes longer is extrapolated.
_PAIR_S = 1.0
#: In a larger cluster, each node is measured with so many others.
_MAX_ROUNDS = 40
#: What is exchanged by pairs and reduced by all nodes.
_SIZE_BYTES = 64 << 20
#: Clocks that differ by more make times in the files of a run misleading.
_MAX_CLOCK_S = 1.0
#: Rows for pairs of one kind.
_MAX_ROWS = 8
#: Findings of a node that is right, in its row.
_SHOWN = ("storage", "shared memory", "GPUs")
_FIREWALL = "let the firewall pass all ports between nodes: workers connect to ports that they choose"


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        number: Its number here.
        name: What the user reads.
        expected_gpus: The GPUs that Ray has on it.
        probe: The handle of its probe.
        address: Where its probe listens, when it has started.
        versions: The versions there.
        preloaded: The frameworks that its processes import before they get work.
    """

    number: int
    name: str
    expected_gpus: int
    probe: Any
    address: probe.Address = ("", 0)
    versions: Mapping[str, str] | None = None
    preloaded: Sequence[str] = ()


def check_cluster(address: str, storage_path: str) -> list[Finding]:
    """Examine the cluster that this process is connected to.

    Args:
        address: Its address.
        storage_path: The folder of runs.
    """
    for module in _TRAVELLING:
        cloudpickle.register_pickle_by_value(module)
    try:
        checkup = Checkup(address, storage_path)
        try:
            return list(checkup.run())
        finally:
            checkup.close()
    finally:
        for module in _TRAVELLING:
            cloudpickle.unregister_pickle_by_value(module)


_TRAVELLING = (checks, probe, text)


class Checkup:
    """Examines the nodes in steps.

    Args:
        address: The cluster's address.
        storage_path: The folder of runs.
    """

    def __init__(self, address: str, storage_path: str) -> None:
        self._deadline = time.monotonic() + LIMIT_S
        self._address = address
        self._storage_path = storage_path
        self._all = _start_probes()
        self._nodes: dict[int, Node] = {}  # those that have answered so far

    def close(self) -> None:
        """End the probes."""
        for node in self._all:
            with contextlib.suppress(Exception):
                ray.kill(node.probe)

    def run(self) -> Iterator[Finding]:
        """Make the checks, one step after the other."""
        cpus = ray.cluster_resources().get("CPU", 0)
        count = len(self._all)
        yield Finding("cluster", OK, f"{self._address} has {count} node{'s' * (count > 1)} and {cpus:g} CPUs")
        yield from checks.check_versions()
        yield from self._open()
        yield from self._examine()
        if len(self._nodes) > 1:
            cut = yield from self._reach()
            yield from self._measure(cut)
            yield from self._all_reduce(cut)

    # -- each node ----------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[Finding]:
        answers = self._ask({node.number: node.probe.open.remote() for node in self._all}, _START_S)
        for node in self._all:
            answer, _ = answers.get(node.number, (None, 0.0))
            if answer is None:
                what = f"it does not answer: no process has started on it in {_START_S:g} s"
                advice = "`ray status` shows if Ray has lost it; see its cable, its load, and raylet.out on it"
                yield Finding(node.name, WRONG, what, advice)
            elif isinstance(answer, RayError):
                yield Finding(node.name, WRONG, f"it runs no task: {_why(answer)}", "see raylet.out on the node")
            else:
                self._nodes[node.number] = replace(node, **answer)
        yield describe_preloading([node.preloaded for node in self._nodes.values()])

    def _examine(self) -> Iterator[Finding]:
        begin = time.time()
        clocks = self._ask({number: node.probe.clock.remote() for number, node in self._nodes.items()}, 2.0)
        token = f".raysgd-doctor-{uuid.uuid4().hex[:8]}"
        storage: Storage | None = None
        with contextlib.suppress(RaySGDError, OSError):  # then the nodes find out what is wrong with it
            storage = Storage.from_uri(self._storage_path)
            storage.write_bytes(token, b"")
        place = self._storage_path if storage is None else storage.uri
        asked = {number: node.probe.examine.remote(place, token) for number, node in self._nodes.items()}
        answers = self._ask(asked, _EXAMINE_S)
        if storage is not None:
            with contextlib.suppress(RaySGDError, OSError):
                storage.delete_file(token)
        for number, node in list(self._nodes.items()):
            answer, _ = answers.get(number, (None, 0.0))
            if answer is None or isinstance(answer, RayError):
                why = f"are not done after {_EXAMINE_S:g} s" if answer is None else f"failed: {_why(answer)}"
                yield Finding(node.name, WRONG, f"its checks {why}", f"see if {place} or nvidia-smi hangs there")
                continue
            clock = clocks.get(number)
            asked_s = None if clock is None or isinstance(clock[0], RayError) else (begin, clock[1], clock[0])
            findings = list(judge_node(answer, node, asked_s, place))
            yield from (replace(found, check=node.name) for found in findings)
            if not any(found.state == WRONG for found in findings):
                shown = [what for check, state, what, _ in answer["findings"] if check in _SHOWN and state == OK]
                yield Finding(node.name, OK, "; ".join(shown))

    # -- pairs --------------------------------------------------------------------------------------------------------

    def _reach(self) -> Generator[Finding, None, set[Pair]]:
        """Let each node connect to each other one; return the pairs of which one cannot reach the other."""
        addresses = {number: node.address for number, node in self._nodes.items()}
        asked = {
            number: node.probe.reach.remote({other: at for other, at in addresses.items() if other != number})
            for number, node in self._nodes.items()
        }
        failed: dict[Pair, str] = {}
        tried = {(a, b) for a in addresses for b in addresses if a < b}
        answers = self._ask(asked, probe.CONNECT_S + 1)
        for number, node in self._nodes.items():
            answer, _ = answers.get(number, (None, 0.0))
            errors = answer if isinstance(answer, dict) else dict.fromkeys(addresses, "no answer")
            for other, why in errors.items():
                if other != number:
                    pair = (min(number, other), max(number, other))
                    failed.setdefault(pair, f"{node.name} cannot reach a port of {self._nodes[other].name}: {why}")
        nodes, pairs = find_cut(failed, tried)
        for number in sorted(nodes):
            what = "no connection between it and another node is possible both ways"
            yield Finding(self._nodes[number].name, WRONG, what, _FIREWALL)
        for line in first_ones([failed[pair] for pair in sorted(pairs)], _MAX_ROWS):
            yield Finding("ports", WRONG, line, _FIREWALL)
        if not failed:
            yield Finding("ports", OK, f"{len(self._nodes)} nodes reach each other, both ways")
        return set(failed)

    def _measure(self, cut: set[Pair]) -> Iterator[Finding]:
        """Exchange data by pairs, each node with one other at a time; what was slow is measured once more."""
        numbers = sorted(self._nodes)
        until = time.monotonic() + _PAIRS_S
        rounds = [
            [pair for a, b in each if (pair := (numbers[a], numbers[b])) not in cut]
            for each in pair_rounds(len(numbers))[:_MAX_ROUNDS]
        ]
        limit_s = min(_PAIR_S, 0.7 * _PAIRS_S / len(rounds))
        seconds: dict[Pair, float] = {}
        stuck: set[Pair] = set()
        for pairs in rounds:
            if time.monotonic() < until:
                self._exchange(pairs, limit_s, seconds, stuck)
        slow_nodes, slow_pairs = find_slow(seconds)
        again = {pair for pair in seconds if pair in slow_pairs or not slow_nodes.isdisjoint(pair)}
        for pairs in rounds:
            if (left := [pair for pair in pairs if pair in again]) and time.monotonic() < until:
                self._exchange(left, limit_s, seconds, stuck)
        yield from describe_links(seconds, stuck, {number: node.name for number, node in self._nodes.items()})

    def _exchange(self, pairs: Sequence[Pair], limit_s: float, seconds: dict[Pair, float], stuck: set[Pair]) -> None:
        asked: dict[Any, Any] = {}
        for first, second in pairs:
            key = secrets.randbits(32)
            there = self._nodes[second]
            asked[first, second, 0] = there.probe.exchange.remote(key, None, _SIZE_BYTES, limit_s)
            at = there.address
            asked[first, second, 1] = self._nodes[first].probe.exchange.remote(key, at, _SIZE_BYTES, limit_s)
        answers = self._ask(asked, probe.CONNECT_S + 2 * limit_s)
        for pair in pairs:
            sides = [answers.get((*pair, side), (None, 0.0))[0] for side in (0, 1)]
            rates = [side[0] / side[1] for side in sides if isinstance(side, tuple)]
            if len(rates) == len(sides) and min(rates) > 0:
                seconds[pair] = min(_SIZE_BYTES / min(rates), seconds.get(pair, float("inf")))
            elif pair not in seconds:
                stuck.add(pair)

    # -- all nodes ----------------------------------------------------------------------------------------------------

    def _all_reduce(self, cut: set[Pair]) -> Iterator[Finding]:
        """Time an all-reduce of all nodes that reach each other, through torch's gloo as in a run."""
        left_out = {number for pair in cut for number in pair}
        nodes = [node for number, node in sorted(self._nodes.items()) if number not in left_out]
        is_installed = all("torch" in (node.versions or {}) for node in nodes)
        if len(nodes) < 2 or not is_installed:
            why = "fewer than two nodes reach all others" if is_installed else "torch is not installed on all nodes"
            yield Finding("all-reduce", OK, f"it was not timed: {why}")
            return
        loaded = self._ask({node.number: node.probe.load_torch.remote() for node in nodes}, LIMIT_S)
        what = f"{in_bytes(_SIZE_BYTES)} of {len(nodes)} nodes, by gloo"
        advice = "see the pairs above; `raysgd doctor --cluster` again when the nodes are idle"
        if bad := [node.name for node in nodes if not isinstance(loaded.get(node.number, (None,))[0], str)]:
            why = next((_why(error) for error, _ in loaded.values() if isinstance(error, RayError)), "no time was left")
            yield Finding("all-reduce", WARNING, f"it was not timed: torch was not imported on {bad[0]}: {why}", advice)
            return
        meet = loaded[nodes[0].number][0]
        begin = time.monotonic()
        asked = {
            node.number: node.probe.all_reduce.remote(rank, len(nodes), meet, _SIZE_BYTES)
            for rank, node in enumerate(nodes)
        }
        answers = [answer for answer, _ in self._ask(asked, LIMIT_S).values()]
        errors = [answer for answer in answers if isinstance(answer, RayError)]
        if errors:
            yield Finding("all-reduce", WRONG, f"{what}, failed: {_why(errors[0])}", _FIREWALL)
        elif len(answers) < len(nodes):
            yield Finding("all-reduce", WARNING, f"{what}: not done after {time.monotonic() - begin:.1f} s", advice)
        else:
            yield Finding("all-reduce", OK, f"{what}: {max(answers):.2f} s")

    def _ask(self, asked: Mapping[Any, Any], timeout_s: float) -> dict[Any, tuple[Any, float]]:
        """Return the answers that come in time, or the errors, each with the time at which it came."""
        deadline = min(time.monotonic() + timeout_s, self._deadline)
        waiting = {ref: key for key, ref in asked.items()}
        found: dict[Any, tuple[Any, float]] = {}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for ref in ray.wait(list(waiting), timeout=left_s)[0]:
                now = time.time()
                try:
                    found[waiting.pop(ref)] = ray.get(ref), now
                except RayError as error:
                    found[waiting.pop(ref)] = error, now
        return found


def _start_probes() -> list[Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = [f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive]
    token = secrets.token_bytes(16)
    probes: Any = ray.remote(probe.Probe)
    found = []
    for number, (node, name) in enumerate(zip(alive, names, strict=True)):
        if names.count(name) > 1:  # several nodes on one machine
            name = f"{name[:-1]}, {node['NodeID'][:6]})"
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 8, "scheduling_strategy": pinned}
        handle = probes.options(**options).remote(token)
        found.append(Node(number, name, int(node["Resources"].get("GPU", 0)), handle))
    return found


def _why(error: BaseException) -> str:
    """Return the type and the last line of an error: Ray's own texts begin with what every such error says."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).split("\n")
    return f"{type(cause).__name__}: {next((line.strip() for line in reversed(lines) if line.strip()), '')}"


# -- what it means: pure -----------------------------------------------------------------------------------------------


def describe_preloading(preloaded: Sequence[Sequence[str]]) -> Finding:
    """Return what the processes of the nodes import before they get work; nothing is not wrong, but runs start later."""
    names = sorted({name for each in preloaded for name in each})
    if names and all(preloaded):
        return Finding("start", OK, f"the nodes' processes import {', '.join(names)} before they get work")
    advice = "for torch runs that start sooner: RAY_preload_python_modules=torch in the environment of `ray start`"
    return Finding("start", OK, "the nodes' processes import a framework when they get work", advice)


def judge_node(
    answer: Mapping[str, Any], node: Node, clock_s: tuple[float, float, float] | None, storage_path: str
) -> Iterator[Finding]:
    """Yield what is wrong with a node.

    Args:
        answer: What `probe.Probe.examine` returned there.
        node: The node.
        clock_s: The arguments of `clock_difference`.
        storage_path: The storage path.
    """
    own, there = installed_versions(), node.versions or {}
    for package in sorted({*own, *there}):
        ours, theirs = own.get(package, "missing"), there.get(package, "missing")
        if ours != theirs:
            is_patch = package == "python" and ours.split(".")[:2] == theirs.split(".")[:2]
            state = WRONG if package in ("python", "ray", "raysgd") and not is_patch else WARNING
            what = f"{package} is {theirs} there and {ours} here"
            yield Finding("", state, what, f"install the same {package} on all nodes")
    if clock_s is not None and abs(off_s := clock_difference(*clock_s)) > _MAX_CLOCK_S:
        what = f"its clock is {abs(off_s):.1f} s {'ahead' if off_s > 0 else 'behind'}"
        yield Finding("", WARNING, what, "run chrony or ntpd on all nodes")
    if not answer["sees_file"]:
        advice = "give --storage-path a folder that all nodes mount, or a URI such as s3://bucket/runs"
        yield Finding("", WRONG, f"it does not see the files in {storage_path}", advice)
    if answer["gpus"] < node.expected_gpus:
        what = f"Ray counts {node.expected_gpus} GPUs, and nvidia-smi {answer['gpus']}"
        yield Finding("", WRONG, what, "start Ray again on the node, without --num-gpus")
    for found in (Finding(*each) for each in answer["findings"]):
        if found.state != OK and found.check != "versions":
            yield found


def describe_links(seconds: Mapping[Pair, float], stuck: set[Pair], names: Mapping[int, str]) -> Iterator[Finding]:
    """Yield how fast the network is, and which nodes and pairs are slow.

    Args:
        seconds: What an exchange both ways takes.
        stuck: Pairs that have exchanged nothing.
        names: The names of the nodes.
    """
    size = in_bytes(_SIZE_BYTES)
    lines = [f"{names[a]} and {names[b]}: nothing came through in the time" for a, b in sorted(stuck)]
    for line in first_ones(lines, _MAX_ROWS):
        yield Finding("network", WRONG, line, "see the cables and switches of both; large packets may be lost (MTU)")
    if not seconds:
        return
    usual_s = usual_seconds(seconds)
    usual = f"{size} both ways usually takes {usual_s:.2f} s"
    advice = "see cable, switch and interface, and what else uses them"
    nodes, pairs = find_slow(seconds)
    for number in sorted(nodes):
        best_s = min(took_s for pair, took_s in seconds.items() if number in pair)
        yield Finding(
            names[number], WARNING, f"it is slow with all other nodes: {best_s:.1f} s at best; {usual}", advice
        )
    slowest = sorted(pairs, key=lambda pair: (-seconds[pair], pair))
    lines = [f"{names[a]} and {names[b]}: {seconds[a, b]:.1f} s; {usual}" for a, b in slowest]
    for line in first_ones(lines, _MAX_ROWS):
        yield Finding("network", WARNING, line, advice)
    if not nodes and not pairs:
        what = f"{usual} ({in_bytes(_SIZE_BYTES / usual_s)}/s each way), at most {max(seconds.values()):.2f} s"
        yield Finding(
            "network",
            OK,
            f"{len(seconds)} pair{'s' * (len(seconds) > 1)}: {what}; a pair is slow at {SLOW_FACTOR:g} times that",
        )

"""Preloading: which nodes get a process, who takes it over, and what happens if Ray cannot do it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

import raysgd
from raysgd.config import FailureConfig, ScalingConfig
from raysgd.errors import ConfigError
from raysgd.workers.group import preloading
from raysgd.workers.group.preloading import Environment, Preloading, add_key, has_room, merge_environments
from raysgd.workers.liveness.memory import MemoryPool
from raysgd.workers.placement.capacity import Node
from raysgd.workers.process import preload
from raysgd.workers.process.preload import PreloadedProcess, PreloadOrder
from support.poll import turn_loop

GIB = 1 << 30
PROCESS = PreloadedProcess("node", 4711, 1.0, is_ready=True)


class Store:
    """Stands for the cluster's key-value store."""

    def __init__(self) -> None:
        self.orders: dict[str, PreloadOrder] = {}
        self.processes: dict[str, PreloadedProcess] = {}

    def put_order(self, key: str, order: PreloadOrder) -> None:
        self.orders[key] = order

    def get_order(self, key: str) -> PreloadOrder | None:
        return self.orders.get(key)

    def put_process(self, key: str, process: PreloadedProcess) -> None:
        self.processes[key] = process

    def get_process(self, key: str) -> PreloadedProcess | None:
        return self.processes.get(key)

    def list_keys(self, name: str) -> list[str]:
        return [key for key in self.processes if key.startswith(f"{name}/")]

    def forget_key(self, key: str) -> None:
        self.orders.pop(key, None)
        self.processes.pop(key, None)


class Agents:
    """Stands for the node agents."""

    def __init__(self) -> None:
        self.free_bytes = 100 * GIB
        self.alive = {PROCESS.pid}
        self.ended: list[int] = []

    async def read_room(self, node_id: str, timeout_s: float) -> MemoryPool | None:
        return MemoryPool("the node", 100 * GIB, 100 * GIB - self.free_bytes)

    def may_live(self, node_id: str, pid: int) -> bool:
        return pid in self.alive

    async def check_processes(self, node_id: str, pids: list[int], timeout_s: float) -> list[str | None]:
        return ["it lives" if pid in self.alive else None for pid in pids]

    def end_idle(self, node_id: str, pid: int, created_s: float) -> None:
        self.ended.append(pid)


class Member:
    """A worker that has imported ``colorsys``."""

    def __init__(self, node_id: str = "node", pid: int = 1) -> None:
        self.info = SimpleNamespace(node_id=node_id, pid=pid)
        self.handle = SimpleNamespace(list_imports=SimpleNamespace(remote=self._list_imports))

    async def _list_imports(self) -> list[str]:
        return ["colorsys"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    for name in ("put_order", "get_order", "put_process", "get_process", "list_keys", "forget_key"):
        monkeypatch.setattr(preload, name, getattr(store, name))
    return store


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The nodes that were asked for a process, each with the runtime environment."""
    requested: list[tuple[str, Any]] = []
    context = SimpleNamespace(get_runtime_env_string=lambda: '{"env_vars":{"JOB":"1"}}')
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(preloading, "request_process", lambda *args: requested.append(args))
    monkeypatch.setattr(preloading, "_DELAY_S", 0.0)

    async def at_once(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(preloading.asyncio, "to_thread", at_once)
    return requested


def make(agents: Agents, *, gpus: int = 0, existing: bool = False, backend: Any = None, **failure: Any) -> Preloading:
    return Preloading(
        "trainer",
        ScalingConfig(num_workers=2, cpus_per_worker=2.5, gpus_per_worker=gpus),
        backend or raysgd.TorchConfig(),
        FailureConfig(**{"preload": True, **failure}),
        {"env_vars": {"SHADE": "green"}},
        SimpleNamespace(is_in_existing_placement=existing),  # type: ignore[arg-type]
        agents,  # type: ignore[arg-type]
    )


def slot_on(node_id: str) -> Any:
    return SimpleNamespace(node_id=lambda: node_id)


async def replenish(preloading_: Preloading, *members: Member) -> None:
    """Begin an attempt, and wait until no step is left before the regular checks."""
    preloading_.list_workers = lambda: members  # type: ignore[assignment, return-value]
    preloading_.replenish(members)  # type: ignore[arg-type]
    await turn_loop(50)


async def prepared(preloading_: Preloading, store: Store) -> str:
    """Have a process preloaded on the node; return its key."""
    await replenish(preloading_, Member())
    (key,) = store.orders
    store.put_process(key, PROCESS)
    return key


def test_room_is_two_gibibytes_and_a_tenth_of_the_memory() -> None:
    assert has_room(MemoryPool("the node", 100 * GIB, 88 * GIB))
    assert not has_room(MemoryPool("the node", 100 * GIB, 88 * GIB + 1))
    assert not has_room(None)


def test_environment_is_the_text_that_ray_makes() -> None:
    child = '{"env_vars": {"A": "1", "B": "2"}}'  # as Ray's Python writes it
    assert merge_environments("{}", child) == merge_environments("", child) == child
    parent = '{"working_dir":"gcs://a.zip","env_vars":{"B":"0","Ü":"ü\\n"}}'
    assert merge_environments(parent, child) == (
        '{"env_vars":{"A":"1","B":"2","Ü":"ü\\n"},"working_dir":"gcs://a.zip"}'
    )


ENVIRONMENTS = st.fixed_dictionaries(
    {}, optional={"env_vars": st.dictionaries(st.text(), st.text()), "working_dir": st.text()}
)


@given(ENVIRONMENTS, ENVIRONMENTS)
def test_own_settings_have_priority_over_those_of_the_job(parent: dict[str, Any], child: dict[str, Any]) -> None:
    merged = json.loads(merge_environments(json.dumps(parent), json.dumps(child)))
    assert merged.get("working_dir") == child.get("working_dir", parent.get("working_dir"))
    assert merged.get("env_vars", {}) == {**parent.get("env_vars", {}), **child.get("env_vars", {})}


@pytest.mark.parametrize(
    ("parent", "child"),
    [
        ('{"worker_process_setup_hook":"module.function"}', {}),
        ("{}", {"worker_process_setup_hook": "module.function"}),
        ("{}", {"env_vars": {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "module.function"}}),
    ],
)
def test_hook_of_the_user_is_found(parent: str, child: dict[str, Any]) -> None:
    assert Environment(parent, child).has_hook()
    assert not Environment('{"env_vars":{"A":"1"}}', {"env_vars": {"B": "2"}}).has_hook()


async def test_replacement_takes_over_the_process_once(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    key = await prepared(preloads, store)
    ((node_id, environment),) = requested
    assert node_id == "node"
    assert preloads.take(slot_on("other")) is None
    given_to_actor = preloads.take(slot_on("node"))
    assert given_to_actor == add_key({"env_vars": {"SHADE": "green"}}, key)
    assert json.loads(environment.serialized_runtime_env)["env_vars"] == {"JOB": "1", **given_to_actor["env_vars"]}
    assert preloads.take(slot_on("node")) is None
    assert not store.orders and not store.processes
    preloads.close()
    assert agents.ended == []


async def test_node_with_a_process_gets_no_second_one(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    await prepared(preloads, store)
    await replenish(preloads, Member(), Member("other"))
    assert [node_id for node_id, _ in requested] == ["node", "other"]
    preloads.close()


async def test_process_that_is_not_ready_is_not_taken_over(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    key = await prepared(preloads, store)
    store.put_process(key, replace(PROCESS, is_ready=False))
    assert preloads.take(slot_on("node")) is None
    preloads.close()
    assert agents.ended == [PROCESS.pid]


async def test_process_that_died_is_not_taken_over(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    await prepared(preloads, store)
    agents.alive.clear()
    assert preloads.take(slot_on("node")) is None
    preloads.close()


async def test_node_whose_process_died_gets_no_other_one(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloading, "_CHECK_S", 0.0)
    preloads = make(agents)
    await prepared(preloads, store)
    agents.alive.clear()
    await replenish(preloads, Member())
    assert not store.processes
    await replenish(preloads, Member())
    assert len(requested) == 1


async def test_preloading_stops_if_ray_leaves_the_process_idle(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    await prepared(preloads, store)
    assert preloads.take(slot_on("node")) is not None
    await replenish(preloads, Member(pid=5))
    assert agents.ended == [PROCESS.pid]
    await replenish(preloads, Member(pid=5))
    assert len(requested) == 1


async def test_process_is_not_judged_while_a_worker_starts(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    await prepared(preloads, store)
    assert preloads.take(slot_on("node")) is not None
    starting = Member()
    starting.info = None  # type: ignore[assignment]
    await replenish(preloads, Member(pid=5), starting)
    assert agents.ended == [], "it may be taking the process over"
    await replenish(preloads, Member(pid=5), Member(pid=PROCESS.pid))
    assert agents.ended == [] and len(requested) == 2
    preloads.close()


async def test_next_process_is_requested_when_one_was_taken_over(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    await prepared(preloads, store)
    assert preloads.take(slot_on("node")) is not None
    await replenish(preloads, Member(pid=PROCESS.pid))
    assert len(requested) == 2 and agents.ended == []
    preloads.close()


async def test_processes_of_a_controller_that_died_are_used(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    preloads = make(agents)
    store.put_process("trainer/1234", PROCESS)
    await replenish(preloads, Member())
    assert requested == []
    assert preloads.take(slot_on("node")) == add_key({"env_vars": {"SHADE": "green"}}, "trainer/1234")


@pytest.mark.parametrize(
    "settings",
    [
        {"preload": False},
        {"max_failures": 0},
        {"num_spares": 1},
        {"existing": True},
        {"backend": raysgd.NoneConfig()},
        {"backend": raysgd.EnvConfig()},
    ],
    ids=str,
)
async def test_nothing_is_preloaded_where_it_is_of_no_use(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], settings: dict[str, Any]
) -> None:
    await replenish(make(agents, **settings), Member())
    assert requested == [] and not store.orders


async def test_nothing_is_preloaded_on_a_node_short_of_memory(
    store: Store, agents: Agents, requested: list[tuple[str, Any]]
) -> None:
    agents.free_bytes = GIB
    await replenish(make(agents), Member())
    assert requested == [] and not store.orders


@pytest.mark.parametrize(
    ("gpus", "modules"),
    [(0, ["torch.distributed.nn.functional", "colorsys"]), (1, ["torch.distributed.nn.functional"])],
)
async def test_process_imports_what_members_have_imported_unless_they_have_gpus(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], gpus: int, modules: list[str]
) -> None:
    preloads = make(agents, gpus=gpus)
    await replenish(preloads, Member())
    (order,) = store.orders.values()
    assert order == PreloadOrder(modules, num_threads=2)
    preloads.close()


async def test_workers_start_as_usual_if_ray_cannot_preload(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Awaitable[None]:
        raise ImportError("No module named 'grpc'")

    monkeypatch.setattr(preloading, "request_process", fail)
    preloads = make(agents)
    await replenish(preloads, Member())
    assert preloads.take(slot_on("node")) is None
    preloads.close()
    assert not store.orders and agents.ended == []


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The free CPUs of the cluster's nodes."""
    free = {"lost": 0.0, "node": 4.0, "roomy": 9.0, "full": 1.0, "other": 5.0}
    nodes = [Node(name, name, {"CPU": 9.0}, {"CPU": cpus}) for name, cpus in free.items()]
    monkeypatch.setattr(preloading, "list_nodes", lambda: nodes)
    return free


async def expect_loss(preloads: Preloading, lost: Member, *others: Member, avoid: Sequence[str] = ()) -> None:
    preloads.expect_loss([lost], others, avoid)  # type: ignore[arg-type, list-item]
    await turn_loop(50)


@pytest.mark.parametrize("preload_", [False, True])
async def test_silence_of_a_node_preloads_a_process_where_a_replacement_will_be_placed(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float], preload_: bool
) -> None:
    preloads = make(agents, preload=preload_)
    for _ in range(2):  # it is still silent
        await expect_loss(preloads, Member("lost"), Member("full"))
    assert [node_id for node_id, _ in requested] == ["roomy"]
    (key,) = store.orders
    assert "colorsys" in store.orders[key].modules
    store.put_process(key, PROCESS)
    assert preloads.take(slot_on("roomy")) == add_key({"env_vars": {"SHADE": "green"}}, key)
    preloads.close()
    assert agents.ended == []


async def test_silence_of_a_node_preloads_nothing_on_nodes_to_avoid_or_with_a_process(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float]
) -> None:
    preloads = make(agents)
    await replenish(preloads, Member("node"), Member("lost"))
    requested.clear()
    await expect_loss(preloads, Member("lost"), Member("node"), avoid=["roomy", "other"])
    assert requested == [], "the replacement is placed on a node that has a process already"
    await expect_loss(preloads, Member("lost again"), Member("full"), avoid=["roomy"])
    assert [node_id for node_id, _ in requested] == ["other"]
    preloads.close()


async def test_each_member_of_the_silent_nodes_has_its_replacement(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float]
) -> None:
    preloads = make(agents)
    silent = [Member("lost"), Member("lost"), Member("slow")]
    preloads.expect_loss(silent[:2], [Member("full")], ())  # type: ignore[arg-type, list-item]
    preloads.expect_loss(silent, [Member("full")], ())  # type: ignore[arg-type, list-item]
    await turn_loop(50)
    assert sorted(node_id for node_id, _ in requested) == ["other", "roomy"], "the third one is placed on one of these"
    preloads.close()


async def test_silence_of_a_node_preloads_nothing_on_nodes_short_of_memory(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float]
) -> None:
    agents.free_bytes = GIB
    await expect_loss(make(agents), Member("lost"), Member("full"))
    assert requested == []


async def test_failed_request_does_not_keep_processes(
    store: Store,
    agents: Agents,
    requested: list[tuple[str, Any]],
    free: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(node_id: str, environment: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(preloading, "request_process", fail)
    preloads = make(agents, heartbeat_timeout_s=0.1)
    await expect_loss(preloads, Member("lost"), Member("full"))
    store.put_process(next(iter(store.orders)), PROCESS)  # it has started nevertheless
    await asyncio.wait(preloads._expecting)
    assert agents.ended == [PROCESS.pid] and not store.orders


@pytest.mark.parametrize("settings", [{"num_spares": 1}, {"max_failures": 0}, {"existing": True}], ids=str)
async def test_silence_of_a_node_preloads_nothing_where_it_is_of_no_use(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float], settings: dict[str, Any]
) -> None:
    await expect_loss(make(agents, **settings), Member("lost"), Member("full"))
    assert requested == []


async def test_silence_of_all_nodes_preloads_nothing(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float]
) -> None:
    await expect_loss(make(agents), Member("lost"))
    assert requested == []


async def test_process_ends_if_the_silent_node_answers_again(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float]
) -> None:
    preloads = make(agents, heartbeat_timeout_s=0.1)
    await expect_loss(preloads, Member("lost"), Member("full"))
    (key,) = store.orders
    store.put_process(key, PROCESS)
    await asyncio.wait(preloads._expecting)
    assert agents.ended == [PROCESS.pid] and not store.processes
    assert preloads.take(slot_on("roomy")) is None
    await expect_loss(preloads, Member("lost"), Member("full"))
    assert len(requested) == 2, "a later silence is a new one"
    preloads.close()


async def test_process_that_no_replacement_took_ends_after_the_recovery(
    store: Store, agents: Agents, requested: list[tuple[str, Any]], free: dict[str, float]
) -> None:
    preloads = make(agents, preload=False)
    await expect_loss(preloads, Member("lost"), Member("full"))
    store.put_process(next(iter(store.orders)), PROCESS)
    await replenish(preloads, Member("full"), Member("roomy"))
    assert agents.ended == [PROCESS.pid] and len(requested) == 1


def test_request_is_not_made_at_a_log_level_that_may_crash_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "debug")
    with pytest.raises(RuntimeError, match="log level"):
        preloading.request_process("node", None)


# -- in the process ------------------------------------------------------------------------------------------------


def test_hook_does_not_raise_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preload.VARIABLE, "trainer/1234")
    preload.preload()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[str]:
    """The modules that the hook has imported."""
    from raysgd.workers.process import imports

    imported: list[str] = []
    monkeypatch.setattr(imports.EarlyImports, "run", lambda self, names: imported.extend(names))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setenv(preload.VARIABLE, "trainer/1234")
    return imported


@pytest.mark.parametrize(("given_threads", "threads"), [(None, "3"), ("7", "7")])
def test_hook_sets_threads_and_imports(
    store: Store, imported: list[str], monkeypatch: pytest.MonkeyPatch, given_threads: str | None, threads: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given_threads or "")
    if given_threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    store.put_order("trainer/1234", PreloadOrder(["torch"], 3))
    preload.preload()
    assert imported[0] == "torch" and os.environ["OMP_NUM_THREADS"] == threads
    process = store.processes["trainer/1234"]
    assert process.is_ready and (process.node_id, process.pid) == ("node", os.getpid())


def test_hook_does_nothing_in_a_process_that_inherits_the_environment(store: Store, imported: list[str]) -> None:
    preload.preload()
    assert imported == [] and not store.processes


def test_hook_ends_a_process_that_is_wanted_no_more(
    store: Store, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exited(Exception):
        pass

    def exit_(code: int) -> None:
        raise Exited

    monkeypatch.setattr(os, "_exit", exit_)
    monkeypatch.setattr(preload, "put_process", lambda key, process: store.forget_key(key))  # closed at this moment
    store.put_order("trainer/1234", PreloadOrder(["torch"], 3))
    with pytest.raises(Exited):
        preload._preload("trainer/1234")
    assert imported == []


def test_preload_is_a_bool() -> None:
    with pytest.raises(ConfigError, match="FailureConfig\\(preload\\)"):
        FailureConfig(preload=1)  # type: ignore[arg-type]

"""The processes around a controller that is measured: ``python -m bench.scale_peers {workers,driver} SPEC``.

One process holds all simulated workers. Each has a thread, an `EventQueue`, an `EventSender` and a connection of its own, as
real workers do, and its part of a checkpoint is a file. Another process reads the run as a driver does.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from bench.scale_group import KIND as CALLS
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.store import directory_name, part_prefix
from raysgd.controller import frames
from raysgd.controller.journal.frame_streams import KIND as FRAMES
from raysgd.controller.rounds import RoundMerger
from raysgd.data.order.position import Position as DataPosition
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import Ended, Entered, Left, PartHeld, PartSafe, Sample, Saved
from raysgd.session.progress import Heartbeat
from raysgd.transport import Endpoint, connect, pack, receive_message
from raysgd.workers.events_connection import EventSender
from raysgd.workers.orders import AttemptOrder, Position, Prepared, WorkerInfo
from raysgd.workers.process.attempt import SAMPLE_INTERVAL_S

WORKERS_PER_NODE = 8
_PART = bytes(256)
_ROWS_PER_REPORT = 32
_SAMPLED = (
    "cpu_percent",
    "rss_bytes",
    "gpu_memory_bytes",
    "gpu_percent",
    "reports_per_s",
    "time_per_report_s",
    "steps_per_s",
)
_STACK_BYTES = 512 << 10
_CONNECT_TIMEOUT_S = 10.0


class Channel:
    """The connection to the controller for the calls of all workers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._line = connect(endpoint, {"kind": CALLS}, _CONNECT_TIMEOUT_S)
        self.file = self._line.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, kind: str, key: int, value: Any = None) -> None:
        data = pack((kind, key, value))
        with self._lock:
            self._line.sendall(data)


class Save(NamedTuple):
    """One rank's part of a checkpoint: of which rank and which call, and the rank's small state then."""

    rank: Rank
    call: int
    rank_state: dict[str, Any]


class Rank:
    """A simulated worker in one attempt. Its thread sends its events as that of a real one does."""

    def __init__(self, workers: Workers, worker: int, key: int, order: AttemptOrder) -> None:
        self.order = order
        self.worker = worker
        self.rank = order.member.rank
        self.event_queue = EventQueue(order.flush_interval_s)
        self.num_reports = self.num_saves = 0
        self._workers = workers
        self._key = key
        self._payloads: int | None = None
        self._not_held: list[Save] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._is_dead = False
        self._sender = EventSender(order.inbox, on_problem=self._on_problem)
        generators = random.Random(self.rank).getstate()
        self._generators = {
            "python": [generators[0], list(generators[1]), generators[2]],
            "numpy": ["MT19937", "A" * 3328, 624, 0, 0.0],
        }
        self.begun = time.monotonic()
        self.event_queue.put(Entered(time.time()), urgent=True)
        threading.Thread(target=self._stream, daemon=True).start()

    def report(self) -> None:
        now = time.time()
        metrics = {"loss": 0.123456789, "accuracy": 0.987654321, "t": now}
        self.event_queue.put_report((now, time.monotonic() - self.begun, metrics))
        self.num_reports += 1

    def begin_save(self) -> Save:
        """Announce the next save, and capture this rank's small state."""
        call, self.num_saves = self.num_saves, self.num_saves + 1
        saved = Saved(call, self.num_reports, time.monotonic() - self.begun, True, False, False, None)
        self.event_queue.put_with_metrics(saved, {"loss": 0.123456789})
        return Save(self, call, self._capture())

    def write_part(self, save: Save) -> None:
        """Write this rank's part of a checkpoint, and announce that it is safe and that it is in memory."""
        folder = self._workers.checkpoints / directory_name(self.order.first_number + save.call)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{part_prefix(self.order.attempt, self.rank)}.safetensors"
        (folder / name).write_bytes(_PART)
        entry = FileEntry(name, len(_PART), zlib.crc32(_PART))
        self.event_queue.put(PartSafe(save.call, (entry,), save.rank_state))
        self._workers.on_part_safe(self.order.first_number + save.call)
        with self._lock:
            self._not_held.append(save)
        self._hold()

    def take_payloads(self, key: int) -> None:
        """The controller reads this rank's parts in memory from now on."""
        self._payloads = key
        self._hold()

    def end(self) -> None:
        self.event_queue.put(Left())
        self.event_queue.put(Ended(), urgent=True)
        self._done.set()
        self.event_queue.wake()

    def die(self) -> None:
        """Close the connection, as the end of a process does."""
        self._is_dead = True
        if (connection := self._sender._connection) is not None:
            connection.close()
        self._done.set()
        self.event_queue.wake()

    def _hold(self) -> None:
        with self._lock:
            if self._payloads is None:
                return
            saves, self._not_held = self._not_held, []
        for save in saves:
            self._workers.channel.send("item", self._payloads, b"reference")
            self.event_queue.put(PartHeld(save.call, len(_PART), save.rank_state))

    def _capture(self) -> dict[str, Any]:
        consumed = self.num_reports * _ROWS_PER_REPORT * self.order.member.world_size
        position = DataPosition(consumed=consumed, num_rows=1 << 40, seed=1, shuffle=True, layout=1)
        return {"generators": self._generators, "data": {"train": position.to_json()}}

    def _stream(self) -> None:
        sampled_at = time.monotonic()
        identity = {"rank": self.rank, "node": f"node-{self.worker // WORKERS_PER_NODE} (127.0.0.1)", "run": "run"}
        while not self._is_dead:
            was_done = self._done.is_set()
            batch = self.event_queue.drain(0 if was_done else SAMPLE_INTERVAL_S)
            if was_done and not batch:
                break
            if time.monotonic() - sampled_at >= SAMPLE_INTERVAL_S:
                sampled_at = time.monotonic()
                batch.append(Sample({**identity, **dict.fromkeys(_SAMPLED, 12.345678)}))
            if batch:
                self._sender.send(batch)
                self._workers.on_sent(self.order.first_number, batch)
        self._sender.finish()
        self._workers.channel.send("end", self._key)

    def _on_problem(self, problem: str | None) -> None:
        if not self._is_dead:
            self._workers.on_problem(problem)


class Workers:
    """All simulated workers, which train in step.

    Args:
        hz: Reports of each worker in a second.
        save_every: Reports between two saves; 0: no saves.
        checkpoints: The folder of the run's checkpoints.
    """

    def __init__(self, channel: Channel, hz: float, save_every: int, checkpoints: Path) -> None:
        self.channel = channel
        self.checkpoints = checkpoints
        self._hz = hz
        self._save_every = save_every
        self._ranks: dict[int, Rank] = {}  # by worker
        self._lock = threading.Lock()
        self._to_write: queue.Queue[Save] = queue.Queue()
        self._ready: queue.Queue[list[Rank]] = queue.Queue()
        self._stats: dict[str, Any] = {
            "batches": 0,
            "late_s": 0.0,
            "safe": {},
            "sent": {},
            "ordered": {},
            "problems": [],
        }

    def serve(self) -> None:
        """Answer the controller's calls until it closes the connection."""
        for target in (self._train, self._write):
            threading.Thread(target=target, daemon=True).start()
        while True:
            try:
                key, worker, method, args = receive_message(self.channel.file)
            except EOFError:
                return
            if method == "run":
                self._begin(key, worker, args[1])
            elif method == "payloads":
                self._ranks[worker].take_payloads(key)
            else:
                self.channel.send("answer", key, self._answer(worker, method, *args))

    def on_problem(self, problem: str | None) -> None:
        self._stats["problems"].append(problem)

    def on_part_safe(self, number: int) -> None:
        self._stats["safe"][number] = time.time()

    def on_sent(self, first_number: int, batch: list[Any]) -> None:
        with self._lock:
            self._stats["batches"] += 1
            for event in batch:
                if isinstance(event, PartSafe):
                    self._stats["sent"][first_number + event.call] = time.time()

    def _begin(self, key: int, worker: int, order: AttemptOrder) -> None:
        self._ranks[worker] = Rank(self, worker, key, order)
        entered = [rank for rank in self._ranks.values() if rank.order.attempt == order.attempt]
        if len(entered) == order.member.world_size:
            self._stats["ordered"][order.attempt] = time.time()
            self._ready.put(sorted(entered, key=lambda rank: rank.rank))

    def _answer(self, worker: int, method: str, *args: Any) -> Any:
        rank = self._ranks.get(worker)
        match method:
            case "describe":
                info = WorkerInfo(f"node-{worker // WORKERS_PER_NODE}", "127.0.0.1", "simulated", 10_000 + worker)
                return {**vars(info), "versions": {}}
            case "heartbeat":
                return Heartbeat(calls=rank.num_reports, phase="report", is_inside=True) if rank else Heartbeat()
            case "position":
                return Position()
            case "prepare":
                return Prepared(rendezvous="127.0.0.1:1")
            case "probe":
                return True
            case "end" if rank is not None and rank.order.attempt == args[0]:
                rank.end()
            case "kill":
                self._stats["died_at"] = time.time()
                if rank is not None:
                    rank.die()
                self.channel.send("died", worker)
            case "stats":
                return self._stats
        return None

    def _train(self) -> None:
        ranks = self._ready.get()
        while True:
            begun, steps = time.monotonic(), 0
            while self._ready.empty():
                self._step(ranks, steps)
                steps += 1
                wait_s = begun + steps / self._hz - time.monotonic()
                if steps > 1:
                    self._stats["late_s"] = max(self._stats["late_s"], -wait_s)
                time.sleep(max(0.0, wait_s))
            ranks = self._ready.get()

    def _step(self, ranks: list[Rank], number: int) -> None:
        for rank in ranks:
            rank.report()
        if self._save_every and number % self._save_every == self._save_every - 1:
            for save in [rank.begin_save() for rank in ranks]:
                self._to_write.put(save)

    def _write(self) -> None:
        while True:
            save = self._to_write.get()
            save.rank.write_part(save)


def read_as_driver(endpoint: Endpoint, out: Path) -> None:
    """Read the run to its end; write when each round arrived, its age then, and the CPU seconds of this process so far."""
    merger = RoundMerger()
    rounds, num_batches = [], 0
    with connect(endpoint, {"kind": FRAMES, "run": "run", "seq": 0}, _CONNECT_TIMEOUT_S) as line:
        file, is_over = line.makefile("rb", buffering=1 << 16), False
        while not is_over:
            batch = receive_message(file)
            num_batches += 1
            for frame in batch:
                is_over = is_over or frame.kind == frames.RUN_CLOSED
                for result in merger.feed(frame):
                    now, made = time.time(), [worker["t"] for worker in result.workers]
                    place = result["attempt"], result["training_iteration"], len(made)
                    rounds.append((*place, now, now - max(made), now - min(made), time.process_time(), num_batches))
    out.write_text(json.dumps(rounds), encoding="utf-8")


def main(role: str, spec: str) -> None:
    given = json.loads(Path(spec).read_text(encoding="utf-8"))
    endpoint = Endpoint(given["host"], given["port"], bytes.fromhex(given["token"]))
    if role == "driver":
        read_as_driver(endpoint, Path(given["rounds"]))
        return
    threading.stack_size(_STACK_BYTES)
    Workers(Channel(endpoint), given["hz"], given["save_every"], Path(given["checkpoints"])).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A GCS that cannot be reached is reported once for each outage, with what to do if it stays away."""

from __future__ import annotations

import asyncio
import socket

import pytest

from raysgd.controller import gcs_watch
from raysgd.controller.gcs_watch import describe_outage, watch_gcs
from support.poll import until_async


async def test_each_outage_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_watch, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(gcs_watch, "AWAY_S", 0.2)
    outages: list[float] = []
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    watching = asyncio.ensure_future(watch_gcs(f"127.0.0.1:{port}", outages.append))
    for outage in (1, 2):
        await until_async(lambda outage=outage: len(outages) == outage)  # type: ignore[misc]
        await asyncio.sleep(0.3)
        assert len(outages) == outage and outages[-1] > 0.2
        async with await asyncio.start_server(accept, "127.0.0.1", port):
            before = connections
            await until_async(lambda before=before: connections > before)  # type: ignore[misc]
    watching.cancel()


def test_outage_is_described_with_the_command_that_resumes_the_run() -> None:
    message = describe_outage("10.0.0.1:6379", 12.3, "/shared/digits/run_001")
    assert "raysgd.Trainer.restore('/shared/digits/run_001')" in message
    assert "10.0.0.1:6379 has not accepted a connection for 12 s" in message

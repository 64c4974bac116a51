"""Notices that Ray's global control service (GCS) cannot be reached, before Ray ends all processes. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

#: Seconds between two connections to the GCS, and the time for each.
_INTERVAL_S = 2.0
#: Seconds without a connection after which that is reported.
AWAY_S = 10.0


async def watch_gcs(address: str, report: Callable[[float], None]) -> None:
    """Connect to the GCS every few seconds, until cancelled.

    Args:
        address: Its host and port.
        report: Called once for each outage, with the seconds that it has lasted.
    """
    seen_at, is_reported = time.monotonic(), False
    while True:
        if await _accepts_connections(address):
            seen_at, is_reported = time.monotonic(), False
        elif not is_reported and (away_s := time.monotonic() - seen_at) > AWAY_S:
            is_reported = True
            report(away_s)
        await asyncio.sleep(_INTERVAL_S)


def describe_outage(address: str, away_s: float, run_dir: str) -> str:
    """Say what follows from an outage of the GCS, and how the run is resumed if it does not end."""
    return (
        f"Ray's global control service (GCS) at {address} has not accepted a connection for {away_s:.0f} s: its node is lost, or "
        "the controller's node is cut off from it. Training continues; no process can be started. If the GCS stays away, Ray "
        "ends all processes, this program among them, after RAY_gcs_rpc_server_reconnect_timeout_s (60 s if not set). Then "
        f"raysgd.Trainer.restore({run_dir!r}) resumes the run from its newest checkpoint."
    )


async def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        connecting = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(connecting, _INTERVAL_S)
        writer.close()
        return True
    return False

"""How often the streams to and from the controller may send."""

from __future__ import annotations

#: CPU seconds a batch costs the controller, and the share of one core that batches may take of it, each way.
_ITEM_COST_S = 0.0002
_STREAM_SHARE = 0.11
_MAX_INTERVAL_S = 2.0


def stream_interval_s(num_streams: int) -> float:
    """Least time between batches of a stream, of which the controller reads or writes ``num_streams``.

    Each costs it about 0.2 ms of CPU whatever it holds, so together they are kept to a share of one core.
    """
    return min(_MAX_INTERVAL_S, num_streams * _ITEM_COST_S / _STREAM_SHARE)

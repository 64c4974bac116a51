"""A replica group of torchft with one process, which trains as `bench.live_loops` does, until its file ``enough`` exists.

    PYTHON -m bench.torchft_member NUMBER FOLDER LIGHTHOUSE WIDTH

PYTHON is that of an environment with torchft. A line for each committed step, with the time and the number of replica groups that
took part, goes to a file in the folder.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(number: int, folder: Path, lighthouse: str, width: int) -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from bench.live_loops import ROWS, make_model

    class Model(DistributedDataParallel):  # type: ignore[misc]
        """That of torchft 0.2 ends the process by an AssertionError when an all-reduce of gloo fails."""

        @staticmethod
        def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations
            state.allreduce(bucket.buffer()).wait()
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    torch.manual_seed(0)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    inner: dict[str, Any] = {}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda state: [inner[name].load_state_dict(state[name]) for name in inner] and None,
        state_dict=lambda: {name: inner[name].state_dict() for name in inner},
        replica_id=f"group_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
    )
    model = make_model(width)
    wrapped = Model(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    inner.update(model=model, optimizer=optimizer.optim)
    with (folder / f"{number}-{os.getpid()}.steps").open("w", buffering=1) as marks:
        while not (folder / "enough").exists():
            before = manager.current_step()
            optimizer.zero_grad()
            (wrapped(torch.rand(ROWS, width)) - 1).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                marks.write(f"{time.time()!r} {manager.num_participants()}\n")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

"""The driver of a training with a live state on several machines: ``python -m support.live_job FOLDER``.

The file ``digest`` in the folder has that of the final tensors.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import raysgd
from support.live_kills import NUM_RANKS, run
from support.runs import make_trainer

NUM_STEPS = 100
SLEEP_S = 0.1


def main(folder: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=3, num_spares=2)
    with make_trainer(
        folder / "runs", NUM_RANKS, "torch", failure_config=failure, seed=3, deterministic=True
    ) as trainer:
        outcome = run(trainer, folder, "ddp", [], NUM_STEPS, SLEEP_S)
    digest = hashlib.sha256(b"".join(tensor.tobytes() for _, tensor in sorted(outcome.tensors.items())))
    (folder / "digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

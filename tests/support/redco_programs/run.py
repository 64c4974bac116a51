"""Run programs in the form of redco's examples, one for each family, with redco or raysgd; print their numbers as JSON.

Models and data are tiny. A batch has all rows of an epoch, since redco and raysgd put the rows in different orders, and no loss
depends on the random key, since their keys differ. A program takes the names of the library::

    export JAX_THREEFRY_PARTITIONABLE=1 XLA_FLAGS=--xla_force_host_platform_device_count=2
    python tests/support/redco_programs/run.py redco 2
    python tests/support/redco_programs/run.py raysgd 2

The first command needs redco==0.4.23 jax==0.4.35 jaxlib==0.4.35 flax==0.10.1 optax==0.2.4 orbax-checkpoint==0.6.4.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import fine_tuning
import jax
import own_loops

#: By family.
PROGRAMS: dict[str, Callable[[Any, int], list[float]]] = {
    "mnist": fine_tuning.mnist,
    "classification": fine_tuning.classification,
    "regression": partial(fine_tuning.classification, is_regression=True),
    "text to text": fine_tuning.text_to_text,
    "language modeling": fine_tuning.language_modeling,
    "resumed": fine_tuning.resumed,
    "lora": fine_tuning.lora,
    "image to text": fine_tuning.image_to_text,
    "text to image": fine_tuning.text_to_image,
    "differential privacy": own_loops.private,
    "federated": own_loops.federated,
    "meta learning": own_loops.meta_learning,
    "ppo": own_loops.ppo,
    "ddpg": own_loops.ddpg,
}


def names_of_redco(devices: int) -> Any:
    """Return redco's classes. Its version 0.4.23 has no ``trainer.params``, which its examples use."""
    import redco
    from flax.jax_utils import unreplicate

    assert jax.device_count() == devices

    class Trainer(redco.Trainer):  # type: ignore[misc]
        @property
        def params(self) -> Any:
            return jax.device_get(self.state.params if self.mesh is not None else unreplicate(self.state.params))

    return SimpleNamespace(Deployer=redco.Deployer, Trainer=Trainer, Predictor=redco.Predictor)


def names_of_raysgd(workers: int) -> Any:
    """Return raysgd's classes. Deployers have workers in common, which saves the time to start them."""
    import raysgd.functions as library

    shared = library.Deployer(42, num_workers=workers, workdir=tempfile.mkdtemp(), verbose=False)

    class Deployer(library.Deployer):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, num_workers=workers, **arguments)
            if self.workdir is None:
                self.runs = shared.runs

    return SimpleNamespace(Deployer=Deployer, Trainer=library.Trainer, Predictor=library.Predictor)


if __name__ == "__main__":
    number = int(sys.argv[2])
    names = {"redco": names_of_redco, "raysgd": names_of_raysgd}[sys.argv[1]](number)
    for name, program in PROGRAMS.items():
        try:
            found: Any = [float(value) for value in program(names, number)]
        except Exception:
            found = traceback.format_exc()
        print(json.dumps({name: found}), flush=True)

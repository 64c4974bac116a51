"""What layers above need of a Trainer and its users do not."""

from __future__ import annotations

from raysgd.trainer.assembly import TrainerSpec
from raysgd.trainer.trainer import Trainer


def spec_of_trainer(trainer: Trainer) -> TrainerSpec:
    """All it was given."""
    return trainer._spec


def trainer_of_spec(spec: TrainerSpec) -> Trainer:
    """A Trainer that was given this."""
    trainer = Trainer.__new__(Trainer)
    trainer._set_up(spec)
    return trainer


def warm_up(trainer: Trainer, runs_uri: str) -> None:
    """Ask for its workers' processes, if they are not there, for runs in this folder; returns at once.

    Raises:
        InfeasibleError: The placement group that this process is in cannot hold them.
    """
    trainer._runs_uri = runs_uri
    trainer._connect()

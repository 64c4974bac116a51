"""What is compared. Each system is a module that is imported only in the process that measures it."""

from __future__ import annotations

from pathlib import Path

from bench.systems.base import System

#: Names as the tables show them.
TITLES = {
    "ray_train": "Ray Train",
    "ray_train_tuned": "Ray Train, 0.05 s",
    "bare": "bare actors",
    "torchrun": "torchrun",
    "dd": "dd",
    "pyarrow": "plain pyarrow",
    "raysgd": "raysgd",
}


#: raysgd as it is set up for the measures of recovery.
VARIANTS = ("raysgd_spare", "raysgd_replace", "raysgd_elastic")


def make_fragile_system(name: str, folder: Path) -> System:
    """The system of that name for the measures of recovery, which start it themselves."""
    from bench.systems import fragile

    if name in VARIANTS:
        return fragile.FragileRaysgd(name, folder)
    return fragile.FragileBare(name, folder) if name == "bare" else fragile.FragileRayTrain(name, folder)


def make_system(name: str, folder: Path) -> System:
    """The system of that name; nothing is started yet. Imports what it compares."""
    if name == "raysgd":
        from bench.systems.raysgd_trainer import RaysgdSystem

        return RaysgdSystem(name, folder)
    if name in ("ray_train", "ray_train_tuned"):
        from bench.systems.ray_train import RayTrainSystem

        return RayTrainSystem(name, folder)
    if name == "bare":
        from bench.systems.bare import BareSystem

        return BareSystem(name, folder)
    if name == "torchrun":
        from bench.systems.torchrun import TorchrunSystem

        return TorchrunSystem(name, folder)
    return System(name, folder)

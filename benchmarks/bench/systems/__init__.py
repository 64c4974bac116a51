"""The systems that are compared. Each is a module that is imported only in the process that measures it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bench.systems.base import System

#: Names as the tables show them.
TITLES = {
    "ray_train": "Ray Train",
    "ray_train_tuned": "Ray Train, 0.05 s",
    "bare": "bare actors",
    "torchrun": "torchrun",
    "monarch": "Monarch",
    "horovod_executor": "RayExecutor",
    "horovodrun": "horovodrun",
    "tensorflow": "plain TensorFlow",
    "jax": "plain JAX",
    "dd": "dd",
    "pyarrow": "plain pyarrow",
    "pinned_copy": "plain copy",
    "raysgd": "raysgd",
}

#: raysgd with the settings of the measures of recovery.
VARIANTS = ("raysgd_spare", "raysgd_replace", "raysgd_elastic")
#: raysgd on a Ray whose idle processes have imported torch.
PRELOADING = "raysgd_preloading"
#: raysgd with each backend, by the name of the backend, which is also that of its framework.
WITH_BACKEND = {name: f"raysgd_{name}" for name in ("torch", "horovod", "tensorflow", "jax")}
#: The framework whose group each system makes.
FRAMEWORKS = {
    "torchrun": "torch",
    "horovod_executor": "horovod",
    "horovodrun": "horovod",
    "tensorflow": "tensorflow",
    "jax": "jax",
    **{system: framework for framework, system in WITH_BACKEND.items()},
}


def framework_of(name: str) -> str:
    """Return the framework whose group a system makes: torch by default."""
    return FRAMEWORKS.get(name, "torch")


def missing_framework(name: str) -> str | None:
    """Return the framework that a system needs, if it is not installed."""
    framework = name if name == "monarch" else FRAMEWORKS.get(name)
    return framework if framework and importlib.util.find_spec(framework) is None else None


def make_fragile_system(name: str, folder: Path) -> System:
    """Return the system of that name for measures in which processes are killed; the measure starts it."""
    from bench.systems import fragile

    if name == "torchrun":
        from bench.systems.launched import FragileTorchrun

        return FragileTorchrun(name, folder)
    if name in VARIANTS or name in WITH_BACKEND.values():
        return fragile.FragileRaysgd(name, folder)
    return fragile.FragileBare(name, folder) if name == "bare" else fragile.FragileRayTrain(name, folder)


def make_system(name: str, folder: Path) -> System:
    """Return the system of that name, not started. This imports the system."""
    if name in ("raysgd", PRELOADING) or name in WITH_BACKEND.values():
        from bench.systems.raysgd_trainer import RaysgdSystem

        return RaysgdSystem(name, folder)
    if name in ("ray_train", "ray_train_tuned"):
        from bench.systems.ray_train import RayTrainSystem

        return RayTrainSystem(name, folder)
    if name == "bare":
        from bench.systems.bare import BareSystem

        return BareSystem(name, folder)
    if name == "monarch":
        from bench.systems.monarch import MonarchSystem

        return MonarchSystem(name, folder)
    if name == "horovod_executor":
        from bench.systems.horovod_executor import HorovodExecutorSystem

        return HorovodExecutorSystem(name, folder)
    if name in FRAMEWORKS:
        from bench.systems.launched import LaunchedSystem

        return LaunchedSystem(name, folder)
    return System(name, folder)

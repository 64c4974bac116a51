"""Files that Ray ships to the workers alone: ``runtime_env={"working_dir": ...}`` and ``{"py_modules": [...]}``."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from raysgd.backends.base import Backend, Coordinator, Member
from raysgd.backends.none import NoneBackend, NoneConfig
from raysgd.errors import WorkerError
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)


def env_of(how: str, value: str) -> dict[str, Any]:
    return {how: [value] if how == "py_modules" else value}


def pack(archive: Path, code: str) -> str:
    """Create an archive with one module, as Ray accepts it by URI."""
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("top/shipped_code.py", code)
    return f"file://{archive}"


def use_it() -> tuple[str, int]:
    import shipped_code  # type: ignore[import-not-found]

    return shipped_code.VALUE, os.getpid()


@pytest.mark.parametrize("how", ["working_dir", "py_modules"])
def test_runtime_env_with_a_module_in_an_archive(ray_cluster: Any, tmp_path: Path, how: str) -> None:
    """Ray unpacks the archive once per worker; later changes of the archive have no effect."""
    env = env_of(how, pack(tmp_path / "code.zip", "VALUE = 'first'\n"))
    with make_trainer(tmp_path / "runs", 2, runtime_env=env) as trainer:
        cold = trainer.run(use_it, callbacks=quiet(), returns="all")
        pack(tmp_path / "code.zip", "VALUE = 'edited'\n")
        warm = trainer.run(use_it, callbacks=quiet(), returns="all")
    assert [value for value, _ in cold] == ["first", "first"]
    assert warm == cold, "other code, or other processes"
    env = env_of(how, pack(tmp_path / "code-2.zip", "VALUE = 'edited'\n"))
    with make_trainer(tmp_path / "runs", 1, runtime_env=env) as trainer:
        assert trainer.run(use_it, callbacks=quiet())[0] == "edited"


def test_plain_folder_in_runtime_env_raises_the_error_of_ray(ray_cluster: Any, tmp_path: Path) -> None:
    with (
        make_trainer(tmp_path / "runs", 1, runtime_env=env_of("working_dir", str(tmp_path))) as trainer,
        pytest.raises(WorkerError, match=r"only supported at the job level \(i\.e\., passed to `ray\.init`\)"),
    ):
        trainer.run(use_it, callbacks=quiet())


class ImportsCode(Coordinator):
    """Import the shipped module."""

    def open_rendezvous(self, node_ip: str, members: Sequence[Member]) -> str:
        import shipped_code

        return str(shipped_code.VALUE)


class ReceivesCode(NoneBackend):
    def init_process_group(self, member: Member) -> None:
        os.environ["WHAT_THE_COORDINATOR_HAS"] = member.rendezvous


@dataclass(frozen=True, kw_only=True)
class ShippedConfig(NoneConfig):
    has_coordinator: ClassVar[bool] = True

    def make_backend(self) -> Backend:
        return ReceivesCode()

    def make_coordinator(self) -> Coordinator:
        return ImportsCode()


def test_coordinator_has_the_runtime_env_of_the_workers(ray_cluster: Any, tmp_path: Path) -> None:
    """The runtime environment may hold the framework too."""
    env = env_of("py_modules", pack(tmp_path / "code.zip", "VALUE = 'shipped'\n"))
    with make_trainer(tmp_path / "runs", 1, ShippedConfig(), runtime_env=env) as trainer:
        assert trainer.run(lambda: os.environ["WHAT_THE_COORDINATOR_HAS"], callbacks=quiet()) == "shipped"

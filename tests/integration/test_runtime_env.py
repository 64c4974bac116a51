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

pytestmark = pytest.mark.slow
travels_by_value(__name__)


def env_of(how: str, value: str) -> dict[str, Any]:
    return {how: [value] if how == "py_modules" else value}


def pack(archive: Path, code: str) -> str:
    """An archive as Ray takes them from a URI, with one module in it."""
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("top/shipped_code.py", code)
    return f"file://{archive}"


def use_it() -> tuple[str, int]:
    import shipped_code  # type: ignore[import-not-found]

    return shipped_code.VALUE, os.getpid()


@pytest.mark.parametrize("how", ["working_dir", pytest.param("py_modules", marks=pytest.mark.long)])
def test_a_module_in_an_archive(ray_cluster: Any, tmp_path: Path, how: str) -> None:
    """Ray unpacks it once a worker; what becomes of the archive later changes nothing on the worker's disk."""
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


@pytest.mark.parametrize("how", ["working_dir", "py_modules"])
def test_a_folder_is_for_the_whole_job_and_ray_says_so(ray_cluster: Any, tmp_path: Path, how: str) -> None:
    with (
        make_trainer(tmp_path / "runs", 1, runtime_env=env_of(how, str(tmp_path))) as trainer,
        pytest.raises(WorkerError, match=r"only supported at the job level \(i\.e\., passed to `ray\.init`\)"),
    ):
        trainer.run(use_it, callbacks=quiet())


class TellsCode(Coordinator):
    """Imports what was shipped."""

    def open(self, node_ip: str, members: Sequence[Member]) -> str:
        import shipped_code

        return str(shipped_code.VALUE)


class HearsOfCode(NoneBackend):
    def set_up(self, member: Member) -> None:
        os.environ["WHAT_THE_COORDINATOR_HAS"] = member.rendezvous


@dataclass(frozen=True, kw_only=True)
class ShippedConfig(NoneConfig):
    is_coordinated: ClassVar[bool] = True

    def make(self) -> Backend:
        return HearsOfCode()

    def make_coordinator(self) -> Coordinator:
        return TellsCode()


def test_a_coordinator_has_what_the_workers_have(ray_cluster: Any, tmp_path: Path) -> None:
    """The framework may be shipped as well."""
    env = env_of("py_modules", pack(tmp_path / "code.zip", "VALUE = 'shipped'\n"))
    with make_trainer(tmp_path / "runs", 1, ShippedConfig(), runtime_env=env) as trainer:
        assert trainer.run(lambda: os.environ["WHAT_THE_COORDINATOR_HAS"], callbacks=quiet()) == "shipped"

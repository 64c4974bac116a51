"""The backend of ``doc/extending/backend.md`` works as the page says: as a module, with a script next to it.

It is short, and passes the suite of every backend.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing.backend_nodes_suite import BackendOnNodesSuite
from raysgd.testing.backend_suite import BackendSuite
from support.cluster import cluster_of, cluster_of_one
from support.project import ROOT
from support.runs import make_trainer, quiet, travels_by_value
from support.snippets import snippets

PAGE = ROOT / "doc" / "extending" / "backend.md"

travels_by_value(__name__)
pytestmark = pytest.mark.timeout(240)


def test_the_star_backend_is_short() -> None:
    module, *_ = snippets(PAGE, "python")
    assert len(module.code.splitlines()) < 60


def test_the_star_backend_works(tmp_path: Path) -> None:
    module, *script = [block.code for block in snippets(PAGE, "python")]
    (tmp_path / "star.py").write_text(module)
    (tmp_path / "script.py").write_text("\n".join(script))
    environment = os.environ | {"RAY_ADDRESS": "local"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "[[1.0, 3.0, 5.0], [1.0, 3.0, 5.0]]\n" in done.stdout
    # The error of rank 0 follows within milliseconds, or later on a loaded machine.
    assert re.search(r"the cause \((\(0, 'ConnectionError: a member has left the star'\),)?\)\n", done.stdout), (
        done.stdout
    )
    assert "\n[1.0, 3.0, 5.0]\n" in done.stdout


@pytest.fixture(scope="module")
def star_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As pip leaves a distribution with its entry point: this process and its children can import the module."""
    folder = tmp_path_factory.mktemp("with_star")
    (entry_point,) = snippets(PAGE, "toml")
    tomllib = pytest.importorskip("tomllib")  # Python has it from 3.11 on
    points = tomllib.loads(entry_point.code)["project"]["entry-points"]
    module, *_ = snippets(PAGE, "python")
    (folder / "star.py").write_text(module.code)
    about = folder / "star-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: star\nVersion: 1.0\n")
    lines = [
        line for group, of_it in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in of_it.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", path)
        yield
        sys.modules.pop("star", None)


@pytest.fixture(scope="class")
def cluster_with_star(star_is_installed: None, _no_process_is_left: None) -> Iterator[None]:
    with cluster_of_one(num_cpus=8):
        yield


@pytest.fixture(scope="class")
def cluster(star_is_installed: None, _no_process_is_left: None) -> Iterator[Any]:
    with cluster_of(2, 2) as cluster:
        yield cluster


class Starred:
    """What both suites need to know of it."""

    def make_config(self) -> raysgd.BackendConfig:
        import star  # type: ignore[import-not-found]

        return star.StarConfig()  # type: ignore[no-any-return]

    @staticmethod
    def make_total() -> Callable[[float], float]:
        import star

        return star.total  # type: ignore[no-any-return]


@pytest.mark.usefixtures("cluster_with_star")
class TestStar(Starred, BackendSuite):
    def test_it_has_a_name(self, tmp_path: Path) -> None:
        make_total = self.make_total
        with make_trainer(tmp_path, 2, "star") as trainer:
            assert trainer.run(lambda: make_total()(1.0), callbacks=quiet(), returns="all") == [2.0, 2.0]


class TestStarOnNodes(Starred, BackendOnNodesSuite):
    """All of it."""

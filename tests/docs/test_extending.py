"""The backend of ``doc/extending/backend.md`` works as the page says: a module of its own, and a script beside it.

And it is short, and does what every backend must do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

import raysgd
from raysgd.testing.backend_suite import BackendSuite
from support.cluster import ClusterState, start_ray
from support.project import ROOT
from support.runs import travels_by_value
from support.snippets import snippets

PAGE = ROOT / "doc" / "extending" / "backend.md"

travels_by_value(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


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
    # What rank 0 says of it follows within milliseconds, which a loaded machine may not keep.
    assert re.search(r"the cause \((\(0, 'ConnectionError: a member has left the star'\),)?\)\n", done.stdout)
    assert "\n[1.0, 3.0, 5.0]\n" in done.stdout


@pytest.fixture(scope="class")
def cluster_with_star(tmp_path_factory: pytest.TempPathFactory, _no_process_is_left: None) -> Iterator[None]:
    """One whose processes can import the module, as this one can."""
    folder = tmp_path_factory.mktemp("with_star")
    module, *_ = snippets(PAGE, "python")
    (folder / "star.py").write_text(module.code)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", path)
        start_ray(num_cpus=8, include_dashboard=False, namespace="tests")
        yield
        left = ClusterState.empty().leftovers()
        ray.shutdown()
        sys.modules.pop("star", None)
    assert not left, "; ".join(left)


@pytest.mark.usefixtures("cluster_with_star")
class TestStar(BackendSuite):
    def make_config(self) -> raysgd.BackendConfig:
        import star  # type: ignore[import-not-found]

        return star.StarConfig()  # type: ignore[no-any-return]

    @staticmethod
    def make_total() -> Callable[[float], float]:
        import star

        return star.total  # type: ignore[no-any-return]

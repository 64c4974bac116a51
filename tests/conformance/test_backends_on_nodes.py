"""The conformance suite for backends on two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing.backend_nodes_suite import BackendOnNodesSuite
from support.frameworks import needs_horovod
from support.runs import quiet, travels_by_value
from support.totals import TOTALS

travels_by_value(__name__)
travels_by_value("support.totals")
pytestmark = pytest.mark.timeout(180)


class TestTorch(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TorchConfig()


class TestEnv(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["env"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.EnvConfig()


@needs_horovod
class TestHorovod(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["horovod-torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig()

    def test_horovod_local_and_cross_ranks_follow_the_nodes(self, cluster: Any, tmp_path: Path) -> None:
        with self.trainer(tmp_path, 4, placement_strategy="PACK") as trainer:
            seen = trainer.run(places_in_horovod, callbacks=quiet(), returns="all")
        assert seen == [(rank, 4, rank % 2, 2, rank // 2, 2) for rank in range(4)]


def places_in_horovod() -> tuple[int, ...]:
    import horovod.torch as hvd

    hvd.init()  # scripts call this again; it has no effect
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


@pytest.mark.tensorflow
class TestTensorflow(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TensorflowConfig()


class TestJax(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["jax"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.JaxConfig()

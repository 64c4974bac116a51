"""The conformance suite for backends on two nodes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

import raysgd
from raysgd.testing.backend_suite import BackendOnNodesSuite
from support.cluster import ClusterState
from support.runs import travels_by_value
from support.totals import TOTALS

travels_by_value(__name__)
travels_by_value("support.totals")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


@pytest.fixture(scope="module", autouse=True)
def two_nodes(_no_process_is_left: None) -> Iterator[None]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, namespace="tests")
    yield
    left = ClusterState.empty().leftovers()
    ray.shutdown()
    cluster.shutdown()
    assert not left, "; ".join(left)


class TestTorch(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TorchConfig()


@needs_horovod
class TestHorovod(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["horovod-torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig()


class TestTensorflow(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TensorflowConfig()


class TestJax(BackendOnNodesSuite):
    make_total = staticmethod(TOTALS["jax"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.JaxConfig()

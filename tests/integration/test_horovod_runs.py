"""What a user sees of the Horovod backend beside what all backends do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import raysgd
from support.frameworks import needs_horovod
from support.runs import make_trainer, quiet, travels_by_value
from support.totals import with_horovod_and_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("ray_cluster"), needs_horovod]
travels_by_value(__name__)
travels_by_value("support.totals")


def interface_and_sum() -> tuple[str | None, float]:
    return os.environ.get("HOROVOD_GLOO_IFACE"), with_horovod_and_torch()(1.0)


def test_the_first_interface_that_a_node_has_is_used(tmp_path: Path) -> None:
    config = raysgd.HorovodConfig(nics=["no_such_nic", "lo"])
    with make_trainer(tmp_path, 2, config) as trainer:
        assert trainer.run(interface_and_sum, callbacks=quiet(), returns="all") == [("lo", 2.0)] * 2


def test_a_node_that_has_none_of_them_is_told_with_what_it_has(tmp_path: Path) -> None:
    config = raysgd.HorovodConfig(nics=["no_such_nic"])
    with (
        make_trainer(tmp_path, 2, config) as trainer,
        pytest.raises(ValueError, match=r"HorovodConfig\(nics=\['no_such_nic'\]\): \S+ has .*lo"),
    ):
        trainer.run(interface_and_sum, callbacks=quiet())

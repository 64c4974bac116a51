"""Programs in the form of redco's examples run, but for the import as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("flax")
backends = pytest.importorskip("jax.extend").backend
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]

from support import functions_redco as programs  # noqa: E402
from support.functions_local import LocalRuns  # noqa: E402


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The working directory of the program that runs next, as a list of one."""
    before = jax.config.jax_num_cpu_devices
    backends.clear_backends()
    jax.config.update("jax_num_cpu_devices", 1)
    folder = [str(tmp_path / "work")]
    monkeypatch.setattr("raysgd.functions.deployer.FunctionRuns", lambda *args: LocalRuns(Path(folder[0])))
    yield folder
    backends.clear_backends()
    jax.config.update("jax_num_cpu_devices", before)


def check_near(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


def test_language_model_accumulates_and_continues_from_its_last_checkpoint(workdir: list[str]) -> None:
    first, _, _ = programs.language_modeling(workdir[0], 1)
    assert first == 4  # of 4 rows each, in updates of 8 rows
    continued = programs.language_modeling(workdir[0], 2)
    workdir[0] += "_other"
    at_once = programs.language_modeling(workdir[0], 2)
    assert continued[0] == at_once[0] == 8
    assert continued[1] == pytest.approx(at_once[1], rel=1e-5)
    check_near(continued[2], at_once[2])


def test_low_rank_updates_leave_the_model_as_it_is(workdir: list[str]) -> None:
    given, trained, saved, examples, preds = programs.lora(workdir[0])
    jax.tree.map(np.testing.assert_array_equal, trained["model"], given["model"])
    assert np.abs(trained["lora"]["b"]).max() > 0.01
    check_near(saved, trained["lora"])
    assert [len(row) >= len(each["token_ids"]) for each, row in zip(examples, preds, strict=True)] == [True] * 12


def test_average_of_the_clients_learns() -> None:
    assert programs.federated(0) < 0.5
    assert programs.federated(3) > 0.9


def test_private_training_without_noise_is_plain_training() -> None:
    check_near(*programs.private(0.0))
    noisy, plain = programs.private(0.5)
    assert np.abs(noisy["head"]["kernel"] - plain["head"]["kernel"]).max() > 0.01

"""Which settings of the driver's frameworks travel with a run, and how they are written and undone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch

from raysgd._util import numeric_settings
from raysgd.workers.pickling import Packed, dumps, dumps_call, loads, loads_call
from raysgd.workers.process.reset import Baseline


@pytest.fixture(autouse=True)
def settings() -> Iterator[numeric_settings.Settings]:
    before = numeric_settings.read()
    yield before
    numeric_settings.write(before)


def set_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def warn_of_random_kernels() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def set_matmul_precision() -> None:
    torch.set_float32_matmul_precision("medium")


def set_newer_flag() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch then refuses to read the older flags


def set_x64() -> None:
    jax.config.update("jax_enable_x64", True)


def dtype_of_ones() -> str:
    return str(jax.numpy.ones(1, float).dtype)


def set_promotion() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")


CHANGES: list[tuple[Callable[[], None], str, str, Any]] = [
    (set_default_dtype, "torch", "default_dtype", "float64"),
    (warn_of_random_kernels, "torch", "deterministic_algorithms", "warn"),
    (set_matmul_precision, "torch", "float32_matmul_precision", "medium"),
    (set_newer_flag, "torch", "cuda.matmul.fp32_precision", "tf32"),
    (set_x64, "jax", "jax_enable_x64", True),
    (set_promotion, "jax", "jax_numpy_dtype_promotion", "strict"),
]


def test_program_that_changes_nothing_sends_nothing() -> None:
    assert numeric_settings.read_changed() == {}


@pytest.mark.parametrize(("change", "framework", "setting", "value"), CHANGES)
def test_changed_setting_travels_and_is_undone(
    change: Callable[[], None], framework: str, setting: str, value: Any, settings: numeric_settings.Settings
) -> None:
    baseline = Baseline()  # of a worker
    baseline.note_framework()
    change()
    travelling = numeric_settings.read_changed()
    assert list(travelling) == [framework]
    assert travelling[framework][setting] == value
    baseline.restore(may_freeze=False)
    assert numeric_settings.read() == settings
    numeric_settings.write(travelling)
    assert numeric_settings.read()[framework][setting] == value


def test_setting_of_a_framework_that_a_run_imported_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = Baseline()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "jax")
        baseline.note_framework()
    set_x64()
    baseline.restore(may_freeze=False)
    assert jax.numpy.ones(1, float).dtype == "float32"


def test_variable_of_the_workers_decides_on_its_setting() -> None:
    set_x64()
    assert numeric_settings.read_changed(["JAX_ENABLE_X64"]) == {}
    assert list(numeric_settings.read_changed(["OTHER"])) == ["jax"]


def test_settings_travel_with_each_call_of_the_users_code() -> None:
    """As a train_func, a method of the class API, and a function of a trial."""
    set_x64()
    calls = dumps_call(dtype_of_ones, "the function"), dumps(Packed.of(dtype_of_ones, "train_func").bind({}))
    jax.config.update("jax_enable_x64", False)
    for open_call, call in zip((loads_call, loads), calls, strict=True):
        assert open_call(call)() == "float64"
        jax.config.update("jax_enable_x64", False)


def test_precision_within_a_block_travels() -> None:
    with jax.enable_x64(True):
        assert numeric_settings.read_changed()["jax"]["jax_enable_x64"] is True
    assert numeric_settings.read_changed() == {}


def test_framework_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    numeric_settings.write({"jax": {"jax_enable_x64": True}})
    assert not jax.config.jax_enable_x64


def test_reading_imports_no_framework() -> None:
    code = (
        "import sys; from raysgd._util import numeric_settings; assert numeric_settings.read_changed() == {}; "
        "print(*sorted({'torch', 'jax', 'keras', 'tensorflow'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_precision_of_keras_travels() -> None:
    code = """
import keras
from raysgd._util import numeric_settings
assert numeric_settings.read_changed() == {}, numeric_settings.read_changed()
keras.config.set_dtype_policy("mixed_bfloat16")
travelling = numeric_settings.read_changed()
keras.config.set_dtype_policy("float32")
numeric_settings.write(travelling)
print(keras.layers.Dense(1).compute_dtype)
"""
    pytest.importorskip("keras")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert output.stdout == "bfloat16\n", output.stderr

"""Flags and a file make the engine's config; errors name the flag or the file, and the field."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cli.engine_flags import FILE_FLAG, PREFIX, engine_flags, make_engine_config
from raysgd.cli.flags import FlagsCommand
from raysgd.engine.config import EngineConfig, current_engine_config, merge_configs, using_engine_config
from raysgd.errors import ConfigError, UnknownArgumentError


def config_of(*words: str) -> EngineConfig | None:
    command = FlagsCommand("test", hints={}, params=engine_flags())
    with command.make_context("test", list(words)) as ctx:
        return make_engine_config(command.given(ctx))


CONFIGS = st.builds(
    EngineConfig,
    precision=st.sampled_from(["fp32", "bf16", "fp16", "bf16-true"]),
    zero_stage=st.integers(0, 3),
    tensor_parallel=st.integers(1, 8),
    accumulation_steps=st.integers(1, 64),
    activation_checkpointing=st.sampled_from([None, "full", "selective"]),
    clip_grad_norm=st.none() | st.floats(1e-6, 1e6),
    compile=st.sampled_from([None, "model", "blocks"]),
    fused_optimizer=st.none() | st.booleans(),
    weighted_gradients=st.booleans(),
    plan=st.sampled_from([None, "auto"]),
    memory_per_device=st.none() | st.floats(1e6, 1e12),
)


@given(CONFIGS)
def test_every_config_can_be_written_as_flags(config: EngineConfig) -> None:
    words = []
    for field in fields(config):
        words += [f"{PREFIX}{field.name.replace('_', '-')}", str(getattr(config, field.name)).lower()]
    assert config_of(*words) == config


@given(CONFIGS)
def test_every_config_can_be_written_as_a_file(tmp_path_factory: pytest.TempPathFactory, config: EngineConfig) -> None:
    path = tmp_path_factory.mktemp("engine") / "engine.json"
    path.write_text(json.dumps({field.name: getattr(config, field.name) for field in fields(config)}))
    assert config_of(FILE_FLAG, str(path)) == config


def test_no_flag_is_no_config() -> None:
    assert config_of() is None
    assert config_of("--engine.cpu-offload", "--engine.zero-stage=3") == EngineConfig(cpu_offload=True, zero_stage=3)
    assert config_of("--engine.precision=fp32") == EngineConfig()


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(
        "# all of it\nprecision: bf16\nzero-stage: 3\ncpu_offload: true\nclip_grad_norm: 1e-1\ncompile: null\n"
    )
    assert config_of(FILE_FLAG, str(path)) == EngineConfig(
        precision="bf16", zero_stage=3, cpu_offload=True, clip_grad_norm=0.1
    )
    words = ["--engine.precision", "fp16", "--engine.cpu-offload", "false", "--engine.clip-grad-norm", "none"]
    assert config_of(FILE_FLAG, str(path), *words) == EngineConfig(precision="fp16", zero_stage=3)


def test_automatic_plan_has_flags(tmp_path: Path) -> None:
    words = ["--engine.plan", "auto", "--engine.memory-per-device", "40e9", "--engine.zero-stage=1"]
    assert config_of(*words) == EngineConfig(plan="auto", memory_per_device=40e9, zero_stage=1)
    path = tmp_path / "engine.yaml"
    path.write_text("plan: auto\nmemory-per-device: 40e9\n")
    assert config_of(FILE_FLAG, str(path), "--engine.plan", "none") == EngineConfig(memory_per_device=40e9)


def test_file_of_comments_is_a_config_of_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("# precision: bf16\n")
    assert config_of(FILE_FLAG, str(path)) == EngineConfig()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--engine.plan", "fast"], "--engine.plan, plan: plan='fast' is not known; give \"auto\"."),
        (
            ["--engine.memory-per-device", "40"],
            "--engine.memory-per-device, memory_per_device: memory_per_device=40 is less than a megabyte",
        ),
        (
            ["--engine.zero-stage", "7"],
            "--engine.zero-stage, zero_stage: zero_stage=7 is not known; give 0, 1, 2 or 3.",
        ),
        (["--engine.precision", "bf61"], "--engine.precision, precision: precision='bf61' is not known"),
        (
            ["--engine.tensor-parallel", "two"],
            "--engine.tensor-parallel, tensor_parallel: tensor_parallel='two' is a str; give an int >= 1.",
        ),
        (
            ["--engine.cpu-offload=maybe"],
            "--engine.cpu-offload, cpu_offload: cpu_offload='maybe' is not a bool; give True or False.",
        ),
        (["--engine.cpu-offload"], "--engine.cpu-offload, cpu_offload: cpu_offload=True needs zero_stage=3"),
        (["--engine.zero", "3"], "did you mean '--engine.zero-stage'?"),
        (
            ["--engine.micro-batches", "4"],
            "--engine.micro-batches, micro_batches: micro_batches cuts the batches of a pipeline",
        ),
        ([FILE_FLAG, "engine.toml"], "give a file that ends in .yaml or .json"),
        ([FILE_FLAG, "missing.yaml"], "missing.yaml cannot be read: No such file"),
    ],
)
def test_unusable_flag_is_named(words: list[str], text: str) -> None:
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        config_of(*words)
    error = caught.value
    assert text in (error.format_message() if isinstance(error, click.UsageError) else str(error))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("engine.yaml", "zero_stage: 7", "engine.yaml, line 1, zero_stage: zero_stage=7 is not known"),
        (
            "engine.yaml",
            "tensor_parallel: two",
            "engine.yaml, line 1, tensor_parallel: tensor_parallel='two' is a str; give an int >= 1.",
        ),
        ("engine.yaml", "tensor_parallel: 2.5", "engine.yaml, line 1, tensor_parallel: tensor_parallel=2.5 is a float"),
        ("engine.yaml", "zero-stage: 1\nzero_stage: 2", "engine.yaml, line 2: zero_stage is given twice"),
        (
            "engine.yaml",
            "precison: bf16",
            "engine.yaml, line 1, precison: EngineConfig has no argument 'precison' (did you mean 'precision'?)",
        ),
        ("engine.yaml", "- bf16", "engine.yaml: the file is not a mapping"),
        ("engine.yaml", "precision: [", "engine.yaml, line 1: "),
        ("engine.json", '{"zero_stage": 1,\n', "engine.json, line 2: "),
        ("engine.json", '{"zero_stage": 1, "zero_stage": 2}', "engine.json, line 1: zero_stage is given twice."),
        (
            "engine.json",
            '{"zero_stage": 3.0}',
            "engine.json, line 1, zero_stage: zero_stage=3.0 is not known; give 0, 1, 2 or 3.",
        ),
        ("engine.json", '{"cpu_offload": 1}', "engine.json, line 1, cpu_offload: cpu_offload=1 is not a bool"),
    ],
)
def test_unusable_file_is_named_with_its_key(tmp_path: Path, name: str, content: str, text: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        config_of(FILE_FLAG, str(tmp_path / name))
    assert text in str(caught.value)


def test_unknown_key_is_an_unknown_argument(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("zero: 1")
    with pytest.raises(UnknownArgumentError):
        config_of(FILE_FLAG, str(tmp_path / "engine.yaml"))


def test_error_of_a_flag_that_does_not_fit_the_file_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("zero_stage: 2")
    with pytest.raises(ConfigError, match=r"^--engine\.cpu-offload, cpu_offload: cpu_offload=True needs zero_stage=3"):
        config_of(FILE_FLAG, str(tmp_path / "engine.yaml"), "--engine.cpu-offload")


def test_help_has_a_text_for_every_field() -> None:
    flags: dict[str, Any] = {flag.flag: flag for flag in engine_flags()}
    assert len(flags) == 1 + len(fields(EngineConfig))
    assert all(flag.help for flag in flags.values())
    assert flags["--engine.precision"].metavar == "fp32|bf16|fp16|bf16-true"
    assert [name for name, flag in flags.items() if flag.is_switch] == [
        "--engine.cpu-offload",
        "--engine.sequence-parallel",
        "--engine.fused-optimizer",
        "--engine.find-unused-parameters",
        "--engine.weighted-gradients",
    ]


def test_values_of_the_command_replace_those_of_the_script_also_where_they_are_defaults() -> None:
    of_script = EngineConfig(precision="bf16", zero_stage=3, clip_grad_norm=1.0)
    words = ["--engine.zero-stage", "0", "--engine.precision", "fp32", "--engine.clip-grad-norm", "none"]
    override = pickle.loads(pickle.dumps(config_of(*words)))
    assert merge_configs(of_script, override) == EngineConfig()
    assert merge_configs(of_script, config_of("--engine.accumulation-steps", "2")) == replace(
        of_script, accumulation_steps=2
    )
    with pytest.raises(ConfigError, match="cpu_offload=True needs zero_stage=3"):
        merge_configs(EngineConfig(zero_stage=3, cpu_offload=True), override)


def test_current_engine_config_is_the_innermost() -> None:
    assert current_engine_config() is None
    outer, inner = EngineConfig(zero_stage=1), EngineConfig(zero_stage=2)
    with using_engine_config(outer):
        with using_engine_config(inner):
            assert current_engine_config() is inner
        assert current_engine_config() is outer
    assert current_engine_config() is None

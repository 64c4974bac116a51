"""Packages of callbacks: which are checked in the driver before a run, and which only where the callback runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from raysgd.callbacks import Callback
from raysgd.config import RunConfig
from raysgd.trainer import assembly
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.spec import make_spec


class Logger(Callback):
    packages = {"no_such_package": "no-such-package"}  # noqa: RUF012


class LoggerInController(Logger):
    runs_in = "controller"


class LoggerInWorker(Logger):
    runs_in = "worker"


class Checked(Exception):
    """Raised by the first step after the checks of the callbacks."""


def begin(monkeypatch: pytest.MonkeyPatch, callback: Callback, runtime_env: dict[str, Any], **settings: Any) -> None:
    def raise_checked(*_: Any) -> Any:
        raise Checked

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=runtime_env))
    monkeypatch.setattr(assembly, "_make_request", raise_checked)
    spec = make_spec(backend="none", **settings)
    run = assembly.check_run(RunArguments(print, callbacks=[callback]))
    assembly.begin_run(cast(Any, None), spec, run, "runs")


@pytest.mark.parametrize("kind", [Logger, LoggerInController])
@pytest.mark.parametrize("runtime_env", [{}, {"env_vars": {"A": "1"}, "working_dir": "."}])
def test_missing_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[Callback], runtime_env: dict[str, Any]
) -> None:
    with pytest.raises(
        ImportError, match=f"{kind.__name__} needs no_such_package, which is not installed here; run: pip"
    ):
        begin(monkeypatch, kind(), runtime_env)


@pytest.mark.parametrize("name", ["pip", "uv", "conda", "image_uri"])
def test_package_of_a_controller_callback_may_come_with_the_jobs_environment(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(Checked):
        begin(monkeypatch, LoggerInController(), {name: ["no-such-package"]})
    with pytest.raises(ImportError):
        begin(monkeypatch, Logger(), {name: ["no-such-package"]})


def test_package_of_a_detached_runs_callback_is_checked_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Checked):
        begin(monkeypatch, LoggerInController(), {}, run_config=RunConfig(name="x", detached=True))


def test_package_of_a_worker_callback_is_not_needed_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Checked):
        begin(monkeypatch, LoggerInWorker(), {})

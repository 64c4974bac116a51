"""``raysgd run script.py``: a script on workers of a Ray cluster, as one run of a `raysgd.trainer.trainer.Trainer`. Driver side.

What needs Ray is imported after the flags and the script were checked.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from raysgd.callbacks.base import Callback
from raysgd.callbacks.progress.callback import Mode, ProgressCallback
from raysgd.checkpoint.links import LAST
from raysgd.cli.console import FAILED, SIGNALLED, SUCCEEDED, print_error, print_json
from raysgd.cli.engine_flags import PREFIX, engine_flags, make_engine_config
from raysgd.cli.flags import Flag, FlagsCommand
from raysgd.cli.script import Script, ScriptExit
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.config.checks import check_choice
from raysgd.config.run import DEFAULT_STORAGE_PATH, Reduction
from raysgd.engine.config import EngineConfig
from raysgd.errors import CheckpointNotFoundError, ConfigError, RaySGDError, UsageError, WorkerTraceback

if TYPE_CHECKING:
    from raysgd.backends.base import BackendConfig
    from raysgd.result import Result
    from raysgd.trainer.trainer import Trainer

_ARGUMENTS = "[FLAGS] SCRIPT.py|-m MODULE [ARGUMENTS OF THE SCRIPT]"
#: Before the name of a module of a package, in place of the path of a script.
_MODULE_FLAGS = ("-m", "--module")
_DESCRIPTION = (
    "Run a Python script, or with -m a module of a package, as __main__ on workers of a Ray cluster, with results, "
    "checkpoints and recovery as in a run of raysgd.Trainer. Flags stand before the script; what follows its name belongs "
    "to the script."
)
_WORKERS_HINT = "give the number of all workers as --num-workers; Ray places them on its nodes"
#: Flags that set the same limit.
_LIMITS = ("--max-failures", "--max-restarts")
#: What to give for flags of other launchers.
HINTS = {
    **dict.fromkeys(("--nproc-per-node", "--nproc", "--nnodes", "--num-nodes", "-np", "--world-size"), _WORKERS_HINT),
    "--num-processes": _WORKERS_HINT,
    **dict.fromkeys(("--num-gpus", "--use-gpu", "--gpus"), "give --gpus-per-worker 1"),
    **dict.fromkeys(
        (
            "--rdzv-backend",
            "--rdzv-endpoint",
            "--rdzv-conf",
            "--master-addr",
            "--master-port",
            "--standalone",
            "--node-rank",
        ),
        "raysgd chooses where the workers meet; leave it out",
    ),
    "--rdzv-id": "give --name",
    "--log-dir": "the output of all workers comes to the terminal; leave it out",
    "--precision": "give --engine.precision",
    "--mixed-precision": "give --engine.precision bf16",
    "--config": "give --engine-config, or the script's own flag after its name",
    "--ray-address": "give --address",
}


def parse_num_workers(text: str) -> int | tuple[int, float]:
    """Return the number of workers that ``8``, or for elastic training ``2:8`` or ``2:inf``, means."""
    smallest, is_range, largest = text.partition(":")
    if not is_range:
        return ScalingConfig(num_workers=click.INT(text)).min_workers
    limit = math.inf if largest == "inf" else click.INT(largest)
    scaling = ScalingConfig(num_workers=(click.INT(smallest), limit))
    return scaling.min_workers, scaling.max_workers


def _parse_pair(text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not name or not is_pair:
        raise ConfigError("give NAME=VALUE")
    return name, value


def _parse_variable(text: str) -> tuple[str, str]:
    if "=" in text:
        return _parse_pair(text)
    if text not in os.environ:
        raise ConfigError("the variable is not set here; give NAME=VALUE")
    return text, os.environ[text]


def _parse_reduction(text: str) -> tuple[str, str]:
    name, how = _parse_pair(text)
    return name, check_choice(name, how, get_args(Reduction))


def _parse_progress(text: str) -> str:
    return check_choice("progress", text, get_args(Mode))


FLAGS = [
    Flag(
        "--num-workers",
        parse=parse_num_workers,
        metavar="N|MIN:MAX",
        help="number of workers; MIN:MAX for elastic training, MAX may be inf (default: 1)",
    ),
    Flag("--cpus-per-worker", parse=click.FLOAT, metavar="NUMBER", help="CPUs of each worker (default: 1)"),
    Flag("--gpus-per-worker", parse=click.FLOAT, metavar="NUMBER", help="GPUs of each worker (default: 0)"),
    Flag(
        "--backend",
        metavar="NAME",
        help="torch (the default), horovod, tensorflow, jax, none; or env: the variables of torchrun, for a script that "
        "forms its group itself",
    ),
    Flag(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster; auto: a running one, local: a new one (default: as RAY_ADDRESS says, else one that runs on "
        "this machine, else a new one)",
    ),
    Flag(
        "--working-dir",
        metavar="FOLDER",
        help="folder that Ray copies to the workers and makes their working directory, for clusters without a shared disk",
    ),
    Flag(
        "--env",
        parse=_parse_variable,
        metavar="NAME[=VALUE]",
        may_repeat=True,
        help="environment variable of the workers; without a value, the one of this shell; may be repeated",
    ),
    Flag("--name", metavar="NAME", help="name of the run's folder (default: the script's name and the time)"),
    Flag(
        "--storage-path",
        metavar="PATH",
        help=f"folder, or URI, that holds the folders of runs (default: {DEFAULT_STORAGE_PATH})",
    ),
    Flag(
        "--resume-from",
        metavar="PATH|last",
        help="start from a checkpoint, or from the newest one of a run; last: from the newest one of the earlier runs of "
        "--name, if there is one",
    ),
    Flag(
        "--num-to-keep",
        parse=click.INT,
        metavar="N",
        help="checkpoints to keep, with --resume-from last of all runs of --name (default: all)",
    ),
    Flag(
        "--reduce",
        parse=_parse_reduction,
        metavar="METRIC=HOW",
        may_repeat=True,
        help="compute a metric over all ranks: mean, sum, min, max, last or first; may be repeated",
    ),
    Flag(
        "--progress",
        parse=_parse_progress,
        metavar="auto|live|lines|off",
        help="how results are shown: a live table, lines, or not at all (default: auto)",
    ),
    Flag("--seed", parse=click.INT, metavar="N", help="seed of the generators of each rank"),
    Flag(
        "--max-failures",
        parse=click.INT,
        metavar="N",
        help="how often the script may run again after workers died; -1: no limit (default: 3)",
    ),
    Flag(
        "--grace",
        parse=click.FLOAT,
        metavar="SECONDS",
        help="time to save and end after Ctrl-C or SIGTERM (default: 30)",
    ),
    Flag(
        "--max-restarts",
        parse=click.INT,
        metavar="N",
        help="as --max-failures, also after an exception or exit status of the script, as with torchrun",
    ),
    Flag(
        "--detached",
        parse=click.BOOL,
        metavar="true|false",
        is_switch=True,
        help="the run continues if this command ends before it; needs --name and a running cluster",
    ),
    Flag(
        "--json",
        parse=click.BOOL,
        metavar="true|false",
        is_switch=True,
        help="print JSON as the last line: the run's folder, its last result and newest checkpoint; no progress, unless "
        "--progress is given",
    ),
]


@dataclass(frozen=True)
class Order:
    """The run that a command line asks for, checked without Ray.

    Attributes:
        given: The values of the flags, by name.
        token: See `raysgd.cli.script.OutputMark`.
    """

    given: Mapping[str, Any]
    script: Script
    token: str


def make_order(given: Mapping[str, Any], path: str, arguments: Sequence[str]) -> Order:
    """Check what needs no cluster.

    Raises:
        ConfigError: A flag cannot work, or there is no such script.
    """
    if all(flag in given for flag in _LIMITS):
        raise ConfigError("--max-failures and --max-restarts set the same limit; give one of them.")
    if given.get("--resume-from") == LAST and "--name" not in given:
        raise ConfigError("--resume-from last needs --name, by which the earlier runs are found.")
    module = None
    if path in _MODULE_FLAGS:
        if not arguments:
            raise ConfigError(f"{path} needs the name of a module: raysgd run {path} PACKAGE.MODULE.")
        module, path = find_module(arguments[0], given.get("--working-dir") or os.getcwd())
        arguments = arguments[1:]
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the script {path} cannot be read: {error.strerror}.") from None
    engine = make_engine_config(given)
    _check_replicas(given.get("--num-workers", 1), (engine or EngineConfig()).workers_per_replica)
    token = uuid.uuid4().hex
    script = Script(
        os.path.abspath(path),
        source,
        tuple(arguments),
        folder=os.getcwd(),
        shipped_path=_shipped_path(path, given.get("--working-dir")),
        module=module,
        engine=engine,
        token=token,
    )
    return Order(given, script, token)


def find_module(name: str, folder: str) -> tuple[str, str]:
    """Find a module as ``python -m`` does, without importing its packages.

    Args:
        name: Its name with dots.
        folder: Where to look first, before Python's path.

    Returns:
        The module's name, with ``.__main__`` for a package, and the path of its file.

    Raises:
        ConfigError: There is no such module, or it is a package without ``__main__.py``.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"-m {name} is not the name of a module; give one such as package.train, without .py.")
    for root in (folder, *sys.path):
        place = Path(root, *parts)
        if (file := place.with_suffix(".py")).is_file():
            return name, str(file)
        if (file := place / "__main__.py").is_file():
            return f"{name}.__main__", str(file)
        if (place / "__init__.py").is_file():
            raise ConfigError(f"-m {name} is a package without __main__.py; give one of its modules: {name}.NAME.")
    raise ConfigError(
        f"-m {name}: there is no such module in {folder} or on Python's path; give one, or the path of a script."
    )


def _check_replicas(num_workers: int | tuple[int, float], each: int) -> None:
    """Check that the workers hold whole replicas of the model."""
    for limit in (num_workers,) if isinstance(num_workers, int) else num_workers:
        if limit != math.inf and limit % each:
            more = math.ceil(limit / each) * each
            raise ConfigError(
                f"--num-workers: {limit:g} workers do not hold whole replicas of the model, since {PREFIX}tensor-parallel and "
                f"{PREFIX}pipeline-parallel make {each} workers hold one; give {more} in place of {limit:g}."
            )


def _shipped_path(path: str, working_dir: str | None) -> str | None:
    """Return the script's path inside of the folder that Ray copies."""
    if working_dir is None:
        return None
    if not os.path.isdir(working_dir):
        raise ConfigError(f"--working-dir {working_dir}: there is no such folder.")
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(working_dir))
    if inside.startswith(os.pardir):
        raise ConfigError(f"--working-dir {working_dir} does not contain the script {path}; give a folder that does.")
    return inside


# -- the run -----------------------------------------------------------------------------------------------------------


def trainer_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `raysgd.Trainer` that the flags mean.

    Raises:
        ConfigError: A value cannot work.
    """
    limit = given.get("--max-failures", given.get("--max-restarts", FailureConfig.max_failures))
    failure = FailureConfig(
        max_failures=limit,
        retry_on=(Exception,) if "--max-restarts" in given else (),
        stop_grace_s=given.get("--grace", FailureConfig.stop_grace_s),
    )
    environment = dict(given.get("--env", ()))
    return {
        "num_workers": given.get("--num-workers", 1),
        "backend": _backend(given, limit),
        "cpus_per_worker": given.get("--cpus-per-worker", 1),
        "gpus_per_worker": given.get("--gpus-per-worker", 0),
        "workers_per_replica": (make_engine_config(given) or EngineConfig()).workers_per_replica,
        "runtime_env": {"env_vars": environment} if environment else None,
        "seed": given.get("--seed"),
        "run_config": RunConfig(
            name=given.get("--name"),
            storage_path=given.get("--storage-path"),
            detached=given.get("--detached", False),
            ray_address=given.get("--address"),
        ),
        "failure_config": failure,
        "checkpoint_config": CheckpointConfig(
            num_to_keep=given.get("--num-to-keep"),
            scope="folder" if given.get("--resume-from") == LAST else "run",
        ),
    }


def _backend(given: Mapping[str, Any], max_failures: int) -> str | BackendConfig:
    name: str = given.get("--backend", "torch")
    if name != "env":
        return name
    from raysgd.backends.env import EnvConfig

    return EnvConfig(max_restarts=max_failures, run_id=given.get("--name") or EnvConfig.run_id)


def _run(order: Order, words: Sequence[str], restored: str | None = None) -> int:
    """Run a script; ``restored`` is the folder of the run that it continues. Arguments as of `_make_trainer`."""
    ended: dict[str, Any] = {}

    def run() -> None:
        with _make_trainer(order.given, restored) as trainer:
            _run_on(trainer, order, ended)

    status = run_to_end(["run", *words], "script", run)
    if ended and order.given.get("--json", False):
        print_json(ended, is_line=True)  # Ray has ended: no line of a worker comes later
    return status


def show_all_output() -> None:
    """Let Ray print each rank's lines, as other launchers do. Ray reads these variables when it is imported."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


def run_to_end(words: Sequence[str], what: str, run: Callable[[], None]) -> int:
    """Call a function that trains; return the exit status: 0, that of a script, 1 if it failed, or that of a signal.

    Args:
        words: The command line after ``raysgd``; `raysgd restore` starts it again.
        what: What trains: a script, or a training.
        run: The function.

    Raises:
        ConfigError: A setting cannot work.
    """
    show_all_output()
    import ray

    from raysgd.trainer.spec import record_command_line

    record_command_line(words)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda number, frame: sys.exit(number))  # as Ray does it for SIGTERM
    try:
        run()
    except SystemExit as ended:
        number = int(ended.code or 0)
        _print(f"raysgd {words[0]}: ended by {signal.Signals(number).name}.")
        return SIGNALLED + number
    except Exception as error:
        return report(error, f"raysgd {words[0]}", what)
    finally:
        ray.shutdown()  # at the end of the interpreter, Ray would wait for the output, which is here already
    return SUCCEEDED


def _run_on(trainer: Trainer, order: Order, ended: dict[str, Any]) -> None:
    """Run the script; note in ``ended`` what ``--json`` prints."""
    from raysgd.cli.output import AFTER_FAILURE_S, AFTER_SUCCESS_S, WorkerOutput

    output = WorkerOutput(order.token)
    reduce = dict(order.given.get("--reduce", ()))
    usual = "off" if order.given.get("--json", False) else "auto"
    display = ProgressCallback(mode=order.given.get("--progress", usual))
    last = _LastResult()
    wait_s = AFTER_FAILURE_S
    try:
        trainer.run(
            order.script, callbacks=[display, last], resume_from=order.given.get("--resume-from"), reduce=reduce or None
        )
        wait_s = AFTER_SUCCESS_S
    finally:
        output.wait(wait_s)
        with contextlib.suppress(RaySGDError):  # the run's own error is the one to show
            newest = trainer.get_last_checkpoint()
            checkpoint = None if newest is None else newest.path
            ended |= {"run_dir": trainer.run_dir, "result": last.result, "checkpoint": checkpoint}


class _LastResult(Callback):
    result: Result | None = None

    def on_result(self, result: Result) -> None:
        self.result = result


def _make_trainer(given: Mapping[str, Any], restored: str | None) -> Trainer:
    from raysgd.trainer.trainer import Trainer

    arguments = trainer_arguments(given)
    trainer = Trainer(**arguments) if restored is None else Trainer.restore(restored, **arguments)
    if (folder := given.get("--working-dir")) is not None:
        import ray

        from raysgd.workers.placement.cluster import use_token

        use_token()
        try:
            ray.init(
                given.get("--address"), runtime_env={"working_dir": folder}
            )  # Ray ships it for whole programs only
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"the Ray cluster cannot be reached: {error}") from None
    return trainer


# -- errors ------------------------------------------------------------------------------------------------------------


def report(error: Exception, command: str = "raysgd run", what: str = "script") -> int:
    """Print why a run has failed; return the exit status.

    Raises:
        ConfigError: That is the error, and not one of the script; or the cluster or checkpoint that a flag names is not there.
    """
    cause = error.__cause__
    if isinstance(cause, WorkerTraceback):
        from raysgd.declarative.values import ComponentError

        status = error.status if isinstance(error, ScriptExit) else FAILED
        if isinstance(error, ComponentError):
            _print(f"{command}: {error}")
        elif isinstance(error, ScriptExit):
            _print(f"{command}: rank {cause.rank} on {cause.node} called sys.exit({status}).")
        else:
            _print(f"{command}: the {what} failed {cause}")
        for note in getattr(error, "__notes__", ()):
            _print(str(note))
        return status
    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, (UsageError, CheckpointNotFoundError)):
        raise ConfigError(str(error)) from error
    if isinstance(error, RaySGDError):
        _print(f"{command}: {type(error).__name__}: {error}")
    else:
        traceback.print_exception(error)
    return FAILED


def _print(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print_error(text)


# -- the command -------------------------------------------------------------------------------------------------------


@click.pass_context
def _execute(ctx: click.Context, /, words: Sequence[str], **_: Any) -> int:
    """Run a script; return the exit status: the script's own, 1 if it or its run failed, or that of a signal.

    Raises:
        ConfigError: A flag cannot work, or there is no such script.
    """
    if not words:
        raise ConfigError(f"there is no script: raysgd run {_ARGUMENTS}.")
    order = make_order(command.given(ctx), words[0], words[1:])
    try:
        order.script.check()
    except SyntaxError:
        traceback.print_exc(limit=0)
        return FAILED
    return _run(order, ctx.find_root().obj[1:])


def restart(words: Sequence[str], run_dir: str, changes: Sequence[str]) -> int:
    """Run a script again from the newest checkpoint of an earlier run; for `raysgd restore`. Errors as for `make_order`.

    Args:
        words: The words after ``raysgd run`` of that run.
        run_dir: Its folder.
        changes: Flags that replace those of the run.
    """
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.trainer.resume_from import find_newest_of_run

    has_checkpoint = find_newest_of_run(Storage.from_uri(run_dir)).checkpoint is not None
    is_limited = any(change.partition("=")[0] in _LIMITS for change in changes)
    without = [*(["--resume-from"] if has_checkpoint else []), *(_LIMITS if is_limited else [])]
    merged = command.merge(words, changes, without)
    print_error(f"raysgd restore: raysgd run {shlex.join(merged)}")
    with command.make_context("run", list(merged)) as ctx:
        order = make_order(command.given(ctx), ctx.params["words"][0], ctx.params["words"][1:])
    return _run(order, merged, run_dir)


command = FlagsCommand(
    "run",
    hints=HINTS,
    advice="flags of the script follow its name",
    program_flags=_MODULE_FLAGS,
    callback=_execute,
    params=[*FLAGS, *engine_flags(), click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar=_ARGUMENTS)],
    help=_DESCRIPTION,
    options_metavar="",
)

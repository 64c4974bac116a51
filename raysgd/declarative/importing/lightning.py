"""The rules for files of Lightning's CLI. Placeholders stand for adapters of LightningModules and LightningDataModules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raysgd.declarative.importing.rules import (
    NONE,
    Rule,
    Translation,
    by_hand,
    choose,
    is_count,
    read_by,
    to,
    translate,
    unused,
)
from raysgd.declarative.values import TYPE_KEY, is_full_name

ENDLESS = 10**9  # epochs
_FREE = "it changes what is shown, not the training"
_LOOP = "the loop does not have it; leave it out, or write a hook"
_HALF = {"16", "16-mixed"}
_BFLOAT = {"bf16", "bf16-mixed"}
_STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("auto", "ddp", "single_device", "ddpstrategy", "singledevicestrategy")},
    "fsdp": {"zero_stage": 3},
    "fsdpstrategy": {"zero_stage": 3},
    "fsdp_cpu_offload": {"zero_stage": 3, "cpu_offload": True},
    "deepspeed": {"zero_stage": 2},
    "deepspeed_stage_1": {"zero_stage": 1},
    "deepspeed_stage_2": {"zero_stage": 2},
    "deepspeed_stage_3": {"zero_stage": 3},
    "deepspeed_stage_3_offload": {"zero_stage": 3, "cpu_offload": True},
}
#: Arguments of strategies and what their values are in the engine; None: nothing is lost without the argument.
_STRATEGY_ARGS: dict[str, dict[str, dict[str, Any]] | None] = {
    "find_unused_parameters": {"true": {"find_unused_parameters": True}, "false": {}},
    "sharding_strategy": {"full_shard": {"zero_stage": 3}, "shard_grad_op": {"zero_stage": 2}, "no_shard": {"zero_stage": 0}},
    "cpu_offload": {"true": {"cpu_offload": True}, "false": {}, "none": {}},
    "stage": {str(stage): {"zero_stage": stage} for stage in range(4)},
    "offload_optimizer": {"false": {}},
    "offload_parameters": {"false": {}},
    **dict.fromkeys(
        ("gradient_as_bucket_view", "static_graph", "broadcast_buffers", "bucket_cap_mb", "start_method", "timeout",
         "process_group_backend", "state_dict_type", "auto_wrap_policy", "allgather_bucket_size", "reduce_bucket_size",
         "contiguous_gradients", "overlap_comm", "logging_batch_size_per_gpu")
    ),
}  # fmt: skip


def _seed(made: Translation, key: str, value: Any) -> None:
    if value is True:
        made.remark(key, "Lightning draws a seed; write one: seed: 0.")
    elif value is not False and value is not None:
        made.set("seed", value)


def _devices(made: Translation, key: str, value: Any) -> None:
    nodes = made.given.get("trainer.num_nodes") or 1
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*,?", value):
        value = [each for each in value.split(",") if each] if "," in value else int(value)
    number = len(value) if isinstance(value, list) else value
    if value == "auto" and made.given.get("trainer.accelerator") == "cpu":
        number = 1
    if is_count(number):
        made.set("compute_config.runtime_ngpus", number * nodes)
    else:
        made.remark(
            key,
            "Lightning trains on all devices that it finds; write their number on all nodes together as "
            "compute_config.runtime_ngpus. It is 1 now.",
        )


def _strategy(made: Translation, key: str, value: Any) -> None:
    name, args = _class_of(value)
    short = name.rpartition(".")[2].lower()
    unused_parameters = re.fullmatch(r"(ddp)(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?", short)
    fields = _STRATEGIES["ddp"] if unused_parameters else _STRATEGIES.get(short)
    if short == "deepspeedstrategy":
        fields = {"zero_stage": 2}
    if fields is None:
        made.remark(key, f"{name} is not translated: write the fields of engine that do the same, such as zero_stage.")
        return
    found = dict(fields)
    if unused_parameters and unused_parameters[4] == "true":
        found["find_unused_parameters"] = True
    for arg, given in args.items():
        meanings = _STRATEGY_ARGS.get(arg, {})
        if meanings is None:
            continue
        meant = meanings.get(str(given).lower())
        if meant is None:
            made.remark(
                f"{key}.{arg}", f"{given!r:.100} is not translated: write the field of engine that does the same."
            )
        found |= meant or {}
    if found.get("cpu_offload") and found.get("zero_stage") != 3:
        del found["cpu_offload"]
        made.remark(key, "the engine offloads with zero_stage: 3 alone; write both, or train without.")
    for field, meant in found.items():
        made.set(f"engine.{field}", meant)


def _precision(made: Translation, key: str, value: Any) -> None:
    name = str(value).lower()
    is_deepspeed = "deepspeed" in _class_of(made.given.get("trainer.strategy"))[0].lower()
    if name in ("none", "32", "32-true"):
        return
    if name in _BFLOAT:
        made.set("engine.precision", "bf16-true" if is_deepspeed else "bf16")
    elif name in _HALF and not is_deepspeed:
        made.set("engine.precision", "fp16")
    else:
        made.remark(
            key,
            f"{value!r} is not translated: write precision: bf16 for parameters in bf16, with fp32 master weights in the "
            "optimizer, or engine.precision: bf16 or fp16 for autocast. It is fp32 now.",
        )


def _length(made: Translation, key: str, value: Any) -> None:
    steps = made.given.get("trainer.max_steps", -1)
    has_time = made.given.get("trainer.max_time") is not None
    epochs = (1000 if steps in (-1, None) and not has_time else -1) if value is None else value
    if is_count(steps):
        made.set("max_train_steps", steps)
    if is_count(epochs):
        made.set("max_epochs", epochs)
    if 0 in (steps, epochs):
        made.set("max_train_steps", 1)
        made.remark(key, "Lightning trains for no step; write max_epochs or max_train_steps. It is one step now.")
    elif not is_count(steps) and not is_count(epochs):
        made.set("max_epochs", ENDLESS)
        made.remark(key, f"nothing ends the training; write max_epochs or max_train_steps. It is {ENDLESS} epochs now.")


def _validation(made: Translation, key: str, value: Any) -> None:
    every = made.given.get("trainer.check_val_every_n_epoch", 1)
    accumulation = made.given.get("trainer.accumulate_grad_batches", 1)
    if is_count(every) and every > 1:
        made.set("val_every_n_epochs", every)
    if type(value) is int and is_count(accumulation) and value > 0 and value % accumulation == 0 and every in (1, None):
        made.set("val_every_n_train_steps", value // accumulation)
        made.set("val_every_n_epochs", None)
        if every is not None:
            made.remark(
                key,
                f"{value} counts the batches of an epoch, which begins at 0 again; val_every_n_train_steps: "
                f"{value // accumulation} counts the optimizer steps of the training. Write another number if they differ.",
            )
    elif not (value is None or (type(value) is float and value == 1.0)) or every is None:
        made.remark(
            key,
            f"{value!r} is not translated: write val_every_n_train_steps, the optimizer steps between two validations. They are "
            "made after epochs now.",
        )


def _val_batches(made: Translation, key: str, value: Any) -> None:
    is_all = value is None or (type(value) is float and value == 1.0)
    if value == 0:
        made.values.get("dataset", {}).pop("val_args", None)
    elif is_count(value) and made.given.get("trainer.accumulate_grad_batches", 1) == 1:
        made.set("max_val_steps", value)
    elif not is_all:
        made.remark(key, f"{value!r} is not translated: write max_val_steps. A validation reads all rows now.")


def _clipping(made: Translation, key: str, value: Any) -> None:
    if not value:
        return
    if made.given.get("trainer.gradient_clip_algorithm") in (None, "norm"):
        made.set("optimizer.clip_gnorm", value)
    else:
        made.remark(
            key,
            f"{value!r} limits each gradient by its value; clip_gnorm limits the norm of all. Write a hook before_gnorm_clip "
            "that calls torch.nn.utils.clip_grad_value_(trainer.model.parameters(), ...).",
        )


# -- parts -----------------------------------------------------------------------------------------------------------------


def _class_of(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a class and its arguments, as jsonargparse writes them; the name is empty if there is none."""
    if isinstance(value, Mapping):
        args = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        return (str(value["class_path"]), args) if "class_path" in value else ("", dict(value))
    return (value if isinstance(value, str) else ""), {}


def _object(made: Translation, key: str, value: Any) -> Any:
    """Return a value with ``__type`` where the file has ``class_path``."""
    if isinstance(value, list):
        found = [_object(made, f"{key}.{place}", each) for place, each in enumerate(value)]
        return [each for each in found if each is not NONE]
    if isinstance(value, str) and value.startswith("torch.") and is_full_name(value):
        made.remark(
            key, f"{value} is a text now; write {{__value_type: function, value: {value}}} if it means the function."
        )
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        entries = {name: _object(made, f"{key}.{name}", each) for name, each in value.items()}
        return {name: each for name, each in entries.items() if each is not NONE}
    name, args = _class_of(value)
    if not is_full_name(name):
        made.remark(key, f"{name} is a class without its module; write its full name for {TYPE_KEY}.")
    elif name.startswith("torch.optim."):
        made.remark(
            key,
            f"{name} is a function that the model calls with parameters or an optimizer, which a value cannot be: make it in the "
            "adapter. It is left out.",
        )
        return NONE
    return {TYPE_KEY: name, **_object(made, key, args)}


def _part(made: Translation, key: str, value: Any, placeholder: str) -> dict[str, Any]:
    """Return a LightningModule or LightningDataModule with ``__type``; the placeholder if the file does not name its class."""
    if isinstance(value, str):
        value = {"class_path": value}
    if isinstance(value, Mapping) and "class_path" in value:
        found: dict[str, Any] = _object(made, key, value)
        return found
    made.remark(key, f"the script names the class; write its full name for {placeholder}.")
    return {TYPE_KEY: placeholder, **_object(made, key, value or {})}


def _model(made: Translation, key: str, value: Any) -> None:
    made.set("model", {"type": "adapter.Model", "args": {"module": _part(made, key, value, "adapter.Module")}})
    made.remark(
        key,
        "write adapter.Model: a torch module that gets the LightningModule as `module`, and whose forward(batch) returns the "
        "loss of module.training_step, or of validation_step where it does not train.",
    )


def _data(made: Translation, key: str, value: Any) -> None:
    given = {} if value is None else {"data": _part(made, key, value, "adapter.Data")}
    _, args = _class_of(value)
    stages = {f"{stage}_args": {**given, "stage": stage} for stage in ("train", "val")}
    made.set("dataset", {"type": "adapter.make_dataset", **stages})
    made.remark(
        key,
        "write adapter.make_dataset(..., stage): the dataset that the loader of this stage reads. What that loader has besides, "
        "such as collate_fn and num_workers, goes to dataloader.train_args. Leave out val_args if there is no validation.",
    )
    sizes = [name for name in ("batch_size", "train_batch_size") if is_count(args.get(name))]
    if sizes:
        made.set("micro_batch_size", args[sizes[0]])
    else:
        made.remark(key, "write micro_batch_size: the rows of a batch of the training loader. It is 1 now.")


def _component(made: Translation, key: str, value: Any, module: str, placeholder: str) -> None:
    name, args = _class_of(value)
    if "." not in name and name:
        name = f"{module}.{name}"
    if not name:
        made.remark(key, f"the script names the class; write its full name for {placeholder}.")
    made.set(f"{key}.type", name or placeholder)
    if args:
        made.set(f"{key}.args", _object(made, key, args))


def _optimizer(made: Translation, key: str, value: Any) -> None:
    if value is not None:
        _component(made, key, value, "torch.optim", "adapter.make_optimizer")
        return
    made.set("optimizer.type", "adapter.make_optimizer")
    made.remark(
        key,
        "configure_optimizers of the LightningModule makes it; write optimizer and lr_scheduler, with their class and args, in "
        "place of adapter.make_optimizer.",
    )


def _scheduler(made: Translation, key: str, value: Any) -> None:
    if value is None:
        return
    _component(made, key, value, "torch.optim.lr_scheduler", "adapter.make_scheduler")
    scheduler = made.values["lr_scheduler"]
    if scheduler["type"].endswith(".ReduceLROnPlateau"):
        scheduler["type"] = "torch.optim.lr_scheduler.ReduceLROnPlateau"
        metric = scheduler.get("args", {}).pop("monitor", "val_loss")
        if metric != "val_loss":
            made.remark(f"{key}.monitor", f"{metric!r} is not translated: the scheduler follows val_loss.")


# -- callbacks and loggers -------------------------------------------------------------------------------------------------


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None or isinstance(value, bool) else [value]


def _callbacks(made: Translation, key: str, value: Any) -> None:
    has_checkpoint = False
    for place, entry in enumerate(_entries(value)):
        name, args = _class_of(entry)
        short, where = name.rpartition(".")[2], f"{key}.{place}"
        if short == "ModelCheckpoint" and not has_checkpoint:
            has_checkpoint = True
            _apply(made, where, args, CHECKPOINT, short)
        elif short == "EarlyStopping":
            _early_stopping(made, where, args)
        elif short in _SHOWN:
            made.unused[where] = f"{short} shows what every run records"
        else:
            made.remark(where, f"{name} is not translated: write a hook, or an own callback of raysgd in the list log.")
    if made.given.get("trainer.enable_checkpointing") is False:
        made.set("checkpoint.no_save", True)
    elif not has_checkpoint:
        _apply(made, key, {}, CHECKPOINT, "ModelCheckpoint")


_SHOWN = (
    "LearningRateMonitor", "ModelSummary", "RichModelSummary", "ProgressBar", "RichProgressBar", "TQDMProgressBar",
)  # fmt: skip


def _apply(made: Translation, key: str, args: Mapping[str, Any], rules: Mapping[str, Rule], name: str) -> None:
    """Apply the rules of a class to its arguments."""
    inner = translate(args, rules)
    for field, value in inner.values.items():
        if isinstance(value, Mapping):
            value = {**made.values.get(field, {}), **value}
        elif isinstance(value, list):
            value = [*made.values.get(field, []), *value]
        made.values[field] = value
    made.remarks += [(f"{key}.{name}.{arg}", text) for arg, text in inner.remarks]
    made.unused |= {f"{key}.{name}.{arg}": text for arg, text in inner.unused.items()}


def _save_steps(made: Translation, key: str, value: Any) -> None:
    if is_count(value):
        made.set("checkpoint.every_n_train_steps", value)


def _save_epochs(made: Translation, key: str, value: Any) -> None:
    if is_count(value) and not is_count(made.given.get("every_n_train_steps")):
        made.set("checkpoint.every_n_epochs", value)


def _kept(made: Translation, key: str, value: Any) -> None:
    metric, mode = made.given.get("monitor"), made.given.get("mode", "min")
    is_best = metric == "val_loss" and mode == "min"
    if value == 0:
        made.set("checkpoint.no_save", True)
        return
    made.set("checkpoint.save_best", is_best)
    if metric is not None and not is_best:
        made.remark(
            "monitor",
            f"the best checkpoint by {metric} ({mode}) is not kept: save_best follows val_loss. All are kept now.",
        )
    elif value == 1:
        made.set("checkpoint.keep_last_n_checkpoints", 1)
    elif metric is not None and value != -1:
        made.remark(
            key,
            f"the best {value} are not kept: the best one is, and the newest, whose number keep_last_n_checkpoints is. All are "
            "kept now.",
        )


CHECKPOINT = {
    "dirpath": to("checkpoint.save_dir"),
    "filename": unused("a checkpoint is named by its number"),
    "monitor": read_by("save_top_k"),
    "mode": read_by("save_top_k"),
    "save_top_k": Rule(_kept, 1),
    "save_last": unused("the newest checkpoint is always kept"),
    "every_n_train_steps": Rule(_save_steps),
    "every_n_epochs": Rule(_save_epochs),
    "train_time_interval": by_hand("write checkpoint.every_n_train_steps; checkpoints are saved after epochs now."),
    "save_weights_only": unused("a checkpoint has all that a training needs to continue"),
    "save_on_exception": by_hand("a training that fails continues from its newest checkpoint.", False),
    "save_on_train_epoch_end": unused("a checkpoint follows a validation"),
    "verbose": unused(_FREE),
    "auto_insert_metric_name": unused("a checkpoint is named by its number"),
    "enable_version_counter": unused("each run has a folder of its own"),
}


def _early_stopping(made: Translation, key: str, args: Mapping[str, Any]) -> None:
    if args.get("monitor") != "val_loss" or not is_count(args.get("patience", 3)):
        made.remark(
            f"{key}.EarlyStopping",
            f"{args!r:.100} is not translated: write raysgd.callbacks.EarlyStoppingCallback in the list log, with a metric that "
            "the training reports, such as val_loss.",
        )
        return
    _apply(made, key, args, EARLY_STOPPING, "EarlyStopping")
    taken = {"monitor": "metric", "mode": "mode", "patience": "patience", "min_delta": "min_delta"}
    given = {name: args[arg] for arg, name in taken.items() if args.get(arg) is not None}
    made.values.setdefault("log", []).append({"type": "raysgd.callbacks.EarlyStoppingCallback", "args": given})


EARLY_STOPPING = {
    **dict.fromkeys(("monitor", "mode", "patience", "min_delta"), read_by("class_path")),
    "verbose": unused(_FREE),
    "log_rank_zero_only": unused(_FREE),
    "strict": by_hand("a metric that no result has ends the run with an error.", True),
    "check_finite": by_hand("nan ends the run with an error; write nan_is_failure: false to continue.", True),
    "stopping_threshold": by_hand(_LOOP),
    "divergence_threshold": by_hand(_LOOP),
    "check_on_train_epoch_end": by_hand("it looks at each result that has the metric.", False),
}


def _logger(made: Translation, key: str, value: Any) -> None:
    for place, entry in enumerate(_entries(value)):
        name, args = _class_of(entry)
        short, where = name.rpartition(".")[2], f"{key}.{place}"
        if short not in _LOGGERS:
            made.remark(where, f"{name} is not translated: write a class with log_metrics in the list log.")
            continue
        kind, taken = _LOGGERS[short]
        given = {taken[arg]: each for arg, each in args.items() if taken.get(arg) and each is not None}
        if short == "WandbLogger" and args.get("offline"):
            given["mode"] = "offline"
        for arg, each in args.items():
            if arg not in taken and each not in (None, False, ""):
                made.remark(f"{where}.{arg}", f"{each!r:.100} is not translated: {kind} does not have it.")
        made.values.setdefault("log", []).append({"type": kind, **({"args": given} if given else {})})


#: Loggers: what they are here, and their arguments; those with None are not needed.
_LOGGERS: dict[str, tuple[str, dict[str, str | None]]] = {
    "TensorBoardLogger": (
        "TensorBoardLogger",
        {"name": "name", **dict.fromkeys(("save_dir", "version", "default_hp_metric", "sub_dir"))},
    ),
    "WandbLogger": (
        "WandbLogger",
        {"name": "name", "project": "project", "entity": "entity", **dict.fromkeys(("save_dir", "dir", "version", "offline"))},
    ),
    "MLFlowLogger": (
        "raysgd.callbacks.MLflowCallback",
        {"experiment_name": "experiment_name", "run_name": "run_name", "tracking_uri": "tracking_uri", "tags": "tags",
         "save_dir": None},
    ),
    "CSVLogger": (
        "raysgd.callbacks.CsvCallback",
        dict.fromkeys(("save_dir", "name", "version", "flush_logs_every_n_steps")),
    ),
}  # fmt: skip


RULES: dict[str, Rule] = {
    "seed_everything": Rule(_seed),
    "model": Rule(_model, None),
    "data": Rule(_data, None),
    "optimizer": Rule(_optimizer, None),
    "lr_scheduler": Rule(_scheduler),
    "ckpt_path": by_hand(
        "a checkpoint of Lightning is not read; load its weights in adapter.Model, and write checkpoint.resume_from: last to "
        "continue a training of raysgd."
    ),
    "weights_only": unused("checkpoints of raysgd have no code"),
    "trainer.accelerator": choose(
        {"cpu": {}, "gpu": {"trainer.gpus_per_worker": 1}, "cuda": {"trainer.gpus_per_worker": 1}},
        "write trainer.gpus_per_worker: 1 for workers with a GPU each. They have none now.",
        "auto",
    ),
    "trainer.devices": Rule(_devices, "auto"),
    "trainer.num_nodes": read_by("trainer.devices"),
    "trainer.strategy": Rule(_strategy, "auto"),
    "trainer.precision": Rule(_precision),
    "trainer.logger": Rule(_logger),
    "trainer.default_root_dir": to("checkpoint.save_dir"),
    "trainer.callbacks": Rule(_callbacks, None),
    "trainer.fast_dev_run": by_hand("write max_train_steps and max_val_steps for a short run.", False),
    "trainer.max_epochs": Rule(_length, None),
    "trainer.max_steps": read_by("trainer.max_epochs"),
    "trainer.min_epochs": by_hand("early stopping may end a training in any epoch."),
    "trainer.min_steps": by_hand("early stopping may end a training after any step."),
    "trainer.max_time": by_hand("a training has no limit of time; write max_train_steps."),
    "trainer.limit_train_batches": by_hand("give the dataset fewer rows, or write max_train_steps.", 1.0),
    "trainer.limit_val_batches": Rule(_val_batches),
    "trainer.limit_test_batches": unused("a training does not read the test data"),
    "trainer.limit_predict_batches": unused("a training does not predict"),
    "trainer.overfit_batches": by_hand("give the dataset fewer rows.", 0.0, 0),
    "trainer.val_check_interval": Rule(_validation, None),
    "trainer.check_val_every_n_epoch": read_by("trainer.val_check_interval"),
    "trainer.num_sanity_val_steps": unused("nothing is validated before the training"),
    "trainer.log_every_n_steps": unused("every step is reported"),
    "trainer.enable_checkpointing": read_by("trainer.callbacks"),
    "trainer.enable_progress_bar": to("enable_progress_bar"),
    "trainer.enable_model_summary": unused(_FREE),
    "trainer.accumulate_grad_batches": to("grad_accumulation_steps", but=(None, 1)),
    "trainer.gradient_clip_val": Rule(_clipping),
    "trainer.gradient_clip_algorithm": read_by("trainer.gradient_clip_val"),
    "trainer.deterministic": choose(
        {"true": {"trainer.deterministic": True}, "false": {}, "none": {}}, "write trainer.deterministic: true."
    ),
    "trainer.benchmark": by_hand(
        "set torch.backends.cudnn.benchmark in a function, and name it in init_env_fn.", False
    ),
    "trainer.inference_mode": unused("a validation computes no gradients"),
    "trainer.use_distributed_sampler": by_hand("write dataset_sampler.type: the class of your sampler.", True),
    "trainer.profiler": by_hand("write raysgd.callbacks.TorchProfilerCallback in the list log."),
    "trainer.detect_anomaly": by_hand(
        "call torch.autograd.set_detect_anomaly(True) in the function of init_env_fn.", False
    ),
    "trainer.barebones": by_hand("write checkpoint.no_save: true and enable_progress_bar: false.", False),
    "trainer.plugins": by_hand("write the fields of engine that do the same."),
    "trainer.sync_batchnorm": by_hand(
        "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(module) in adapter.Model, with GPUs.", False
    ),
    "trainer.reload_dataloaders_every_n_epochs": by_hand("the loader is made once; its sampler knows the epoch.", 0),
    "trainer.enable_autolog_hparams": unused("a run's folder has its config"),
    "trainer.model_registry": by_hand("checkpoints are files in checkpoint.save_dir."),
}

_INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")


def _interpolated(made: list[tuple[str, str]], value: Any, root: Mapping[str, Any]) -> Any:
    """Return a value with the references that OmegaConf resolves, ``${model.init_args.width}``, replaced."""
    if isinstance(value, Mapping):
        return {key: _interpolated(made, each, root) for key, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(made, each, root) for each in value]
    if not isinstance(value, str):
        return value

    def find(name: str) -> Any:
        found: Any = root
        for part in name.split("."):
            found = found.get(part, NONE) if isinstance(found, Mapping) else NONE
        if found is NONE or found == value:
            made.append((f"${{{name}}}", "refers to nothing in the file; the text stays as it is. Write the value."))
        return found

    whole = _INTERPOLATION.fullmatch(value)
    if whole is not None:
        found = find(whole[1])
        return value if found is NONE or found == value else found
    return _INTERPOLATION.sub(lambda each: each[0] if (found := find(each[1])) is NONE else str(found), value)


def translate_file(values: Mapping[str, Any]) -> Translation:
    """Translate a file of Lightning's CLI; one that ``--print_config`` wrote may have its keys below the subcommand."""
    for subcommand in ("fit", "validate", "test", "predict"):
        if isinstance(values.get(subcommand), Mapping):
            values = values[subcommand]
    unknown: list[tuple[str, str]] = []
    made = translate(_interpolated(unknown, values, values), RULES)
    made.remarks += unknown
    return made

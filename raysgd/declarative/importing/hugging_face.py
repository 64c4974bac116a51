"""The rules for `TrainingArguments` of transformers as JSON, or as the YAML that TRL's scripts take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raysgd.declarative.importing.rules import (
    Rule,
    Translation,
    by_hand,
    is_count,
    keys,
    read_by,
    to,
    unused,
)

_SHOWN = "every step is reported, and shown as log has it"
_HUB = "nothing is pushed to a hub"
_EVALUATION = "a validation computes the loss, and nothing is gathered"
_LAUNCHER = "raysgd starts the workers"
_STORAGE = "checkpoints are written to checkpoint.save_dir, which all nodes reach"
_TPU = "workers have CPUs or GPUs"
#: Schedules: the functions of transformers, and the counts of steps that they take.
_SCHEDULES = {
    "linear": ("get_linear_schedule_with_warmup", True),
    "cosine": ("get_cosine_schedule_with_warmup", True),
    "cosine_with_restarts": ("get_cosine_with_hard_restarts_schedule_with_warmup", True),
    "polynomial": ("get_polynomial_decay_schedule_with_warmup", True),
    "constant_with_warmup": ("get_constant_schedule_with_warmup", False),
    "inverse_sqrt": ("get_inverse_sqrt_schedule", False),
    "cosine_with_min_lr": ("get_cosine_with_min_lr_schedule_with_warmup", True),
    "cosine_warmup_with_min_lr": ("get_cosine_with_min_lr_schedule_with_warmup_lr_rate", True),
    "warmup_stable_decay": ("get_wsd_schedule", True),
}
#: Optimizers: their classes, and whether they take the arguments of Adam.
_OPTIMIZERS: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), ("torch.optim.AdamW", True)),
    "sgd": ("torch.optim.SGD", False),
    "adagrad": ("torch.optim.Adagrad", False),
    "rmsprop": ("torch.optim.RMSprop", False),
}
#: Stages of ZeRO, by the words of the field fsdp.
_FSDP = {"full_shard": 3, "shard_grad_op": 2, "true": 3}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _length(made: Translation, key: str, value: Any) -> None:
    steps = made.given.get("max_steps", -1)
    if is_count(steps):
        made.set("max_train_steps", steps)
        return
    epochs = max(1, math.ceil(_number(value)))
    made.set("max_epochs", epochs)
    if epochs != value:
        made.remark(key, f"{value} epochs are not a whole number; write max_train_steps. They are {epochs} now.")


def _optimizer(made: Translation, key: str, value: Any) -> None:
    given = made.given
    if value == "adafactor" or given.get("adafactor") is True:
        made.set("optimizer.type", "transformers.Adafactor")
        args: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
        is_adam = False
    else:
        name, is_adam = _OPTIMIZERS.get(str(value), ("adapter.make_optimizer", False))
        made.set("optimizer.type", name)
        args = {}
        if value not in _OPTIMIZERS:
            made.remark(key, f"{value} is not translated: write the class and its args for adapter.make_optimizer.")
    args["lr"] = given.get("learning_rate", 5e-5)
    if is_adam:
        args["betas"] = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
        args["eps"] = given.get("adam_epsilon", 1e-8)
    args["weight_decay"] = decay = given.get("weight_decay", 0.0)
    if decay:
        made.remark(
            "weight_decay",
            "transformers leaves out biases and norms, and here all parameters decay; write a function that makes the optimizer "
            "of groups, and name it in optimizer.type.",
        )
    made.set("optimizer.args", args)


def _scheduler(made: Translation, key: str, value: Any) -> None:
    given, kind = made.given, str(value)
    warmup = given.get("warmup_steps") or given.get("warmup_ratio") or 0
    if kind == "constant":
        return
    if kind not in _SCHEDULES:
        made.set("lr_scheduler.type", "adapter.make_scheduler")
        made.remark(key, f"{kind} is not translated: write the class and its args for adapter.make_scheduler.")
        return
    name, needs_total = _SCHEDULES[kind]
    steps = given.get("max_steps", -1)
    total = steps if is_count(steps) else None
    made.set("lr_scheduler.type", f"transformers.optimization.{name}")
    args: dict[str, Any] = {}
    if isinstance(warmup, float) and warmup < 1:
        if total is not None or not warmup:
            args["num_warmup_steps"] = math.ceil((total or 0) * warmup)
        else:
            made.remark(
                "warmup_steps",
                f"write lr_scheduler.args.num_warmup_steps: {warmup:.4g} of all optimizer steps. The training does not start "
                "without it.",
            )
    else:
        args["num_warmup_steps"] = int(warmup)
    if needs_total and total is not None:
        args["num_training_steps"] = total
    elif needs_total:
        made.remark(
            key,
            "write lr_scheduler.args.num_training_steps: all optimizer steps, which are max_epochs times the rows of the dataset "
            "divided by those of a step, rounded up. The training does not start without it.",
        )
    made.set("lr_scheduler.args", {**args, **_mapping(given.get("lr_scheduler_kwargs"))})
    made.set("lr_scheduler.interval", "step")


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _steps(made: Translation, key: str, value: Any, field: str) -> None:
    """Set a field to a number of steps, which may be a part of ``max_steps``."""
    total = made.given.get("max_steps", -1)
    if isinstance(value, float) and 0 < value < 1:
        if not is_count(total):
            made.remark(key, f"{value} of all steps is not translated: write {field}, a number of optimizer steps.")
            return
        value = math.ceil(total * value)
    if _number(value) >= 1:
        made.set(field, int(value))


def _evaluation(made: Translation, key: str, value: Any) -> None:
    value = made.given.get("evaluation_strategy", value) if key == "eval_strategy" else value
    if value == "no":
        made.set("dataset.val_args", {})
        return
    made.set("dataset.val_args", {"stage": "val"})
    if value == "steps":
        steps = made.given.get("eval_steps") or made.given.get("logging_steps", 500)
        _steps(made, "eval_steps", steps, "val_every_n_train_steps")
        made.set("val_every_n_epochs", None)


def _saving(made: Translation, key: str, value: Any) -> None:
    if value == "no":
        made.set("checkpoint.no_save", True)
    elif value == "epoch":
        made.set("checkpoint.every_n_epochs", 1)
    else:
        _steps(made, "save_steps", made.given.get("save_steps", 500), "checkpoint.every_n_train_steps")
        if value != "steps":
            made.remark(
                key, f"{value} is not translated: checkpoints are saved after steps, and save_best keeps the best."
            )


def _best(made: Translation, key: str, value: Any) -> None:
    metric, greater = made.given.get("metric_for_best_model"), made.given.get("greater_is_better")
    is_loss = metric in (None, "loss", "eval_loss") and not greater
    made.set("checkpoint.save_best", bool(value) and is_loss)
    if value:
        made.remark(
            key,
            "the best checkpoint is kept, and is not loaded at the end: it is `best` in checkpoint.save_dir."
            if is_loss
            else f"the best checkpoint by {metric} is not kept: save_best follows the validation loss.",
        )


def _precision(made: Translation, key: str, value: Any) -> None:
    if value is True:
        made.set("engine.precision", key)


def _recomputation(made: Translation, key: str, value: Any) -> None:
    if value:
        made.set("engine.activation_checkpointing", "full")


def _compile(made: Translation, key: str, value: Any) -> None:
    if value or made.given.get("torch_compile_backend") or made.given.get("torch_compile_mode"):
        made.set("engine.compile", "model")


def _fsdp(made: Translation, key: str, value: Any) -> None:
    words = (
        value.split() if isinstance(value, str) else value if isinstance(value, list) else [str(bool(value)).lower()]
    )
    words = [word for word in words if word not in ("auto_wrap", "false")]
    config = _mapping(made.given.get("fsdp_config"))
    for word in words:
        if word in _FSDP:
            made.set("engine.zero_stage", _FSDP[word])
        elif word == "offload":
            made.set("engine.cpu_offload", True)
        else:
            made.remark(key, f"{word} is not translated: write the field of engine that does the same.")
    if config.get("reshard_after_forward") is False and words:
        made.set("engine.zero_stage", 2)
    engine = made.values.get("engine", {})
    if engine.get("cpu_offload") and engine.get("zero_stage") != 3:
        del engine["cpu_offload"]
        made.remark(key, "the engine offloads with zero_stage: 3 alone; write both, or train without.")
    left = sorted(name for name, each in config.items() if each and name not in _FSDP_UNUSED)
    if words and left:
        made.remark(
            "fsdp_config", f"{', '.join(left)} are not translated: write the fields of engine that do the same."
        )


_FSDP_UNUSED = (
    "version", "fsdp_version", "min_num_params", "transformer_layer_cls_to_wrap", "backward_prefetch", "forward_prefetch",
    "use_orig_params", "sync_module_states", "state_dict_type", "reshard_after_forward", "limit_all_gathers",
    "cpu_ram_efficient_loading", "auto_wrap_policy",
)  # fmt: skip


def _deepspeed(made: Translation, key: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        made.remark(
            key, f"the file {value} is not read: write engine.zero_stage, 1, 2 or 3, as its zero_optimization.stage."
        )
        return
    zero = _mapping(value.get("zero_optimization"))
    precision = made.values.get("engine", {}).get("precision")
    if precision == "bf16":
        made.set("engine.precision", "bf16-true")  # parameters in bf16 with fp32 master weights
    elif precision == "fp16":
        made.remark(
            "fp16", "DeepSpeed has parameters in fp16; engine.precision: fp16 is autocast of parameters in fp32."
        )
    stage = zero.get("stage", 0)
    made.set("engine.zero_stage", stage)
    offloads = {name: _mapping(zero.get(name)).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    if stage == 3 and set(offloads.values()) == {"cpu"}:
        made.set("engine.cpu_offload", True)
    elif set(offloads.values()) != {"none"}:
        made.remark(key, "offloading is not translated: engine.cpu_offload: true, with zero_stage: 3, offloads all.")
    left = sorted(
        name
        for name, each in value.items()
        if each != "auto" and name not in _DEEPSPEED_KNOWN and _mapping(each).get("enabled") not in ("auto", False)
    )
    if left:
        made.remark(key, f"{', '.join(left)} are not translated: write the fields of raysgd train that do the same.")


_DEEPSPEED_KNOWN = (
    "zero_optimization", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "dump_state",
)  # fmt: skip


def _accelerator(made: Translation, key: str, value: Any) -> None:
    known = {"use_seedable_sampler", "non_blocking", "even_batches", "use_configured_state"}
    left = sorted(name for name, each in _mapping(value).items() if each and name not in known)
    if left or isinstance(value, str):
        made.remark(key, f"{', '.join(left) or value} is not translated; each worker reads its own batches.")


def _loggers(made: Translation, key: str, value: Any) -> None:
    for name in value if isinstance(value, list) else [value]:
        if name == "tensorboard":
            made.values.setdefault("log", []).append({"type": "TensorBoardLogger"})
        elif name == "wandb":
            run = made.given.get("run_name")
            made.values.setdefault("log", []).append(
                {"type": "WandbLogger", **({"args": {"name": run}} if run else {})}
            )
        elif name == "mlflow":
            made.values.setdefault("log", []).append({"type": "raysgd.callbacks.MLflowCallback"})
        elif name not in ("none", None):
            made.remark(
                key, f"{name} is not translated: write TensorBoardLogger, WandbLogger or a class in the list log."
            )


def _workers(made: Translation, key: str, value: Any) -> None:
    made.remark(
        key,
        "the launcher knows the number of processes; write it as compute_config.runtime_ngpus, and trainer.gpus_per_worker: 1 "
        "for a GPU each. It is 1 worker now.",
    )


def _parts(made: Translation, key: str, value: Any) -> None:
    made.set("model.type", "adapter.Model")
    made.set("dataset.type", "adapter.make_dataset")
    made.set("dataset.train_args", {"stage": "train"})
    made.remark(
        "model",
        "the script makes it; write adapter.Model: a torch module whose forward(batch) returns the model's output for **batch, "
        "which has a loss. And adapter.make_dataset(stage): the dataset for train and val; the collator goes to "
        "dataloader.train_args.collate_fn.",
    )


def _tokens(made: Translation, key: str, value: Any) -> None:
    if value or made.given.get("gradient_accumulation_steps", 1) != 1:
        made.remark(
            key,
            "transformers divides the loss of a language model by all labels of a step, also by the first of each row; here "
            "each micro-batch has the loss that the model returns, and counts the same. Write "
            "optimizer.grad_reduction: per-token-mean if micro-batches have different numbers of tokens.",
        )


def _loader_argument(made: Translation, key: str, value: Any) -> None:
    if value:
        made.set(f"dataloader.train_args.{key.removeprefix('dataloader_')}", value)


RULES: dict[str, Rule] = {
    "output_dir": to("checkpoint.save_dir", but=(None, "")),
    "local_rank": Rule(_workers, -1),
    "do_train": Rule(_parts, None),
    "per_device_train_batch_size": to("micro_batch_size", default=8),
    "gradient_accumulation_steps": to("grad_accumulation_steps", but=(1,)),
    "average_tokens_across_devices": Rule(_tokens, True),
    "num_train_epochs": Rule(_length, 3.0),
    "max_steps": read_by("num_train_epochs"),
    "optim": Rule(_optimizer, "adamw_torch"),
    **keys("learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon adafactor", read_by("optim")),
    "optim_args": by_hand("write them as optimizer.args."),
    "optim_target_modules": by_hand("write the class of the optimizer and its args."),
    "lr_scheduler_type": Rule(_scheduler, "linear"),
    **keys("lr_scheduler_kwargs warmup_steps warmup_ratio", read_by("lr_scheduler_type")),
    "max_grad_norm": to("optimizer.clip_gnorm", but=(None, 0, 0.0), default=1.0),
    "label_smoothing_factor": by_hand("compute the loss so in adapter.Model.", 0.0, 0),
    "neftune_noise_alpha": by_hand("add the noise in adapter.Model.", 0, 0.0),
    "bf16": Rule(_precision),
    "fp16": Rule(_precision),
    "bf16_full_eval": by_hand("a validation has the precision of the training.", False),
    "fp16_full_eval": by_hand("a validation has the precision of the training.", False),
    "tf32": by_hand("call torch.set_float32_matmul_precision in the function of init_env_fn.", False),
    "activation_checkpointing": Rule(_recomputation),
    "gradient_checkpointing": Rule(_recomputation),
    "activation_checkpointing_kwargs": unused("each block is computed again"),
    "gradient_checkpointing_kwargs": unused("each block is computed again"),
    "torch_compile": Rule(_compile, False),
    "torch_compile_backend": by_hand("engine.compile: model uses torch's own.", "inductor"),
    "torch_compile_mode": by_hand("engine.compile: model uses the default mode.", "default"),
    "use_liger_kernel": by_hand("apply the kernels to the model in adapter.Model.", False),
    "liger_kernel_config": by_hand("apply the kernels to the model in adapter.Model."),
    "use_cache": unused("the model in adapter.Model has its own config"),
    "torch_empty_cache_steps": by_hand("call torch.cuda.empty_cache() in a hook after_optimizer_step."),
    "auto_find_batch_size": by_hand("`raysgd plan -f FILE` shows what fits into memory.", False),
    **keys(
        "logging_strategy logging_steps logging_first_step logging_dir log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics",
        unused(_SHOWN),
    ),
    "run_name": read_by("report_to"),
    "report_to": Rule(_loggers),
    "disable_tqdm": Rule(lambda made, key, value: made.set("enable_progress_bar", False) if value is True else None),
    "eval_strategy": Rule(_evaluation, "no"),
    "evaluation_strategy": read_by("eval_strategy"),
    "eval_steps": read_by("eval_strategy"),
    "eval_delay": by_hand("validations begin with the training.", 0, 0.0),
    "eval_on_start": by_hand("nothing is validated before the training.", False),
    "per_device_eval_batch_size": unused("a validation loss is the mean over all rows, whatever the batches"),
    **keys(
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
        "include_inputs_for_metrics batch_eval_metrics",
        unused(_EVALUATION),
    ),
    "save_strategy": Rule(_saving, "steps"),
    "save_steps": read_by("save_strategy"),
    "save_total_limit": to("checkpoint.keep_last_n_checkpoints"),
    "save_only_model": unused("a checkpoint has all that a training needs to continue"),
    "save_safetensors": unused("`raysgd ckpt export` writes safetensors"),
    "save_on_each_node": unused(_STORAGE),
    "overwrite_output_dir": unused(_STORAGE),
    "enable_jit_checkpoint": unused("a drained node is left after a checkpoint"),
    "load_best_model_at_end": Rule(_best, False),
    "metric_for_best_model": read_by("load_best_model_at_end"),
    "greater_is_better": read_by("load_best_model_at_end"),
    "resume_from_checkpoint": by_hand(
        "a checkpoint of transformers is not read; load its weights in adapter.Model. checkpoint.resume_from: last continues a "
        "training of raysgd.", False
    ),
    "ignore_data_skip": by_hand("a training that continues reads the rows that are left.", False),
    "restore_callback_states_from_checkpoint": unused("hooks save and load what they need"),
    **keys(
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token",
        unused(_HUB),
    ),
    "push_to_hub": by_hand("upload a merged checkpoint by hand.", False),
    "seed": to("seed", default=42),
    "data_seed": by_hand("write dataset_sampler.train_args.seed."),
    "full_determinism": Rule(lambda made, key, value: made.set("trainer.deterministic", True) if value is True else None),
    "use_cpu": unused("workers have the GPUs of trainer.gpus_per_worker"),
    "no_cuda": unused("workers have the GPUs of trainer.gpus_per_worker"),
    "accelerator_config": Rule(_accelerator),
    "parallelism_config": by_hand("write engine.tensor_parallel and compute_config.plan_ngpus."),
    **keys(
        "dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context",
        Rule(_loader_argument),
    ),
    "dataloader_pin_memory": unused("batches for GPUs are pinned"),
    "dataloader_in_order": by_hand("write dataloader.train_args.in_order: false.", True),
    "dispatch_batches": by_hand("each worker reads its own batches.", False),
    "split_batches": by_hand("write a smaller micro_batch_size.", False),
    "remove_unused_columns": unused("the dataset yields what adapter.Model takes"),
    "label_names": unused("the dataset yields what adapter.Model takes"),
    "train_sampling_strategy": by_hand("write the class of a sampler as dataset_sampler.type.", "random"),
    "group_by_length": by_hand("write the class of a sampler as dataset_sampler.type.", False),
    "length_column_name": unused("rows are not grouped by length"),
    "ddp_find_unused_parameters": to("engine.find_unused_parameters", but=(None, False)),
    **keys("ddp_bucket_cap_mb ddp_static_graph ddp_backend ddp_timeout", unused(_LAUNCHER)),
    "ddp_broadcast_buffers": by_hand("buffers follow the engine.", False, True),
    "fsdp": Rule(_fsdp),
    "fsdp_config": read_by("fsdp"),
    "fsdp_min_num_params": unused("the engine wraps each block"),
    "fsdp_transformer_layer_cls_to_wrap": unused("the engine wraps each block"),
    "deepspeed": Rule(_deepspeed),
    "debug": by_hand("write a hook that checks the values.", "", []),
    "do_eval": unused("eval_strategy says whether there are validations"),
    "do_predict": unused("a training does not predict"),
    **keys("fp16_backend half_precision_backend fp16_opt_level", unused("engine.precision is autocast")),
    **keys(
        "per_gpu_train_batch_size per_gpu_eval_batch_size use_legacy_prediction_loop past_index mp_parameters torchdynamo "
        "jit_mode_eval use_ipex use_mps_device ray_scope",
        by_hand("transformers has removed it; write the field that does the same.", False, "", -1, "last"),
    ),
    "tpu_num_cores": by_hand(_TPU),
    "tpu_metrics_debug": by_hand(_TPU, False),
    "_n_gpu": unused(_LAUNCHER),
}  # fmt: skip

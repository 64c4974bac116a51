"""The rules for TOML files of torchtitan, which it took until its configs became Python."""

from __future__ import annotations

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

_SAVED = "a checkpoint has all that a training needs to continue"
_OWN = "raysgd has its own"
_CONVERTERS = "model.converters names what is used"
_TRACES = "write raysgd.callbacks.TorchProfilerCallback in the list log."


def _degree(made: Translation, name: str) -> int:
    value = made.given.get(f"parallelism.{name}_degree", 1)
    return value if is_count(value) else 1


def _parallelism(made: Translation, key: str, value: Any) -> None:
    tensor, pipeline = _degree(made, "tensor_parallel"), _degree(made, "pipeline_parallel")
    replicas, shards = _degree(made, "data_parallel_replicate"), value
    if tensor * pipeline > 1:
        made.set("compute_config.plan_ngpus", tensor * pipeline)
        made.set("pas_policy", "tp" if pipeline == 1 else "pp" if tensor == 1 else "hybrid")
    if tensor > 1 and pipeline > 1:
        made.set("engine.tensor_parallel", tensor)
        made.set("engine.pipeline_parallel", pipeline)
    if tensor > 1:
        made.set("engine.sequence_parallel", True)
    if shards != 1:
        is_kept = made.given.get("parallelism.fsdp_reshard_after_forward", "default") == "never"
        made.set("engine.zero_stage", 2 if is_kept else 3)
    if is_count(shards):
        made.set("compute_config.runtime_ngpus", replicas * shards * tensor * pipeline)
    else:
        made.remark(
            key,
            "write compute_config.runtime_ngpus: all processes that torchrun starts. It is one replica of the model now.",
        )
    if replicas > 1 and shards != 1:
        made.remark(
            "parallelism.data_parallel_replicate_degree", "parameters are sharded over all replicas, not in groups."
        )


def _micro_batches(made: Translation, key: str, value: Any) -> None:
    rows = made.given.get("training.local_batch_size", 8)
    if _degree(made, "pipeline_parallel") > 1 and is_count(value) and is_count(rows):
        made.set("engine.micro_batches", max(1, rows // value))


def _offload(made: Translation, key: str, value: Any) -> None:
    if value is True and made.values.get("engine", {}).get("zero_stage") == 3:
        made.set("engine.cpu_offload", True)
    elif value is True:
        made.remark(key, "the engine offloads with zero_stage: 3 alone.")


def _optimizer(made: Translation, key: str, value: Any) -> None:
    def given(name: str, default: Any) -> Any:
        return made.given.get(f"optimizer.{name}", default)

    made.set("optimizer.type", f"torch.optim.{value}" if value in ("Adam", "AdamW") else "adapter.make_optimizer")
    if value not in ("Adam", "AdamW"):
        made.remark(key, f"{value} is not translated: write the class and its args for adapter.make_optimizer.")
    betas = [given("beta1", 0.9), given("beta2", 0.95)]
    args = {
        "lr": given("lr", 8e-4),
        "betas": betas,
        "eps": given("eps", 1e-8),
        "weight_decay": given("weight_decay", 0.1),
    }
    made.set("optimizer.args", args)


def _scheduler(made: Translation, key: str, value: Any) -> None:
    given = {
        name: made.given.get(f"lr_scheduler.{name}", default)
        for name, default in (("decay_ratio", None), ("decay_type", "linear"), ("min_lr_factor", 0.0))
    }
    if "lr_scheduler.lr_min" in made.given:
        given["min_lr_factor"] = made.given["lr_scheduler.lr_min"]
    total = made.given.get("lr_scheduler.total_steps") or made.given.get("training.steps", 10000)
    made.set("lr_scheduler.type", "adapter.make_scheduler")
    made.set("lr_scheduler.args", {"warmup_steps": value, "total_steps": total, **given})
    made.set("lr_scheduler.interval", "step")
    made.remark(
        key, "write adapter.make_scheduler(optimizer, warmup_steps, ...): the schedule of torchtitan as a LambdaLR."
    )


def _parts(made: Translation, key: str, value: Any) -> None:
    made.set(
        "model",
        {"type": "adapter.Model", "args": {"name": value, "flavor": made.given.get("model.flavor", "debugmodel")}},
    )
    made.remark(
        key,
        "write adapter.Model: a torch module made of name and flavor, whose forward(batch) returns the loss.",
    )


def _data(made: Translation, key: str, value: Any) -> None:
    def args(stage: str, dataset: Any) -> dict[str, Any]:
        section = "training" if stage == "train" else "validation"
        found = {"dataset": dataset, "seq_len": made.given.get(f"{section}.seq_len", 2048), "stage": stage}
        path = made.given.get(f"{section}.dataset_path")
        return found if path is None else {**found, "path": path}

    made.set("dataset", {"type": "adapter.make_dataset", "train_args": args("train", value)})
    if made.given.get("validation.enable") is True:
        made.values["dataset"]["val_args"] = args("val", made.given.get("validation.dataset", "c4_validation"))
    made.remark(key, "write adapter.make_dataset(dataset, seq_len, stage): a torch dataset of sequences of tokens.")


def _validation(made: Translation, key: str, value: Any) -> None:
    if value is True:
        made.set("val_every_n_train_steps", made.given.get("validation.freq", 10))
        made.set("val_every_n_epochs", None)
        steps = made.given.get("validation.steps", -1)
        if is_count(steps) and made.given.get("training.global_batch_size", -1) == -1:
            made.set("max_val_steps", steps)
        elif is_count(steps):
            made.remark("validation.steps", "write max_val_steps. A validation reads all rows now.")


def _precision(made: Translation, key: str, value: Any) -> None:
    if value == "bfloat16" and made.given.get("training.dtype", "float32") == "float32":
        made.set("engine.precision", "bf16")


def _saving(made: Translation, key: str, value: Any) -> None:
    if made.given.get("checkpoint.enable_checkpoint", value) is not True:
        made.set("checkpoint.no_save", True)
        return
    folder = made.given.get("checkpoint.folder", "checkpoint")
    made.set("checkpoint.save_dir", f"{made.given.get('job.dump_folder', './outputs').rstrip('/')}/{folder}")
    made.set("checkpoint.every_n_train_steps", made.given.get("checkpoint.interval", 500))
    if is_count(kept := made.given.get("checkpoint.keep_latest_k", 10)):
        made.set("checkpoint.keep_last_n_checkpoints", kept)
    made.set("checkpoint.save_best", False)


def _recomputation(made: Translation, key: str, value: Any) -> None:
    option = str(made.given.get("activation_checkpoint.selective_ac_option", "2"))
    if value == "full" or (value == "selective" and option == "1"):
        made.set("engine.activation_checkpointing", "full")
    elif value == "selective" and option == "2":
        made.set("engine.activation_checkpointing", "selective")
    elif value != "none":
        made.remark(
            key, f"{value} ({option}) is not translated: write engine.activation_checkpointing: full or selective."
        )


def _compile(made: Translation, key: str, value: Any) -> None:
    if value is True and "model" in made.given.get("compile.components", ["model", "loss"]):
        made.set("engine.compile", "blocks")


def _logger(name: str) -> Rule:
    def apply(made: Translation, key: str, value: Any) -> None:
        if value is True:
            made.values.setdefault("log", []).append({"type": name})

    return Rule(apply)


def _loader_argument(made: Translation, key: str, value: Any) -> None:
    if value:
        made.set(f"dataloader.train_args.{key.rpartition('.')[2]}", value)


def _clipping(made: Translation, key: str, value: Any) -> None:
    if value:
        made.set("optimizer.clip_gnorm", value)


RULES: dict[str, Rule] = {
    "job.dump_folder": read_by("checkpoint.enable"),
    **keys(
        "job.config_file job.description job.print_config job.print_args job.save_config_file "
        "job.use_for_integration_test",
        unused("the file of a run is in its folder"),
    ),
    "job.custom_config_module": by_hand("write what its fields do.", ""),
    "model.name": Rule(_parts, "llama3"),
    "model.flavor": read_by("model.name"),
    "model.hf_assets_path": unused("adapter.Model and adapter.make_dataset know their files"),
    "model.tokenizer_path": unused("adapter.make_dataset knows its tokenizer"),
    "model.converters": by_hand("convert the model in adapter.Model.", []),
    "model.print_after_conversion": unused(_OWN),
    "parallelism.data_parallel_shard_degree": Rule(_parallelism, -1),
    **keys(
        "data_parallel_replicate_degree tensor_parallel_degree pipeline_parallel_degree fsdp_reshard_after_forward",
        read_by("parallelism.data_parallel_shard_degree"),
        "parallelism.",
    ),
    "parallelism.disable_loss_parallel": unused("the engine's own plan shards the layers"),
    "parallelism.enable_async_tensor_parallel": unused("the engine's own plan shards the layers"),
    "parallelism.enable_compiled_autograd": by_hand("write engine.compile: blocks.", False),
    "parallelism.module_fqns_per_model_part": by_hand("the engine makes the stages of a pipeline itself."),
    "parallelism.pipeline_parallel_split_points": by_hand("the engine makes the stages of a pipeline itself.", []),
    **keys(
        "first_stage_less_layers last_stage_less_layers",
        by_hand("the engine makes the stages of a pipeline itself.", 1),
        "parallelism.pipeline_parallel_",
    ),
    "parallelism.pipeline_parallel_layers_per_stage": by_hand("the engine makes the stages of a pipeline itself."),
    "parallelism.pipeline_parallel_schedule": Rule(
        lambda made, key, value: made.set("engine.pipeline_schedule", value)
        if _degree(made, "pipeline_parallel") > 1
        else None
    ),
    "parallelism.pipeline_parallel_schedule_csv": by_hand("write engine.pipeline_schedule.", ""),
    "parallelism.pipeline_parallel_microbatch_size": Rule(_micro_batches, 1),
    "parallelism.pipeline_parallel_expert_parallel_overlap": unused("experts are not sharded"),
    "parallelism.context_parallel_degree": by_hand("the engine does not shard attention over a context.", 1),
    "parallelism.context_parallel_load_balancer": unused("the engine does not shard attention over a context"),
    "parallelism.context_parallel_rotate_method": unused("the engine does not shard attention over a context"),
    "parallelism.expert_parallel_degree": by_hand("the engine does not shard experts.", 1),
    "parallelism.expert_tensor_parallel_degree": by_hand("the engine does not shard experts.", 1),
    "parallelism.expert_parallel_comm_backend": unused("experts are not sharded"),
    "training.dataset": Rule(_data, "c4_test"),
    "training.dataset_path": read_by("training.dataset"),
    "training.seq_len": read_by("training.dataset"),
    "training.local_batch_size": to("micro_batch_size", default=8),
    "training.global_batch_size": to("global_batch_size", but=(None, -1)),
    "training.max_norm": Rule(_clipping, 1.0),
    "training.steps": to("max_train_steps", default=10000),
    "training.enable_cpu_offload": Rule(_offload),
    "training.dtype": by_hand("write precision: bf16 for parameters in bf16, with fp32 master weights.", "float32"),
    "training.mixed_precision_param": Rule(_precision, "bfloat16"),
    "training.mixed_precision_reduce": unused("gradients are summed in the type of the parameters"),
    "training.compile": Rule(_compile),
    "training.gc_freq": unused(_OWN),
    "training.gc_debug": unused(_OWN),
    "training.seed": to("seed"),
    "training.deterministic": to("trainer.deterministic", but=(None, False)),
    **keys("num_workers persistent_workers prefetch_factor", Rule(_loader_argument), "training.dataloader."),
    "training.dataloader.pin_memory": unused("batches for GPUs are pinned"),
    "optimizer.name": Rule(_optimizer, "AdamW"),
    **keys("lr beta1 beta2 eps weight_decay", read_by("optimizer.name"), "optimizer."),
    "optimizer.implementation": unused("engine.fused_optimizer decides, and the engine knows where it can"),
    "optimizer.early_step_in_backward": by_hand("the optimizer makes its step after the backward pass.", False),
    "lr_scheduler.warmup_steps": Rule(_scheduler, 200),
    **keys("total_steps decay_ratio decay_type min_lr_factor lr_min", read_by("lr_scheduler.warmup_steps"), "lr_scheduler."),
    "validation.enable": Rule(_validation),
    **keys("dataset dataset_path seq_len freq steps", read_by("validation.enable"), "validation."),
    "validation.local_batch_size": unused("a validation loss is the mean over all rows, whatever the batches"),
    **keys(
        "num_workers persistent_workers pin_memory prefetch_factor",
        unused("the loader of the training is used, unless dataloader.val_args has others"),
        "validation.dataloader.",
    ),
    "metrics.enable_tensorboard": _logger("TensorBoardLogger"),
    "metrics.enable_wandb": _logger("WandbLogger"),
    **keys("log_freq disable_color_printing save_tb_folder save_for_all_ranks", unused("every step is reported"), "metrics."),
    "profiling.enable_profiling": by_hand(_TRACES, False),
    "profiling.enable_memory_snapshot": by_hand(_TRACES, False),
    **keys(
        "save_traces_folder profile_freq profiler_active profiler_warmup save_memory_snapshot_folder",
        unused("the callback has its own arguments"),
        "profiling.",
    ),
    "checkpoint.enable": Rule(_saving, False),
    "checkpoint.enable_checkpoint": read_by("checkpoint.enable"),
    **keys("folder interval keep_latest_k", read_by("checkpoint.enable"), "checkpoint."),
    "checkpoint.initial_load_path": by_hand("load the weights in adapter.Model, or write tracing_from_weights."),
    **keys(
        "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized",
        read_by("checkpoint.initial_load_path"),
        "checkpoint.",
    ),
    "checkpoint.load_step": by_hand("write checkpoint.resume_from: the path of a checkpoint.", -1),
    "checkpoint.exclude_from_loading": by_hand("a checkpoint is loaded as a whole.", []),
    "checkpoint.create_seed_checkpoint": by_hand("workers start from equal weights.", False),
    "checkpoint.load_only": by_hand("write checkpoint.no_save: true.", False),
    **keys(
        "enable_ft_dataloader_checkpoints last_save_model_only last_save_in_hf export_dtype async_mode "
        "enable_first_step_checkpoint model_weights_only",
        unused(_SAVED),
        "checkpoint.",
    ),
    "activation_checkpoint.mode": Rule(_recomputation, "selective"),
    **keys(
        "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
        "visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
        read_by("activation_checkpoint.mode"),
        "activation_checkpoint.",
    ),
    "compile.enable": Rule(_compile),
    "compile.components": read_by("compile.enable"),
    "compile.backend": by_hand("engine.compile uses torch's own.", "inductor"),
    "quantize": unused(_CONVERTERS),
    "float8": unused(_CONVERTERS),
    "mx": unused(_CONVERTERS),
    "comm": unused("raysgd makes the process groups"),
    "memory_estimation.enable": by_hand("`raysgd plan -f FILE` computes the memory.", False),
    "memory_estimation.disable_fake_mode": unused("`raysgd plan -f FILE` computes the memory"),
    "fault_tolerance.enable": by_hand("a training continues after a failure; write trainer.failure_config.", False),
    **keys(
        "process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method",
        read_by("fault_tolerance.enable"),
        "fault_tolerance.",
    ),
    "experimental.custom_import": by_hand("import the module in the function of init_env_fn.", ""),
    "experimental.custom_args_module": by_hand("write what its fields do.", ""),
    "debug.seed": to("seed"),
    "debug.deterministic": to("trainer.deterministic", but=(None, False)),
    "debug.deterministic_warn_only": unused("operations without a deterministic form raise"),
    "debug.moe_force_load_balance": by_hand("do so in adapter.Model.", False),
}  # fmt: skip

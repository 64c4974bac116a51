"""The fields and hooks of nnScaler 0.8, and what each is here. ``python -m support.nnscaler_names`` in tests/ writes the page."""

from __future__ import annotations

from raysgd.declarative.args import NOT_NEEDED
from raysgd.declarative.hooks import HOOKS
from support.project import ROOT

PAGE = ROOT / "doc" / "reference" / "nnscaler.md"
#: Fields of raysgd that nnScaler does not have.
OWN = ("trainer", "engine", "search")
#: Fields that mean the same.
SAME = """
    init_module vars compute_config.plan_ngpus compute_config.runtime_ngpus compute_config.use_zero
    compute_config.zero_use_reduce_scatter compute_config.user_config run_mode model.type model.args optimizer.type
    optimizer.args optimizer.clip_gnorm optimizer.loss_reduction optimizer.grad_reduction optimizer.aggregate_outputs_fn
    dataset.type dataset.train_args dataset.val_args dataloader.type dataloader.train_args dataloader.val_args
    dataloader.test_args dataset_sampler.train_args dataset_sampler.val_args dataset_sampler.test_args lr_scheduler.type
    lr_scheduler.args lr_scheduler.interval checkpoint.save_dir checkpoint.no_save checkpoint.save_last checkpoint.save_best
    checkpoint.every_n_train_steps checkpoint.every_n_epochs checkpoint.keep_last_n_checkpoints hook.type log.type
    micro_batch_size global_batch_size grad_accumulation_steps max_epochs max_train_steps max_val_steps
    val_every_n_train_steps val_every_n_epochs enable_progress_bar
""".split()
#: Fields that mean something else, and what.
OTHER = {
    "compute_config.pas_config": "is given to a function of yours in `pas_policy`; a warning says so where there is none",
    "gen_savedir": "where `run_mode: compile` writes the plan",
    "pas_policy": "`autodist` chooses by the engine's plan; a function gets `ComputeConfig` and returns fields of `EngineConfig`",
    "tracing_from_weights": "the model starts from these weights",
    "dataset.test_args": "for `raysgd train --evaluate test`",
    "dataset_sampler.type": "the default does not shuffle validation data",
    "checkpoint.save_type": "`sharded` and `deduped` are the same; `merged` may be given",
    "checkpoint.symlink_best_and_last": "if false, there are neither copies nor links, with a warning",
    "checkpoint.resume_from.checkpoint": "checkpoints of nnScaler cannot be read; a mapping with `__type` is refused",
    "checkpoint.resume_from.with_merged": "no effect: any number of workers reads any checkpoint",
    "log.args": "files of TensorBoard are in the run's folder, not in `root_dir`; further arguments are refused",
    "hook.args": "are given by name",
    "precision": "`bf16` keeps master weights in fp32, `fp16` is autocast; reduced inputs need reduced parameters",
    "seed": "each rank has generators of its own",
    "init_env_fn": "gets the loop, after the process group is made",
}
#: Fields that are refused with a sentence, and what to write.
REFUSED = {
    "checkpoint.resume_from.convert_fn": "save the converted weights as a file, and give `tracing_from_weights`",
}
#: Hooks whose arguments or moments are others, and how.
OTHER_HOOKS = {
    "on_finalize": "also where the training failed in a step",
    "on_epoch_end": "after the scheduler's step of the epoch, which is part of the epoch's checkpoint: no resume loses it",
    "on_step_end": "before the scheduler's step, which may follow the loss of a validation",
    "on_train_step_start": "may take `idx`, too",
    "on_train_step_end": "may take `batches` and `idx`, too; after `after_sync_grad`",
    "on_val_step_start": "may take `idx`, too",
    "on_val_step_end": "may take `batches` and `idx`, too",
    "after_aggregate_train_step_outputs": "may take `idx`, too",
    "after_aggregate_val_step_outputs": "may take `idx`, too; `val_loss` is the mean over rows",
    "before_sync_grad": "before the backward pass of the last micro-batch, in which gradients are averaged",
    "after_sync_grad": "before `on_train_step_end`",
    "before_log_train_metrics": "the dict also has `step`, `epoch` and `rows`",
    "on_load_checkpoint": "the dict has `model`, `optimizer`, `lr_scheduler`, `train_status` and what was added",
    "after_load_checkpoint": "the same dict",
    "on_save_checkpoint": "gets `model`, `optimizer`, `lr_scheduler`, `train_status`, `rank`; may add, and not replace",
}
#: What hooks find at the trainer.
ATTRIBUTES = """
    train_args model optimizer lr_scheduler dataset dataloader loggers train_status total_train_steps_per_epoch max_train_steps
    rank world_size local_rank local_world_size node_rank sync_group log_metrics
""".split()

_HEAD = """\
# Fields and hooks of nnScaler

A file that was written for nnScaler 0.8 trains here if its components are importable: `raysgd train -f job.yaml`. The modules of
components import `TrainHook` and `AggregatedOutputs` from `raysgd.declarative`. This page lists every field and hook. See
[Train by a file](../guides/declarative.md) for what raysgd adds.

`$(a.b)` and `${a.b}` are values of other fields, `$!(vars.x)` is the object that `vars.x` describes, and `$!(self)` the
`TrainerArgs`. `$$(` stands for `$(`; nnScaler writes `$\\(`.

"""


def list_names() -> dict[str, str]:
    """Return each field of nnScaler with how it is here."""
    kinds = {
        "same": dict.fromkeys(SAME, ""),
        "other": OTHER,
        "not used": {name: f"{why}" for name, why in NOT_NEEDED.items()},
        "refused": REFUSED,
    }
    return {name: f"{kind}: {why}" if why else kind for kind, names in kinds.items() for name, why in names.items()}


def make_page() -> str:
    """Return the page."""
    fields = sorted(list_names().items())
    hooks = [(f"{name}({', '.join(given)})", OTHER_HOOKS.get(name, "same")) for name, given in HOOKS.items()]
    return (
        _HEAD
        + "## Fields\n\nThe fields of another meaning, and those that are refused, are listed with what differs.\n\n"
        + _table(("field", "here"), fields)
        + "\n## Hooks\n\nA hook may leave out its last arguments. A method that is named like a hook and is none is refused.\n\n"
        + _table(("hook", "here"), hooks)
        + "\n## The trainer that hooks get\n\nThese attributes are those of nnScaler's `Trainer`: "
        + ", ".join(f"`{name}`" for name in ATTRIBUTES)
        + ".\n`sync_group` is None where one worker trains. `log_metrics` also adds to the run's metrics, as `tag/name`.\n"
    )


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| `{name}` | {here} |" for name, here in rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page())

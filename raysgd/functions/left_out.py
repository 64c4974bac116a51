"""Names of redco that are left out, with what to write instead, and its arguments that are not needed. Driver side."""

from __future__ import annotations

from typing import Any

from raysgd._util.logs import get_logger

_NO_SETUP = "leave it out; a step is compiled with its first batch"
#: Why arguments that say where arrays are have no use.
PLACED_IN_WORKERS = "arrays are placed in the workers"
#: By class and name.
LEFT_OUT = {
    "Deployer": {
        "gen_model_step_rng": "loss_fn and pred_fn get a key; in the script, call gen_rng()",
        "get_model_input_batches": "give the examples to Trainer.train, Trainer.eval_loss or Predictor.predict",
        "get_opt_state_spec": "the state of the optimizer is sharded in the workers, like the parameters and over the replicas",
        "get_params_spec": "print get_sharding_rules(params), which has the spec of each parameter",
        "log_metrics": "give run_tensorboard=True or run_wandb=True, which log what fit reports, or a callback to fit",
        "process_batch_size": "call get_local_global_micro_batch_size(per_device_batch_size)",
        "run_model_step": "give train_step_fn= to Trainer, or a pred_fn to Predictor; they run in the workers",
        "save_outputs": "write what Predictor.predict returned; with workdir, fit writes the outputs of its evaluations",
        "shard_params": "give the parameters to a Trainer or a Predictor, which shards them in the workers",
    },
    "Trainer": {
        "save_ckpt": "call deployer.save_ckpt(folder, trainer.params), or give save_last_ckpt=True to fit",
        "setup_running_step": _NO_SETUP,
    },
    "Predictor": {"setup_running_step": _NO_SETUP},
}


def no_attribute(owner: Any, name: str) -> AttributeError:
    """Return the error for an attribute that does not exist; for a name of redco it says what to write."""
    kind = type(owner).__name__
    advice = LEFT_OUT.get(kind, {}).get(name)
    return AttributeError(
        f"{kind!r} object has no attribute {name!r}{f'; {advice}.' if advice else ''}", name=name, obj=owner
    )


def log_unused(why: str, **arguments: Any) -> None:
    """Log which arguments were given without need."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            get_logger().info("%s=%.80r is not used: %s.", name, value, why)

"""Meta-learning (MAML): parameters from which a few gradient steps fit a curve that was never seen, from ten points.

    python examples/functions/meta_learning.py [--workers 2] [--epochs 10]

A task is a sine of an amplitude and phase of its own. After five steps the mean squared error is below 0.7, where parameters
that were trained on all tasks without inner steps stay above 2. The gradient goes through the inner steps (second order).
Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", 2017.
"""

# test: tests/docs/test_functions_examples.py

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Mlp, init_params

from raysgd.functions import Deployer, Trainer

NUM_POINTS, NUM_STEPS, INNER_LR = 10, 5, 0.02


def load_tasks(num_tasks: int, seed: int) -> list[dict]:
    """Return tasks: points of a curve to learn from, and points of the same curve to be measured at."""
    drawn = np.random.default_rng(seed)
    tasks = []
    for _ in range(num_tasks):
        amplitude, phase = drawn.uniform(0.5, 5), drawn.uniform(0, np.pi)
        x = drawn.uniform(-5, 5, (2 * NUM_POINTS, 1)).astype(np.float32)
        tasks.append({"x": x, "y": (amplitude * np.sin(x + phase)).astype(np.float32)})
    return tasks


def collate_fn(examples):
    return {name: np.stack([example[name] for example in examples]) for name in ("x", "y")}


def adapt(params, x, y, model, num_steps):
    """Return the parameters after gradient steps on a task's points."""

    def loss_of(adapted):
        return jnp.square(model.apply({"params": adapted}, x) - y).mean()

    for _ in range(num_steps):
        params = jax.tree.map(lambda param, grad: param - INNER_LR * grad, params, jax.grad(loss_of)(params))
    return params


def predict_task(params, x, y, model, num_steps):
    adapted = adapt(params, x[:NUM_POINTS], y[:NUM_POINTS], model, num_steps)
    return model.apply({"params": adapted}, x[NUM_POINTS:])


def loss_fn(train_rng, state, params, batch, is_training, model, num_steps):
    predict = jax.vmap(lambda x, y: predict_task(params, x, y, model, num_steps))
    return jnp.square(predict(batch["x"], batch["y"]) - batch["y"][:, NUM_POINTS:]).mean()


def pred_fn(pred_rng, params, batch, model):
    return jax.vmap(lambda x, y: predict_task(params, x, y, model, NUM_STEPS))(batch["x"], batch["y"])


def eval_metric_fn(examples, preds):
    errors = [np.square(pred - example["y"][NUM_POINTS:]).mean() for example, pred in zip(examples, preds, strict=True)]
    return {"squared_error": float(np.mean(errors))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    train_tasks, eval_tasks = load_tasks(1920, seed=1), load_tasks(200, seed=2)
    model = Mlp((40, 40, 1))
    params = init_params(model, np.zeros((1, 1), np.float32))

    errors = {}
    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        for name, num_steps, epochs in (("MAML", NUM_STEPS, args.epochs), ("joint", 0, args.epochs // 3)):
            trainer = Trainer(
                deployer,
                collate_fn=collate_fn,
                loss_fn=partial(loss_fn, model=model, num_steps=num_steps),
                params=params,
                optimizer=optax.chain(optax.clip_by_global_norm(10.0), optax.adam(5e-3)),
            )
            results = trainer.fit(
                train_tasks,
                per_device_batch_size=32,
                n_epochs=epochs,
                eval_examples=eval_tasks,
                eval_per_device_batch_size=100,
                eval_predictor=trainer.get_default_predictor(partial(pred_fn, model=model)),
                eval_metric_fn=eval_metric_fn,
            )
            errors[name] = results.metrics["eval_squared_error"]
    print(
        f"squared error after {NUM_STEPS} steps: {errors['MAML']:.3f} (trained without inner steps: {errors['joint']:.3f})"
    )


if __name__ == "__main__":
    main()

"""Train with differential privacy (DP-SGD): the gradient of each example is clipped, and noise is added to their sum.

    python examples/functions/differential_privacy.py [--workers 2] [--epochs 15]

The loss function clips by `jax.vmap` and draws the noise once for the whole batch, on however many devices it is. Digits are
recognized with an accuracy of 0.8 at epsilon below 6 and delta 1e-5; a guess has 0.1.
Abadi et al., "Deep Learning with Differential Privacy", 2016.
"""

# test: tests/docs/test_functions_examples.py

import argparse
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Mlp, init_params
from scans import load_examples

from raysgd.functions import Deployer, Trainer

CLIP_NORM, NOISE_MULTIPLIER, DELTA = 1.0, 3.5, 1e-5


def epsilon_of(num_epochs: int) -> float:
    """Return epsilon for a training in which each example is in one batch of each epoch.

    Batches do not depend on the data, so an example's clipped gradient enters one sum with Gaussian noise for each epoch: a
    Gaussian mechanism composed ``num_epochs`` times. Two data sets are neighbours if one of their examples counts nothing in
    one of them. Bun and Steinke, "Concentrated Differential Privacy", 2016, propositions 1.6 (the mechanism), 1.7 (composition)
    and 1.3 (epsilon). What epochs gain by drawing batches at random is not counted.
    """
    rho = num_epochs / (2 * NOISE_MULTIPLIER**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


def collate_fn(examples):
    return {
        "images": np.stack([example["image"] for example in examples]),
        "labels": np.array([example["label"] for example in examples]),
    }


def loss_fn(train_rng, state, params, batch, is_training, model):
    """Return a loss whose gradient is the noisy sum of clipped gradients, and the number of rows that divides it."""

    def loss_of(params, image, label):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, image), label)

    def clipped_gradient(image, label):
        grads = jax.grad(loss_of)(params, image, label)
        scale = jnp.minimum(1, CLIP_NORM / optax.tree.norm(grads))
        return jax.tree.map(lambda grad: grad * scale, grads)

    losses = jax.vmap(loss_of, in_axes=(None, 0, 0))(params, batch["images"], batch["labels"])
    if not is_training:
        return losses.mean()
    summed = jax.tree.map(lambda grad: grad.sum(axis=0), jax.vmap(clipped_gradient)(batch["images"], batch["labels"]))
    noise = optax.tree.random_like(train_rng, params, jax.random.normal)
    noisy = jax.tree.map(lambda grad, drawn: grad + NOISE_MULTIPLIER * CLIP_NORM * drawn, summed, noise)
    of_params = optax.tree.vdot(jax.lax.stop_gradient(noisy), params)  # its gradient is the noisy sum
    return of_params + jax.lax.stop_gradient(losses.sum() - of_params), len(losses)  # its value is the loss


def pred_fn(pred_rng, params, batch, model):
    return model.apply({"params": params}, batch["images"]).argmax(-1)


def eval_metric_fn(examples, preds):
    labels = [example["label"] for example in examples]
    return {"accuracy": float(np.mean(np.array(preds) == labels))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()

    train_examples, eval_examples = load_examples()
    model = Mlp((10,))
    params = init_params(model, np.zeros((1, 64), np.float32))

    # The seed is fixed so that the example can be repeated. Where privacy is needed, it must be secret.
    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(
            deployer,
            collate_fn=collate_fn,
            loss_fn=partial(loss_fn, model=model),
            params=params,
            optimizer=optax.sgd(1.0, momentum=0.5),
        )
        results = trainer.fit(
            train_examples,
            per_device_batch_size=256 // args.workers,
            n_epochs=args.epochs,
            eval_examples=eval_examples,
            eval_per_device_batch_size=180,
            eval_predictor=trainer.get_default_predictor(partial(pred_fn, model=model)),
            eval_metric_fn=eval_metric_fn,
        )
    # The losses and metrics that fit reports are computed from the data as they are: epsilon is that of the parameters.
    print(f"epsilon {epsilon_of(args.epochs):.2f} at delta {DELTA}")
    print(f"accuracy: {results.metrics['eval_accuracy']:.3f} (guess: 0.100)")


if __name__ == "__main__":
    main()

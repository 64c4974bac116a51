"""Federated averaging: clients train on their own data, and only their parameters are averaged.

    python examples/functions/federated_averaging.py [--workers 2] [--rounds 40]

An example is a client, so clients are distributed over the workers. Each has digits of two or three kinds, so that what it
learns alone recognizes 0.2 of all digits; the average reaches 0.88.
McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
"""

# test: tests/docs/test_functions_examples.py

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Mlp, init_params
from scans import load_scans
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from raysgd.functions import Deployer, Predictor, Trainer

NUM_CLIENTS, NUM_LOCAL_STEPS, LOCAL_LR, MAX_ROWS = 20, 5, 0.5, 100


def load_clients() -> tuple[list[dict], list[dict]]:
    """Return clients with scans of digits, of different numbers and kinds, and scans of all digits for evaluation."""
    images, labels = load_scans()
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = parts
    drawn = np.random.default_rng(0)
    by_label = np.argsort(y_train, kind="stable")
    parts = np.split(by_label, np.sort(drawn.choice(len(by_label), 2 * NUM_CLIENTS - 1, replace=False)))
    parts = [parts[number] for number in drawn.permutation(len(parts))]
    rows_of = [np.concatenate(parts[client::NUM_CLIENTS])[:MAX_ROWS] for client in range(NUM_CLIENTS)]
    clients = [{"images": x_train[rows], "labels": y_train[rows]} for rows in rows_of]
    return clients, [{"image": image, "label": int(label)} for image, label in zip(x_test, y_test, strict=True)]


def collate_fn(examples):
    """Fill up the rows of each client to the same number."""
    num_rows = np.array([len(example["labels"]) for example in examples])
    batch = {
        "images": np.zeros((len(examples), MAX_ROWS, 64), np.float32),
        "labels": np.zeros((len(examples), MAX_ROWS), np.int32),
        "is_row": np.arange(MAX_ROWS) < num_rows[:, None],
    }
    for number, example in enumerate(examples):
        batch["images"][number, : num_rows[number]] = example["images"]
        batch["labels"][number, : num_rows[number]] = example["labels"]
    return batch


def collate_images(examples):
    return {"images": np.stack([example["image"] for example in examples])}


def loss_fn(train_rng, state, params, batch, is_training, model):
    """Return a loss with the gradient ``params - average``, so that SGD with a learning rate of 1 ends at the average."""

    def local_loss(local, client):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model.apply({"params": local}, client["images"]), client["labels"]
        )
        return (losses * client["is_row"]).sum() / client["is_row"].sum()

    def train_client(client):
        def step(local, _):
            grads = jax.grad(local_loss)(local, client)
            return jax.tree.map(lambda param, grad: param - LOCAL_LR * grad, local, grads), None

        return jax.lax.scan(step, params, length=NUM_LOCAL_STEPS)[0]

    trained = jax.lax.stop_gradient(jax.vmap(train_client)(batch))
    squares = jax.tree.map(
        lambda mine, theirs: jnp.square(mine - theirs).reshape(len(theirs), -1).sum(1), params, trained
    )
    num_rows = batch["is_row"].sum(axis=1)
    return (num_rows * sum(jax.tree.leaves(squares)) / 2).sum(), num_rows.sum()


def pred_fn(pred_rng, params, batch, model):
    return model.apply({"params": params}, batch["images"]).argmax(-1)


def eval_metric_fn(examples, preds):
    labels = [example["label"] for example in examples]
    return {"accuracy": float(np.mean(np.array(preds) == labels))}


def accuracy_alone(clients: list[dict], eval_examples: list[dict]) -> float:
    """Return the mean accuracy of a classifier for each client."""
    test = [example["image"] for example in eval_examples], [example["label"] for example in eval_examples]
    scores = [
        LogisticRegression(max_iter=1000).fit(client["images"], client["labels"]).score(*test)
        for client in clients if len(set(client["labels"])) > 1
    ]  # fmt: skip
    return float(np.mean(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()

    clients, eval_examples = load_clients()
    model = Mlp((64, 10))
    params = init_params(model, np.zeros((1, 64), np.float32))

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(
            deployer,
            collate_fn=collate_fn,
            loss_fn=partial(loss_fn, model=model),
            params=params,
            optimizer=optax.sgd(1.0),
        )
        results = trainer.fit(
            clients,
            per_device_batch_size=NUM_CLIENTS // args.workers,  # all clients take part in a round, which is an epoch
            n_epochs=args.rounds,
            eval_examples=eval_examples,
            eval_per_device_batch_size=180,
            eval_loss=False,
            eval_predictor=Predictor(deployer, collate_fn=collate_images, pred_fn=partial(pred_fn, model=model)),
            eval_metric_fn=eval_metric_fn,
        )
    print(
        f"accuracy: {results.metrics['eval_accuracy']:.3f} (clients alone: {accuracy_alone(clients, eval_examples):.3f})"
    )


if __name__ == "__main__":
    main()

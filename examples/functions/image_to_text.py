"""Describe pictures: a convolution and a transformer write captions such as "a red ring at the top and a blue post below".

    python examples/functions/image_to_text.py [--workers 2] [--epochs 8]

At least 0.9 of the captions of unseen pictures are right in each word; the most frequent caption fits none.
"""

# test: tests/docs/test_functions_examples.py

import argparse
from collections import Counter
from functools import partial

import numpy as np
import optax
from models import Captioner, generate, init_params, only_begin
from texts import PAD, Vocabulary, rouge

from raysgd.functions import Deployer, Trainer

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
SHAPES = {
    "square": ["####", "####", "####", "####"],
    "ring": ["####", "#  #", "#  #", "####"],
    "cross": ["#  #", " ## ", " ## ", "#  #"],
    "post": [" ## ", " ## ", " ## ", " ## "],
}
ROWS = ["at the top", "in the middle", "below"]
LENGTH = 16


def load_dataset(num_rows: int, seed: int) -> list[dict]:
    """Return noisy pictures of 12 x 12 pixels with two things in a grid of 3 x 3 places, and their captions."""
    drawn = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        image = drawn.normal(0, 0.1, (12, 12, 3)).astype(np.float32)
        places = sorted(drawn.choice(9, 2, replace=False))
        names = []
        for place in places:
            colour, shape = drawn.choice(list(COLOURS)), drawn.choice(list(SHAPES))
            top, left = 4 * (place // 3), 4 * (place % 3)
            mask = np.array([[pixel == "#" for pixel in line] for line in SHAPES[shape]])
            image[top : top + 4, left : left + 4][mask] += COLOURS[colour]
            names.append(f"a {colour} {shape} {ROWS[place // 3]}")
        rows.append({"image": image, "caption": " and ".join(names)})
    return rows


def collate_fn(examples, vocabulary):
    return {
        "images": np.stack([example["image"] for example in examples]),
        "ids": vocabulary.encode([example["caption"] for example in examples], LENGTH, has_end=True),
    }


def loss_fn(train_rng, state, params, batch, is_training, model):
    logits = model.apply({"params": params}, batch["images"], batch["ids"])[:, :-1]
    targets = batch["ids"][:, 1:]
    is_word = targets != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * is_word).sum(), is_word.sum()


def pred_fn(pred_rng, params, batch, model):
    encoded = model.apply({"params": params}, batch["images"], method="encode")

    def next_logits(ids):
        return model.apply({"params": params}, ids, encoded, method="decode")

    return generate(next_logits, only_begin(batch["ids"]))


def output_fn(batch_preds, vocabulary):
    return vocabulary.decode(np.asarray(batch_preds))


def eval_metric_fn(examples, preds):
    captions = [example["caption"] for example in examples]
    exact = float(np.mean([pred == caption for pred, caption in zip(preds, captions, strict=True)]))
    return {"exact": exact, **rouge(preds, captions, rouge_types=["rougeL"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    train_examples, eval_examples = load_dataset(1920, seed=1), load_dataset(150, seed=2)
    vocabulary = Vocabulary(example["caption"] for example in train_examples)
    model = Captioner(len(vocabulary))
    params = init_params(model, np.zeros((1, 12, 12, 3), np.float32), np.zeros((1, LENGTH), np.int32))

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        lr_schedule_fn = deployer.get_lr_schedule_fn(
            len(train_examples), per_device_batch_size=32, n_epochs=args.epochs, learning_rate=4e-3, warmup_ratio=0.1
        )
        trainer = Trainer(
            deployer,
            collate_fn=partial(collate_fn, vocabulary=vocabulary),
            loss_fn=partial(loss_fn, model=model),
            params=params,
            optimizer=optax.adam(lr_schedule_fn),
            lr_schedule_fn=lr_schedule_fn,
            params_sharding_rules=deployer.get_sharding_rules(params),
        )
        predictor = trainer.get_default_predictor(
            partial(pred_fn, model=model), partial(output_fn, vocabulary=vocabulary)
        )
        results = trainer.fit(
            train_examples,
            per_device_batch_size=32,
            n_epochs=args.epochs,
            eval_examples=eval_examples,
            eval_per_device_batch_size=64,
            eval_loss=True,
            eval_predictor=predictor,
            eval_metric_fn=eval_metric_fn,
        )
    ((most_frequent, _),) = Counter(example["caption"] for example in train_examples).most_common(1)
    baseline = eval_metric_fn(eval_examples, [most_frequent] * len(eval_examples))
    print(f"ROUGE-L: {results.metrics['eval_rougeL']:.3f} (most frequent caption: {baseline['rougeL']:.3f})")
    print(f"right captions: {results.metrics['eval_exact']:.3f} (most frequent caption: {baseline['exact']:.3f})")


if __name__ == "__main__":
    main()

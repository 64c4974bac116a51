"""Summarize short reports with a sequence-to-sequence transformer, its words generated one after the other, measured by ROUGE.

    python examples/functions/text_to_text.py [--workers 2] [--epochs 4]

The summary names who did what, whatever stands around it. It reaches a ROUGE-L of 0.9; the first words of the report have 0.2.
"""

# test: tests/docs/test_functions_examples.py

import argparse
import random
from functools import partial

import numpy as np
import optax
from models import Seq2Seq, generate, init_params, only_begin
from texts import PAD, Vocabulary, rouge

from raysgd.functions import Deployer, Trainer

NAMES = "anna ben clara david emma felix greta henry".split()
VERBS = "sold bought lost found painted".split()
COLOURS = "red green blue white".split()
THINGS = "boat lamp chair kite piano".split()
TIMES = "today yesterday on-monday at-noon".split()
PLACES = "paris rome oslo cairo".split()
SOURCE_LENGTH, LENGTH = 20, 8


def load_dataset(num_rows: int, seed: int) -> list[dict]:
    drawn = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        name, verb, thing, colour = (drawn.choice(words) for words in (NAMES, VERBS, THINGS, COLOURS))
        news = f"{name} from {drawn.choice(PLACES)} {drawn.choice(TIMES)} {verb} a {colour} {thing}"
        weather = f"{drawn.choice(TIMES)} it was warm in {drawn.choice(PLACES)}"
        rows.append({
            "report": " . ".join(drawn.sample([news, weather], 2)),
            "summary": f"{name} {verb} a {colour} {thing}",
        })  # fmt: skip
    return rows


def collate_fn(examples, vocabulary):
    return {
        "source_ids": vocabulary.encode([example["report"] for example in examples], SOURCE_LENGTH),
        "ids": vocabulary.encode([example["summary"] for example in examples], LENGTH, has_end=True),
    }


def loss_fn(train_rng, state, params, batch, is_training, model):
    logits = model.apply({"params": params}, batch["source_ids"], batch["ids"])[:, :-1]
    targets = batch["ids"][:, 1:]
    is_word = targets != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * is_word).sum(), is_word.sum()


def pred_fn(pred_rng, params, batch, model):
    encoded = model.apply({"params": params}, batch["source_ids"], method="encode")

    def next_logits(ids):
        return model.apply({"params": params}, ids, encoded, batch["source_ids"], method="decode")

    return generate(next_logits, only_begin(batch["ids"]))


def output_fn(batch_preds, vocabulary):
    return vocabulary.decode(np.asarray(batch_preds))


def eval_metric_fn(examples, preds):
    return rouge(preds, [example["summary"] for example in examples], rouge_types=["rouge1", "rouge2", "rougeL"])


def rouge_of_first_words(examples: list[dict]) -> float:
    first_words = [" ".join(example["report"].split()[:5]) for example in examples]
    return eval_metric_fn(examples, first_words)["rougeL"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    train_examples, eval_examples = load_dataset(1920, seed=1), load_dataset(101, seed=2)
    vocabulary = Vocabulary(f"{example['report']} {example['summary']}" for example in train_examples)
    model = Seq2Seq(len(vocabulary))
    params = init_params(model, np.zeros((1, SOURCE_LENGTH), np.int32), np.zeros((1, LENGTH), np.int32))

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(
            deployer,
            collate_fn=partial(collate_fn, vocabulary=vocabulary),
            loss_fn=partial(loss_fn, model=model),
            params=params,
            optimizer=optax.adam(2e-3),
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
            save_argmax_ckpt_by_metrics=["rougeL"],
        )
        best = results.checkpoints["max_rougeL"]
        preds = predictor.predict(eval_examples, params=best, per_device_batch_size=64)
    print(f"for example: {eval_examples[0]['report']!r}\n  summarized: {preds[0]!r}")
    score = eval_metric_fn(eval_examples, preds)["rougeL"]
    print(f"ROUGE-L: {score:.3f} (first words of the report: {rouge_of_first_words(eval_examples):.3f})")


if __name__ == "__main__":
    main()

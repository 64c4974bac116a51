"""Train a language model with tensor parallelism: its parameters are split over two workers by one number.

    python examples/functions/causal_lm.py [--workers 2] [--n-model-shards 2] [--epochs 4]

Its sentences have subjects whose verbs follow after a clause: "the dogs that the cat near us sees run". The model gets to a
perplexity of 2.2 or less; the best possible is 2.02, and that of bigrams 2.7. Its verbs agree with their subjects.
"""

# test: tests/docs/test_functions_examples.py

import argparse
import random
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import optax
from models import Decoder, generate, init_params
from texts import PAD, Vocabulary

from raysgd.functions import Deployer, Trainer

NOUNS = {"one": "dog cat bird child teacher king".split(), "many": "dogs cats birds children teachers kings".split()}
VERBS = {"one": "runs sleeps sings waits".split(), "many": "run sleep sing wait".split()}
SEES = {"one": "sees hears".split(), "many": "see hear".split()}
LENGTH = 12


def load_dataset(num_rows: int, seed: int) -> list[dict]:
    """Return sentences, each with the part of it that ends before the verb of its subject, and what this verb can be."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        subject, other = drawn.choice(["one", "many"]), drawn.choice(["one", "many"])
        prompt = f"the {drawn.choice(NOUNS[subject])} that the {drawn.choice(NOUNS[other])} near us {drawn.choice(SEES[other])}"
        rows.append({"text": f"{prompt} {drawn.choice(VERBS[subject])}", "prompt": prompt, "verbs": VERBS[subject]})
    return rows


def collate_fn(examples, vocabulary):
    return {
        "ids": vocabulary.encode([example["text"] for example in examples], LENGTH, has_end=True),
        "prompts": vocabulary.encode([example["prompt"] for example in examples], LENGTH),
    }


def loss_fn(train_rng, state, params, batch, is_training, model):
    logits = model.apply({"params": params}, batch["ids"])[:, :-1]
    targets = batch["ids"][:, 1:]
    is_word = targets != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * is_word).sum(), is_word.sum()  # for each word, whatever the lengths of the rows


def pred_fn(pred_rng, params, batch, model):
    return generate(lambda ids: model.apply({"params": params}, ids), batch["prompts"])


def output_fn(batch_preds, vocabulary):
    return vocabulary.decode(np.asarray(batch_preds))


def eval_metric_fn(examples, preds):
    agree = [pred.split()[-1] in example["verbs"] for example, pred in zip(examples, preds, strict=True)]
    return {"agreement": float(np.mean(agree))}


def perplexity_of_bigrams(train_examples: list[dict], eval_examples: list[dict]) -> float:
    """Return the perplexity of the model that knows the word before alone, with counts from the training sentences."""
    train, test = (
        [pair for words in sentences for pair in pairwise(words)]
        for sentences in (
            [["<begin>", *example["text"].split(), "<end>"] for example in examples]
            for examples in (train_examples, eval_examples)
        )
    )
    pairs, firsts = Counter(train), Counter(first for first, _ in train)
    return float(np.exp(-np.mean([np.log(max(pairs[pair], 0.1) / firsts[pair[0]]) for pair in test])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--n-model-shards", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    train_examples, eval_examples = load_dataset(1536, seed=1), load_dataset(101, seed=2)
    vocabulary = Vocabulary(example["text"] for example in train_examples)
    model = Decoder(len(vocabulary))
    params = init_params(model, np.zeros((1, LENGTH), np.int32))

    with Deployer(jax_seed=0, num_workers=args.workers, n_model_shards=args.n_model_shards) as deployer:
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
        )
    print(f"agreement: {results.metrics['eval_agreement']:.3f} (guessed: 0.500)")
    baseline = perplexity_of_bigrams(train_examples, eval_examples)
    print(f"perplexity: {np.exp(results.metrics['eval_loss']):.3f} (bigrams: {baseline:.3f})")


if __name__ == "__main__":
    main()

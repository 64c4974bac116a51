"""The template of redco's README with its placeholders filled, every keyword kept: a script for `raysgd.functions`.

    python functions_template.py WORKDIR NUM_WORKERS METRIC

Its model copies words in reverse. Parameters are made with JAX in the driver. It prints a line of JSON.
"""

import json
import sys
from functools import partial

import jax
import numpy as np
import optax

import raysgd.functions as redco

WORDS = ["<pad>", "a", "b", "c", "d", "e", "f"]
LENGTH = 3


class Tokenizer:
    def encode(self, texts):
        return np.array([[WORDS.index(word) for word in text.split()] for text in texts])

    def batch_decode(self, batch_ids):
        return [" ".join(WORDS[number] for number in ids) for ids in np.asarray(batch_ids)]


class Model:
    """Maps each place of the input to a place of the output."""

    def __call__(self, input_ids, params):
        words = params["words"]["embedding"][input_ids]
        return (words.reshape(len(words), -1) @ params["out"]["kernel"]).reshape(len(words), LENGTH, len(WORDS))

    def generate(self, input_ids, params, num_words):
        return self(input_ids, params)[:, :num_words].argmax(-1)


class RougeScorer:
    """ROUGE-L is left to the examples: here it is the share of words at their places."""

    def compute(self, predictions, references, rouge_types):
        pairs = [(one.split(), other.split()) for one, other in zip(predictions, references, strict=True)]
        score = np.mean([a == b for one, other in pairs for a, b in zip(one, other, strict=True)])
        return dict.fromkeys(rouge_types, score)


def load_dataset():
    random = np.random.default_rng(0)
    texts = [random.choice(WORDS[1:], LENGTH) for _ in range(75)]
    examples = [{"source": " ".join(each), "target": " ".join(each[::-1])} for each in texts]
    return examples, examples[:10]


def make_model():
    keys = jax.random.split(jax.random.PRNGKey(0))
    shapes = {"words": {"embedding": (len(WORDS), 8)}, "out": {"kernel": (8 * LENGTH, LENGTH * len(WORDS))}}
    params = jax.tree.map(
        lambda shape, key: 0.3 * jax.random.normal(key, shape),
        shapes,
        {"words": {"embedding": keys[0]}, "out": {"kernel": keys[1]}},
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return Model(), params


def collate_fn(examples, tokenizer):
    return {
        "input_ids": tokenizer.encode([each["source"] for each in examples]),
        "labels": tokenizer.encode([each["target"] for each in examples]),
    }


def loss_fn(train_rng, state, params, batch, is_training, model):
    logits = model(input_ids=batch["input_ids"], params=params)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def pred_fn(pred_rng, params, batch, model, gen_kwargs):
    return model.generate(input_ids=batch["input_ids"], params=params, **gen_kwargs)


def output_fn(batch_preds, tokenizer):
    return tokenizer.batch_decode(batch_preds)


def eval_metric_fn(examples, preds, rouge_scorer):
    return rouge_scorer.compute(
        predictions=preds,
        references=[example["target"] for example in examples],
        rouge_types=["rouge1", "rouge2", "rougeL"],
    )


def main(workdir, num_workers, metric):
    deployer = redco.Deployer(
        jax_seed=42,
        n_model_shards=1 if num_workers == 1 else 2,
        workdir=workdir,
        run_tensorboard=True,
        run_wandb=True,
        host0_address="111.222.333.444",
        n_processes=num_workers,
    )
    train_examples, valid_examples = load_dataset()
    model, params = make_model()
    tokenizer = Tokenizer()
    optimizer = optax.adam(0.05)
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=partial(collate_fn, tokenizer=tokenizer),
        loss_fn=partial(loss_fn, model=model),
        params=params,
        optimizer=optimizer,
        params_sharding_rules=deployer.get_sharding_rules(params),
    )
    predictor = trainer.get_default_predictor(
        pred_fn=partial(pred_fn, model=model, gen_kwargs={"num_words": LENGTH}),
        output_fn=partial(output_fn, tokenizer=tokenizer),
    )
    result = trainer.fit(
        train_examples=train_examples,
        per_device_batch_size=16 // deployer.axis_sizes["data"],
        n_epochs=4,
        eval_examples=valid_examples,
        eval_per_device_batch_size=4,
        eval_loss=True,
        eval_predictor=predictor,
        eval_metric_fn=partial(eval_metric_fn, rouge_scorer=RougeScorer()),
        eval_sanity_check=True,
        save_every_ckpt=False,
        save_last_ckpt=True,
        save_argmin_ckpt_by_metrics=None,
        save_argmax_ckpt_by_metrics=[metric],
        save_opt_states=True,
    )
    print(json.dumps({"history": result.history, "checkpoints": sorted(result.checkpoints)}))
    deployer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

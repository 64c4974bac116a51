"""Classify sentences with a `Finetuner`: a small BERT with random weights, on generated sentences.

    python examples/09_text_classification.py [--workers 2] [--epochs 4] [--zero-stage 3] [--precision bf16]

A subclass says what the data, the model, the loss and the metrics are. The loop, checkpoints, evaluation on all workers, and the
default optimizer and scheduler are the template's. Nothing is downloaded.
"""

# test: tests/docs/test_engine_examples.py

import argparse
import random
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

import raysgd

GOOD = "good great fine lovely superb clever warm bright".split()
BAD = "bad poor dull awful weak slow cold bleak".split()
OTHER = [f"thing{number}" for number in range(40)]
NUMBER_OF = {word: number for number, word in enumerate(["[PAD]", "[CLS]", *GOOD, *BAD, *OTHER])}


def make_rows(num_rows: int, seed: int) -> list[tuple[list[int], int]]:
    """Return sentences of word numbers, and whether they have more good words than bad ones."""
    drawn = random.Random(seed)
    rows = []
    for index in range(num_rows):
        label = index % 2
        words = drawn.choices(OTHER, k=drawn.randint(3, 10)) + drawn.choices(GOOD if label else BAD, k=2)
        drawn.shuffle(words)
        rows.append(([NUMBER_OF[word] for word in ["[CLS]", *words]], label))
    return rows


def collate(rows: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    longest = max(len(words) for words, _ in rows)
    return {
        "input_ids": torch.tensor([words + [0] * (longest - len(words)) for words, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(words) + [0] * (longest - len(words)) for words, _ in rows]),
        "labels": torch.tensor([label for _, label in rows]),
    }


def train_func(config: dict) -> dict:
    class Classifier(raysgd.Finetuner):
        def train_valid_test_datasets_provider(self):
            return make_rows(600, seed=1), make_rows(101, seed=2), make_rows(99, seed=3), collate

        def model_optimizer_lr_scheduler_provider(self):
            torch.manual_seed(0)
            sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
            return BertForSequenceClassification(BertConfig(vocab_size=len(NUMBER_OF), **sizes)), None, None

        def run_forward_step(self, batch, model):
            return model(**batch).loss

        def run_compute_metrics(self, model, eval_dataloader):
            found, labels = [], []
            for batch in eval_dataloader:
                found.append(self.gather(model(**batch).logits.argmax(-1)))
                labels.append(self.gather(batch["labels"]))
            correct = torch.cat(found) == torch.cat(labels)
            return {"accuracy": correct.float().mean().item(), "rows": len(correct)}

    engine = raysgd.Engine(**config["engine"])
    return Classifier(
        engine=engine, batch_size=config["batch_size"], epochs=config["epochs"], learning_rate=2e-3
    ).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    config = {
        "epochs": args.epochs,
        "batch_size": 32 // args.workers,
        "engine": {"zero_stage": args.zero_stage, "precision": args.precision},
    }
    with raysgd.Trainer(num_workers=args.workers, backend="torch", seed=0) as trainer:
        print(trainer)
        metrics = trainer.run(train_func, config)
    print(f"accuracy on {metrics['test_rows']} sentences: {metrics['test_accuracy']:.3f}")


if __name__ == "__main__":
    main()

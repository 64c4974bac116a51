"""A training script for transformers, and the five statements that make it run on many workers with the engine.

    python examples/08_five_lines.py [--workers 2] [--epochs 3]

Lines that end with `# +` were added; `# -` is before what they replace. A small BERT with random weights learns whether two
sentences have the same words, from generated sentences. Nothing is downloaded.
"""

# test: tests/docs/test_engine_examples.py

import argparse
import random
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
    set_seed,
)

import raysgd

WORDS = [f"word{number}" for number in range(40)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def load_dataset(num_rows: int, seed: int) -> list[dict]:
    drawn = random.Random(seed)
    rows = []
    for index in range(num_rows):
        first = drawn.sample(WORDS, drawn.randint(3, 8))
        second = drawn.sample(first, len(first)) if index % 2 else drawn.sample(WORDS, len(first))
        rows.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "labels": index % 2})
    return rows


def train_func(config: dict) -> list[float]:
    """Return the loss of each step."""
    set_seed(0)
    engine = raysgd.Engine()  # +

    tokenizer = make_tokenizer()

    def tokenize_function(example: dict) -> dict:
        outputs = tokenizer(example["sentence1"], example["sentence2"], truncation=True, max_length=32)
        return {**outputs, "labels": example["labels"]}

    train_rows: Any = [tokenize_function(example) for example in load_dataset(config["rows"], seed=1)]
    eval_rows: Any = [tokenize_function(example) for example in load_dataset(64, seed=2)]

    def collate_fn(examples: list) -> Any:
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    size = config["micro_batch_size"]
    train_dataloader = DataLoader(train_rows, shuffle=config["shuffle"], collate_fn=collate_fn, batch_size=size)
    eval_dataloader = DataLoader(eval_rows, shuffle=False, collate_fn=collate_fn, batch_size=size)

    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    )
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])

    # - lr_scheduler = get_linear_schedule_with_warmup(
    # -     optimizer=optimizer, num_warmup_steps=config["warmup_steps"], num_training_steps=config["train_steps"]
    # - )
    lr_scheduler = partial(  # +
        get_linear_schedule_with_warmup,  # +
        num_warmup_steps=config["warmup_steps"],  # +
        num_training_steps=config["train_steps"],  # +
    )  # +

    model, optimizer, lr_scheduler, train_dataloader, eval_dataloader = engine.compose(  # +
        model=model,  # +
        train_dataloader=train_dataloader,  # +
        eval_dataloader=eval_dataloader,  # +
        optimizer=optimizer,  # +
        lr_scheduler_fn=lr_scheduler,  # +
    )  # +

    losses = []
    for epoch in range(config["epochs"]):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            # - loss.backward()
            engine.backward(loss)  # +
            lr_scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            eval_losses = [model(**batch).loss for batch in eval_dataloader]
        raysgd.report(epoch=epoch, loss=losses[-1], eval_loss=torch.stack(eval_losses).mean())
    return losses


def make_config(workers: int, epochs: int) -> dict:
    rows, batch_size = 512, 32
    return {
        "epochs": epochs,
        "rows": rows,
        "micro_batch_size": batch_size // workers,
        "shuffle": True,
        "lr": 2e-3,
        "warmup_steps": 10,
        "train_steps": epochs * rows // batch_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    with raysgd.Trainer(num_workers=args.workers, backend="torch", seed=0) as trainer:
        print(trainer)
        config = make_config(args.workers, args.epochs)
        losses = trainer.run(train_func, config, reduce={"loss": "mean", "eval_loss": "mean"})
    print(f"{len(losses)} steps, loss of the first one {losses[0]:.3f}, of the last one {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

"""Train a small GPT, letter by letter, on the source code of Python's standard library, on two workers.

    python examples/03_char_lm.py [--workers 2] [--steps 400] [--resume PATH]

The loss on unseen modules falls from 4.6 nats a letter (random guessing) below 2.0 within a minute or two on two CPU cores. Then
the model writes a few lines. Interrupt the training whenever you like: it prints the path of its last checkpoint, and
`--resume` with that path continues with the same random excerpts.
"""

# test: tests/docs/test_char_lm.py

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import raysgd

LETTERS = "\n" + "".join(map(chr, range(32, 127)))  # all other characters are read as "?"
CONTEXT = 64


def read_text(num_letters: int = 2_000_000) -> torch.Tensor:
    """Return the beginning of the standard library's modules, in the order of their names."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= num_letters:
            break
    codes = {letter: code for code, letter in enumerate(LETTERS)}
    return torch.tensor([codes.get(letter, codes["?"]) for letter in text[:num_letters]], dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.norm(self.blocks(self.letters(codes) + self.places(places))))


def windows(text: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return excerpts of the text from random places, and the same excerpts shifted by one letter."""
    starts = torch.randint(len(text) - CONTEXT, (count,)).tolist()
    excerpts = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long().to(raysgd.device())
    return excerpts[:, :-1], excerpts[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def learning_rate(step: int, config: dict) -> float:
    """Return the learning rate of a step: a warm-up, then half a cosine."""
    return config["lr"] * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / config["steps"]))


def train_func(config: dict) -> nn.Module:
    text = read_text()
    seen, unseen = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])
    held_out = unseen.unfold(0, CONTEXT + 1, len(unseen) // 64)[raysgd.world_rank() :: raysgd.world_size()].long()
    held_out = held_out.to(raysgd.device())
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    start = 0
    if state := raysgd.load_checkpoint():  # also restores the random number generators
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    model = raysgd.torch.prepare_model(model)
    optimizer = raysgd.torch.prepare_optimizer(optimizer)

    losses, began = [], time.monotonic()
    for step in range(start, config["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss = loss_of(model, *windows(seen, config["batch_size"]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % config["report_every"] and step + 1 < config["steps"]:
            continue
        with torch.no_grad():
            unseen_loss = loss_of(model, held_out[:, :-1], held_out[:, 1:])
        letters = len(losses) * config["batch_size"] * CONTEXT
        raysgd.report(
            step=step + 1,
            loss=torch.stack(losses).mean(),
            unseen_loss=unseen_loss,
            letters_per_s=round(letters / (time.monotonic() - began)),
        )
        raysgd.save_checkpoint({"step": step + 1, "model": model, "optimizer": optimizer})
        losses, began = [], time.monotonic()
    return model


@torch.no_grad()
def write(model: nn.Module, beginning: str, num_letters: int = 400) -> str:
    codes = [LETTERS.index(letter) for letter in beginning]
    for _ in range(num_letters):
        scores = model(torch.tensor([codes[-CONTEXT:]]))[0, -1]
        codes.append(int(torch.multinomial(F.softmax(scores / 0.7, dim=0), 1)))
    return "".join(LETTERS[code] for code in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--resume", metavar="PATH", help="folder of a checkpoint to resume from")
    parser.add_argument("--goal", type=float, help="fail unless the loss on unseen modules ends below this")
    args = parser.parse_args()

    config = {"steps": args.steps, "batch_size": 32 // args.workers, "lr": 4e-3, "report_every": 20}
    keep = raysgd.CheckpointConfig(num_to_keep=2)
    with raysgd.Trainer(num_workers=args.workers, backend="torch", seed=0, checkpoint_config=keep) as trainer:
        print(trainer)
        try:
            model = trainer.run(
                train_func,
                config,
                resume_from=args.resume,
                reduce={"loss": "mean", "unseen_loss": "mean", "letters_per_s": "sum"},
            )
        finally:
            if last := trainer.get_last_checkpoint():
                print(f"to resume from here: --resume {last.path}")
    print(f"generated text:\n\n{write(model, 'def ')}\n")
    loss = last.metrics["unseen_loss"] if last else math.nan  # resumed at its end: no step was trained
    print(f"loss on unseen modules: {loss:.3f} nats a letter")
    if args.goal is not None and not loss < args.goal:
        raise SystemExit(f"{loss:.3f} is not below the goal of {args.goal}")


if __name__ == "__main__":
    main()

"""Train a LLaMA of transformers with FSDP and tensor parallelism on four workers, of which one is killed in the middle.

    python examples/10_causal_lm.py [--workers 4] [--steps 200] [--kill-at 20] [--output causal_lm]

Two workers hold one replica of the model between them, and FSDP shards each half over the replicas. It has random weights and
learns Python's standard library, letter by letter, as in 03_char_lm.py. Rank 1 is killed by SIGKILL: the group continues with
the one replica that is left, from the shards that each rank has in memory, and grows again when a new worker is ready. At the
end the model is exported, loaded by transformers, and writes a line. Nothing is downloaded.
"""

# test: tests/docs/test_engine_examples.py

import argparse
import importlib
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import raysgd
from raysgd.testing import FaultPlan, Kill

letters = importlib.import_module("03_char_lm")  # the file next to this one; its name is not an identifier

BATCH_SIZE = 16  # of all workers together, however many there are
LENGTH = 64


def make_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(letters.LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )


def train_func(config: dict) -> int:
    engine = raysgd.Engine(zero_stage=3, tensor_parallel=2)
    model = LlamaForCausalLM(make_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
    state = engine.load_checkpoint()
    step = 0 if state is None else state["step"]
    if state is None and raysgd.world_rank() == 0:
        print(engine.describe())
    # The workers of a replica read the same rows. After a failure, the rows that are left are read.
    rows = raysgd.get_dataset().get_split()
    for batch in rows.to_torch(global_batch_size=BATCH_SIZE, shuffle="full"):
        loss = model(input_ids=batch["letters"], labels=batch["letters"]).loss
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        raysgd.report(step=step, loss=loss.detach())
        engine.save_checkpoint(step=step)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="a multiple of two")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-at", type=int, default=20, help="the step after which rank 1 is killed")
    parser.add_argument("--output", default="causal_lm", help="a folder for the exported model")
    args = parser.parse_args()

    # Ray counts logical CPUs, so the workers fit on any number of cores.
    ray.init(address="local", num_cpus=args.workers, include_dashboard=False)
    num_letters = args.steps * BATCH_SIZE * LENGTH
    rows = letters.read_text(num_letters).long().reshape(-1, LENGTH)
    plan = FaultPlan([Kill(rank=1, step=args.kill_at)])
    keep = raysgd.CheckpointConfig(num_to_keep=2, storage_interval=20)
    with raysgd.Trainer((2, args.workers), "torch", workers_per_replica=2, seed=0, checkpoint_config=keep) as trainer:
        print(trainer)
        stream = trainer.run_generator(
            plan.wrap(train_func),
            {"lr": 5e-3},
            dataset={"letters": rows.numpy()},
            callbacks=[raysgd.callbacks.ProgressCallback(mode="off")],
            reduce={"loss": "mean"},
        )
        attempt = 1
        for result in stream:
            step, size = result["step"], result["world_size"]
            if result["attempt"] > attempt:
                attempt = result["attempt"]
                print(f"resumed after step {step - 1} with {size} workers")
            if step % 10 == 0:
                print(f"step {step}: loss {result['loss']:.3f}, {size} workers")
        checkpoint = trainer.get_last_checkpoint()
    plan.assert_all_fired()
    assert checkpoint is not None

    raysgd.torch.export(checkpoint, args.output, config=make_config())
    model: Any = AutoModelForCausalLM.from_pretrained(args.output)
    begin = torch.tensor([[letters.LETTERS.index(letter) for letter in "def "]])
    written = model.generate(begin, max_new_tokens=40, do_sample=False)
    print(f"exported to {args.output}; it writes: " + "".join(letters.LETTERS[code] for code in written[0]))


if __name__ == "__main__":
    main()

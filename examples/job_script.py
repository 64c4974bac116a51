"""A job for a Ray cluster: the script runs on the cluster, and can be submitted from anywhere.

    ray job submit --address http://HEAD:8265 --working-dir examples -- python job_script.py --storage /shared/runs

`HEAD` is the cluster's head node. The folder `--working-dir` is sent with the job, with its modules and small data. raysgd and
torch are installed on the nodes, or named in `--runtime-env`. On several nodes, `--storage` is a folder that all of them see, or
a URI such as `s3://bucket/runs`. An exception of train_func fails the job with its traceback. `ray job logs` and `ray job stop`
work as usual; a stopped job keeps its checkpoints, and `--resume` with the folder of one resumes from it.
"""

# test: tests/docs/test_job.py

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd


def train_func(config: dict) -> None:
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    start = 0
    if state := raysgd.load_checkpoint():
        model.load_state_dict(state["model"])
        start = state["epoch"] + 1
    model = raysgd.torch.prepare_model(model)
    loader = raysgd.torch.prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    loader.set_epoch(start)
    for epoch in range(start, config["epochs"]):
        losses = []
        for pixels, digits in loader:
            loss = nn.functional.cross_entropy(model(pixels), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        raysgd.report(epoch=epoch, loss=torch.stack(losses).mean())
        raysgd.save_checkpoint({"epoch": epoch, "model": model})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--storage", help="folder or URI for the run's files; ~/raysgd_runs of the head node if not given"
    )
    parser.add_argument("--resume", metavar="PATH", help="folder of a checkpoint to resume from")
    args = parser.parse_args()

    files = raysgd.RunConfig(storage_path=args.storage)
    with raysgd.Trainer(num_workers=args.workers, backend="torch", seed=0, run_config=files) as trainer:
        print(trainer)
        config = {"lr": 0.1, "epochs": args.epochs}
        trainer.run(train_func, config, resume_from=args.resume, reduce={"loss": "mean"})
        print(f"run directory: {trainer.run_dir}")
        print(f"checkpoint:    {trainer.get_last_checkpoint().path}")


if __name__ == "__main__":
    main()

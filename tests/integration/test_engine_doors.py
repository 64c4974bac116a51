"""`accelerate`, the templates, `Engine.memory`, and other libraries in train_func, on the workers of a run."""

from __future__ import annotations

from typing import Any

import pytest

import raysgd
from support.runs import latest_run, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

TORCH_TRAINER = {"num_workers": 2}
NUM_ROWS = 31  # does not divide by the number of workers


def make_rows() -> tuple[Any, Any]:
    import torch

    x = torch.randn(NUM_ROWS, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] * x[:, 1:2]).contiguous()


def make_model() -> Any:
    """Return a model with a scalar parameter."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 1))
            self.gain = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Any) -> Any:
            return self.gain * self.layers(x)

    torch.manual_seed(1)
    return Model()


# -- accelerate ------------------------------------------------------------------------------------------------------------


def losses_of(model: Any, optimizer: Any, criterion: Any) -> list[float]:
    """Train on 16 rows in each step, which all ranks divide; return the losses of all of them."""
    x, y = make_rows()
    rank, size = raysgd.world_rank(), raysgd.world_size()
    losses = []
    for step in range(16):
        rows = slice(step + rank, step + 16, size)
        optimizer.zero_grad()
        loss = criterion(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(sum(raysgd.gather(loss.item())) / size)
    return losses


def train_with(config: dict[str, Any]) -> list[list[float]]:
    import torch
    from torch import nn

    found = []
    for each in config["strategies"]:
        settings = dict(each)
        model, criterion = make_model(), nn.MSELoss()
        if settings.pop("optimizer", True):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer = raysgd.accelerate(model, criterion, optimizer=optimizer, **settings)
        else:
            model = raysgd.accelerate(model, criterion, **settings)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found.append(losses_of(model, optimizer, criterion))
    return found


EXACT: list[dict[str, Any]] = [
    {},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"optimizer": False},
    {"optimizer": False, "zero_stage": 3},
    {"zero_stage": 3, "activation_checkpointing": "full", "clip_grad_norm": 1e6},
]
REDUCED: list[dict[str, Any]] = [
    {"mixed_precision": True},
    {"mixed_precision": "bf16", "zero_stage": 3, "optimizer": False},
    {"mixed_precision": "fp16", "loss_scale": 1024.0},
    {"mixed_precision": "fp16", "loss_scale": 1024.0, "zero_stage": 2},
    {"mixed_precision": "fp16", "loss_scale": 1024.0, "zero_stage": 3},
]


def test_accelerated_loops_have_the_losses_of_the_plain_loop(torch_trainer: raysgd.Trainer) -> None:
    import torch

    model = make_model()
    plain = losses_of(model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.nn.MSELoss())
    found = torch_trainer.run(train_with, {"strategies": [*EXACT, *REDUCED]}, callbacks=quiet())
    for strategies, losses in zip([*EXACT, *REDUCED], found, strict=True):
        rel = 1e-5 if strategies in EXACT else 0.03
        assert losses == pytest.approx(plain, rel=rel), strategies
        assert strategies in EXACT or losses != pytest.approx(plain, rel=1e-5), f"{strategies} had no effect"


def test_the_reviews_two_lines_work(torch_trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> Any:
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loss = nn.MSELoss()
        train_loader = raysgd.torch.prepare_data_loader(DataLoader(TensorDataset(*make_rows()), batch_size=8))

        model = raysgd.accelerate(model, loss, mixed_precision=True)
        for epoch in range(config["epoch"]):
            for inputs, targets in train_loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
            raysgd.report(epoch=epoch, weight=model.state_dict()["0.weight"].sum())
        return model

    returned = torch_trainer.run(train_func, {"epoch": 2}, callbacks=quiet())
    assert type(returned).__name__ == "Sequential" and returned(make_rows()[0]).shape == (NUM_ROWS, 1)
    assert latest_run(torch_trainer).metrics["weight"].iloc[-1] == pytest.approx(returned[0].weight.sum().item())


# -- templates -------------------------------------------------------------------------------------------------------------


def make_template(**settings: Any) -> Any:
    from torch import nn
    from torch.utils.data import TensorDataset

    from raysgd import Finetuner

    class Tuner(Finetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            x, y = make_rows()
            return TensorDataset(x, y), TensorDataset(x[:9], y[:9]), TensorDataset(x[9:12], y[9:12])

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return make_model(), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            import torch

            targets, of_batches = [], []
            for x, y in eval_dataloader:
                model(x)  # sharded models need this call on all ranks equally often
                of_batches.append(self.gather({"y": y, "text": [f"{each:.3f}" for each in y[:, 0].tolist()]}))
                targets.append(y)
            whole = self.gather(torch.cat(targets))
            assert torch.equal(whole, torch.cat([each["y"] for each in of_batches]))
            text = [one for each in of_batches for one in each["text"]]
            assert text == [f"{each:.3f}" for each in whole[:, 0].tolist()]
            return {"targets": whole[:, 0].tolist(), "loss": self._compute_loss(eval_dataloader)}

    return Tuner(engine=raysgd.Engine(**settings.pop("engine", {})), **settings)


def run_template(config: dict[str, Any]) -> Any:
    return make_template(**config).train()


def test_templates_train_and_evaluate_every_row_once(torch_trainer: raysgd.Trainer) -> None:
    found = []
    for strategies in ({}, {"zero_stage": 3}, {"zero_stage": 2, "accumulation_steps": 2}):
        settings = {"epochs": 2, "learning_rate": 0.01, "log_interval": 2, "batch_size": 4, "engine": strategies}
        one, other = torch_trainer.run(run_template, settings, callbacks=quiet(), returns="all")
        assert one == other, "the ranks have different metrics"
        found.append(one)
    metrics, sharded, accumulated = found
    _, y = make_rows()
    assert metrics["eval_targets"] == y[:9, 0].tolist()
    assert metrics["test_targets"] == y[9:12, 0].tolist()
    assert (metrics["step"], accumulated["step"]) == (8, 4)
    assert sharded["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5)
    assert sharded["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    reported = latest_run(torch_trainer).metrics
    assert reported["step"].tolist() == [2, 4, 4], "after each epoch, with its evaluation, and of the test data"


# -- memory ----------------------------------------------------------------------------------------------------------------


def make_layers() -> Any:
    from torch import nn

    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def mean_of(model: Any, batch: Any) -> Any:
    return model(batch).mean()


def measure_memory(config: dict[str, Any]) -> list[dict[str, int]]:
    import torch

    found = []
    for stage in config["stages"]:
        model = make_layers()
        engine = raysgd.Engine(zero_stage=stage)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
        with engine.measure_activations():
            engine.backward(model(torch.ones(2, 64)).mean())
        before = engine.memory()
        optimizer.step()
        found.append({**vars(engine.memory()), "gradients": before.gradients})
    return found


def test_zero_stages_divide_the_memory(torch_trainer: raysgd.Trainer) -> None:
    stages = torch_trainer.run(measure_memory, {"stages": [0, 1, 2, 3]}, callbacks=quiet())
    num_bytes = 4 * 4 * (64 * 64 + 64)
    counts = 4 * 8  # a count of steps for each parameter
    whole, first, second, third = stages
    for stage in stages:
        assert stage["kept_activations"] == 3 * 2 * 64 * 4, "the inputs of three layers; that of the first is the batch"
    del whole["kept_activations"], third["kept_activations"]
    assert whole == {"parameters": num_bytes, "gradients": num_bytes, "optimizer": 2 * num_bytes + counts}
    for stage in (first, second):
        assert stage["parameters"] == num_bytes
        assert stage["optimizer"] == num_bytes + counts
        # Each rank's row has a flag for each parameter: whether it was used.
        assert stage["gradients"] == num_bytes // 2 + 4 * 8
    assert third == {"parameters": num_bytes // 2, "gradients": num_bytes // 2, "optimizer": num_bytes + counts}
    for stage, measured in enumerate(stages):
        config = raysgd.EngineConfig(zero_stage=stage)
        predicted = raysgd.engine.predict_memory(make_layers, (2, 64), config, 2, loss_fn=mean_of, device="cpu")
        assert predicted.kept_activations == 3 * 2 * 64 * 4 + 4, "with the loss"
        for name, size in measured.items():
            assert getattr(predicted, name) == pytest.approx(size, rel=0.03), f"ZeRO-{stage}, {name}"


# -- other libraries -------------------------------------------------------------------------------------------------------


def train_with_fabric(config: Any) -> Any:
    import torch
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader, TensorDataset

    nodes = raysgd.world_size() // raysgd.local_world_size()
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=raysgd.local_world_size(), num_nodes=nodes)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*make_rows()), batch_size=4))
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weight = float(model.layers[0].weight.detach().sum())
    return fabric.global_rank, fabric.world_size, len(loader), weight, fabric.all_gather(loss.detach()).tolist()


def test_lightning_fabric_uses_the_group_of_the_run(torch_trainer: raysgd.Trainer) -> None:
    pytest.importorskip("lightning_fabric", reason="needs Lightning: pip install pytorch-lightning")
    first, second = torch_trainer.run(train_with_fabric, {}, callbacks=quiet(), returns="all")
    assert [first[:3], second[:3]] == [(0, 2, 4), (1, 2, 4)]
    assert first[3:] == second[3:], "the gradients were not averaged"


def train_with_accelerate(config: Any) -> Any:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    seen = sum(len(accelerator.gather_for_metrics(y)) for _, y in loader)
    weight = float(accelerator.unwrap_model(model).layers[0].weight.detach().sum())
    return accelerator.process_index, accelerator.num_processes, len(loader), seen, weight


def test_hugging_face_accelerate_uses_the_group_of_the_run(torch_trainer: raysgd.Trainer) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    first, second = torch_trainer.run(train_with_accelerate, {}, callbacks=quiet(), returns="all")
    assert [first[:4], second[:4]] == [(0, 2, 4, NUM_ROWS), (1, 2, 4, NUM_ROWS)]
    assert first[4] == second[4], "the gradients were not averaged"


@pytest.mark.parametrize("library", ["fabric", "accelerate"])
def test_model_of_another_library_is_refused_by_the_engine(torch_trainer: raysgd.Trainer, library: str) -> None:
    def train_func(config: dict[str, Any]) -> None:
        if config["library"] == "fabric":
            from lightning_fabric import Fabric

            fabric = Fabric(accelerator="cpu", strategy="ddp", devices=raysgd.local_world_size())
            fabric.launch()
            model = fabric.setup(make_model())
        else:
            from accelerate import Accelerator

            model = Accelerator().prepare(make_model())
        raysgd.accelerate(model, zero_stage=3)

    pytest.importorskip({"fabric": "lightning_fabric"}.get(library, library))
    with pytest.raises(raysgd.errors.ConfigError, match="wrapped by DistributedDataParallel already"):
        torch_trainer.run(train_func, {"library": library}, callbacks=quiet())

"""Loops as users write them, with a live state: what each holds, and what it does with a batch. Runs in workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import raysgd
from support.runs import travels_by_value

travels_by_value(__name__)

WIDTH = 16


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Linear(WIDTH, 1))


class Loop:
    """A plain loop. Subclasses are habits.

    Attributes:
        objects: What has the state.
        can_fall_back: A death may also cost a checkpoint, or the beginning.
    """

    can_fall_back = False

    def __init__(self) -> None:
        self.model = raysgd.torch.prepare_model(make_model())
        self.optimizer = self.make_optimizer()
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def loss(self, x: Any, y: Any) -> Any:
        return (self.model(x) - y).square().mean()

    def change(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, number: int, x: Any, y: Any) -> None:
        """Train on the batch of that number, from 1."""
        self.loss(x, y).backward()
        self.change()

    def after(self) -> None:
        """What follows a step that is complete."""

    def is_complete(self, number: int) -> bool:
        """Whether `raysgd.session.live.state.LiveState.step` follows the batch."""
        return True

    def resume(self, live: Any, state: Any) -> None:
        live.load_state_dict(state)


class Accumulating(Loop):
    """Gradients of two batches make a step, which is declared after it."""

    def train(self, number: int, x: Any, y: Any) -> None:
        (self.loss(x, y) / 2).backward()
        if number % 2 == 0:
            self.change()

    def is_complete(self, number: int) -> bool:
        return number % 2 == 0


class PassesPerRow(Loop):
    """A pass for each row of a batch."""

    def train(self, number: int, x: Any, y: Any) -> None:
        self.model[1].eval()  # batch norm needs two rows
        for row in range(len(x)):
            (self.loss(x[row : row + 1], y[row : row + 1]) / len(x)).backward()
        self.change()


class AccumulatingInEachBatch(Accumulating):
    """The same, and a step is declared after each batch."""

    def is_complete(self, number: int) -> bool:
        return True


class Scaling(Loop):
    """Gradients are scaled, clipped, and one of them overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.objects["scaler"] = self.scaler

    def train(self, number: int, x: Any, y: Any) -> None:
        loss = self.loss(x, y) * (float("inf") if number == 9 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Averaging(Loop):
    """A moving average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        inner = raysgd.torch.unwrap(self.model)
        self.average = torch.optim.swa_utils.AveragedModel(inner, multi_avg_fn=average)
        self.objects["average"] = self.average

    def change(self) -> None:
        super().change()
        self.average.update_parameters(raysgd.torch.unwrap(self.model))


class AveragingByHand(Loop):
    """A moving average in a dict, updated by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.objects["average"] = self

    def state_dict(self) -> dict[str, Any]:
        return self.average

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state

    def change(self) -> None:
        super().change()
        for name, each in self.model.state_dict().items():
            self.average[name].data.mul_(0.5).add_(each.data * 0.5) if each.is_floating_point() else None


class Adversaries(Loop):
    """Two models with an optimizer each take turns within a step, with noise for both."""

    can_fall_back = True  # a rank that dies between the two exchanges leaves all others with half a step

    def __init__(self) -> None:
        super().__init__()
        self.critic = raysgd.torch.prepare_model(make_model())
        self.critics = torch.optim.Adam(self.critic.parameters(), lr=0.02)
        self.objects |= {"critic": self.critic, "critics": self.critics}

    def train(self, number: int, x: Any, y: Any) -> None:
        self.critics.zero_grad()
        (self.critic(x) - self.critic(torch.randn_like(x))).square().mean().backward()
        self.critics.step()
        self.optimizer.zero_grad()
        self.loss(x + 0.1 * torch.randn_like(x), y).backward()
        self.optimizer.step()


class Replacing(torch.optim.Optimizer):
    """An optimizer that replaces the tensors of its state in each step, as Adafactor does with its root mean square."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter.sub_(group["lr"] * state["mean"])


class ReplacingStates(Loop):
    def make_optimizer(self) -> Any:
        return Replacing(self.model.parameters())


class Unfreezing(Loop):
    """The last layer is trained first; from step 7 on the others are in a group of their own."""

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model[4].parameters(), lr=0.05)

    def train(self, number: int, x: Any, y: Any) -> None:
        if number >= 7:
            self.unfreeze()
        super().train(number, x, y)

    def change(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()  # also those that the optimizer does not know yet

    def unfreeze(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": [*self.model[0].parameters()], "lr": 0.01})

    def resume(self, live: Any, state: Any) -> None:
        if len(state["optimizer"]["param_groups"]) == 2:
            self.unfreeze()
        super().resume(live, state)


class Closures(Loop):
    """An optimizer that calls the model itself, some times in a step."""

    can_fall_back = True  # it changes the weights before the last exchange

    def make_optimizer(self) -> Any:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)

    def train(self, number: int, x: Any, y: Any) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class ByHand(Loop):
    """No optimizer: the weights are changed by ``.data``."""

    can_fall_back = True  # torch does not count these changes

    def make_optimizer(self) -> Any:
        return None

    def __init__(self) -> None:
        super().__init__()
        del self.objects["optimizer"]

    def change(self) -> None:
        for parameter in self.model.parameters():
            parameter.data -= 0.05 * parameter.grad
            parameter.grad = None


class TensorRates(Loop):
    """The learning rate is a tensor, which the schedule changes in place before the step."""

    def make_optimizer(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=torch.tensor(0.05), foreach=False)

    def train(self, number: int, x: Any, y: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].mul_(0.97)
        super().train(number, x, y)


class Evaluating(Loop):
    """After every second step the model is evaluated, which decides the learning rate, and a probe is fitted to its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.7)
        self.objects["schedule"] = self.schedule

    def train(self, number: int, x: Any, y: Any) -> None:
        super().train(number, x, y)
        if number % 2 == 0:
            self.model.eval()
            with torch.no_grad():
                found = self.loss(torch.ones(3, 4), torch.ones(3, 1))
            self.model.train()
            self.schedule.step(float(found))

    def after(self) -> None:
        probe = nn.Parameter(torch.ones(3))  # without draws: a resumed loop does not come here again
        probe.square().sum().backward()
        torch.optim.SGD([probe], lr=0.1).step()


class Normed(Loop):
    """Weight norm, spectral norm and a frozen layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = make_model()
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[4])
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        self.model = raysgd.torch.prepare_model(model)
        self.optimizer = self.make_optimizer()
        self.objects = {"model": self.model, "optimizer": self.optimizer}


class Compiled(Loop):
    """The model is compiled, and the state is that of the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(self.model, backend="aot_eager")

    def loss(self, x: Any, y: Any) -> Any:
        return (self.compiled(x) - y).square().mean()


class Drawing(Loop):
    """Numbers are drawn after the exchange, too."""

    can_fall_back = True  # those of a rank that has died are not known

    def change(self) -> None:
        super().change()
        with torch.no_grad():
            self.model[4].bias.add_(0 * torch.randn(1))


class HalfPrecision(Loop):
    """Weights in bfloat16, and buffers of other types."""

    def __init__(self) -> None:
        self.model = make_model().to(torch.bfloat16)
        self.model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.model.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.model = raysgd.torch.prepare_model(self.model)
        self.optimizer = self.make_optimizer()
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def loss(self, x: Any, y: Any) -> Any:
        self.model.seen += 1
        self.model.mask[self.model.seen % 3] ^= True
        self.model.phase += 1j
        return super().loss(x.to(torch.bfloat16), y.to(torch.bfloat16))


LOOPS: dict[str, type[Loop]] = {
    "plain": Loop,
    "accumulates": Accumulating,
    "accumulates, a step in each batch": AccumulatingInEachBatch,
    "passes per row": PassesPerRow,
    "scaler": Scaling,
    "average": Averaging,
    "average by hand": AveragingByHand,
    "two models": Adversaries,
    "replaces states": ReplacingStates,
    "unfreezes": Unfreezing,
    "closures": Closures,
    "by hand": ByHand,
    "tensor rates": TensorRates,
    "evaluates": Evaluating,
    "norms": Normed,
    "compiled": Compiled,
    "draws late": Drawing,
    "half precision": HalfPrecision,
}

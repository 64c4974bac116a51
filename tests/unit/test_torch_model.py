"""`prepare_model` and its wrapper in one process, with DDP over a group of one."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.data.order.handed_out import Passes
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.session.progress import Progress
from raysgd.torch import prepare_model, unwrap
from raysgd.torch.model import DistributedModel, copy_to, without_prefix
from support import groups

Enter = Callable[..., None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.config = {"width": 4}
        self.temperature = 1.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x)) / self.temperature


@pytest.fixture
def world() -> Iterator[Enter]:
    """Return a function that makes this process a worker that reports a world of ``size``."""

    def enter(size: int = 2, deterministic: bool = False) -> None:
        session = SimpleNamespace(
            progress=Progress(),
            passes=Passes(),
            world_rank=0,
            world_size=size,
            seed=0,
            in_worker=True,
            deterministic=deterministic,
            logical=None,
        )
        context.install(cast(Any, session))

    yield enter
    context.uninstall()


@pytest.fixture
def wrapped(world: Enter, group: None) -> DistributedModel:
    world()
    model = prepare_model(Net())
    assert isinstance(model, DistributedModel)
    return model


def images() -> torch.Tensor:
    return torch.ones(2, 1, 5, 5)


def plain_ddp_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a plain DistributedDataParallel, with the versions of modules."""
    return nn.ModuleDict({"module": model}).state_dict()


def test_one_worker_gets_its_own_model_back(world: Enter) -> None:
    world(1)
    model = Net()
    assert prepare_model(model) is model


def test_several_workers_without_process_group_are_refused(world: Enter) -> None:
    world(3)
    with pytest.raises(UsageError, match=r"3 workers needs a torch process group.*backend=\"torch\""):
        prepare_model(Net())


def test_wrapped_model_is_returned_unchanged(wrapped: DistributedModel) -> None:
    assert prepare_model(wrapped) is wrapped
    plain = DistributedDataParallel(Net())
    assert prepare_model(plain) is plain


def test_model_without_trainable_parameters_is_not_wrapped(world: Enter, group: None) -> None:
    world()
    for model in (nn.Flatten(), Net().requires_grad_(False)):
        assert prepare_model(model) is model


def test_state_dict_has_the_models_own_names(wrapped: DistributedModel) -> None:
    names = list(Net().state_dict())
    assert list(wrapped.state_dict()) == names
    assert list(wrapped.state_dict(prefix="net.", keep_vars=True)) == [f"net.{name}" for name in names]
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in Net().named_buffers()]
    assert len(list(wrapped.parameters())) == len(list(Net().parameters()))


@pytest.mark.parametrize("state_of", [nn.Module.state_dict, plain_ddp_state], ids=["bare", "prefixed"])
def test_state_dict_loads_with_and_without_prefix(wrapped: DistributedModel, state_of: Any) -> None:
    other = Net()
    assert not torch.equal(wrapped.conv.weight, other.conv.weight)
    assert str(wrapped.load_state_dict(state_of(other))) == "<All keys matched successfully>"
    assert torch.equal(wrapped.conv.weight, other.conv.weight)


def test_error_of_missing_keys_names_them_without_prefix(wrapped: DistributedModel) -> None:
    state = plain_ddp_state(Net())
    del state["module.head.bias"]
    with pytest.raises(RuntimeError, match=r'Net:\s+Missing key\(s\) in state_dict: "head.bias"'):
        wrapped.load_state_dict(state)
    assert wrapped.load_state_dict(state, strict=False).missing_keys == ["head.bias"]


def test_load_state_dict_refuses_assign(wrapped: DistributedModel) -> None:
    with pytest.raises(UsageError, match="assign=True"):
        wrapped.load_state_dict(Net().state_dict(), assign=True)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_wrapped_part_of_a_model_saves_and_loads_without_prefix(wrapped: DistributedModel, prefix: str) -> None:
    parent = nn.ModuleDict({"net": wrapped, "other": nn.Linear(1, 1)})
    bare = nn.ModuleDict({"net": Net(), "other": nn.Linear(1, 1)})
    assert list(parent.state_dict()) == list(bare.state_dict())
    state = {key.replace("net.", f"net.{prefix}"): value for key, value in bare.state_dict().items()}
    parent.load_state_dict(state)
    assert torch.equal(wrapped.conv.weight, bare["net"].conv.weight)


def test_prefix_is_distinguished_from_a_part_of_that_name() -> None:
    own = {"module.weight": 1}
    assert without_prefix(own, own.keys()) is own
    assert dict(without_prefix({"module.module.weight": 1}, own.keys())) == own
    assert dict(without_prefix({}, own.keys())) == {}


def test_module_versions_are_kept_without_prefix() -> None:
    bare = without_prefix(plain_ddp_state(Net()), Net().state_dict().keys())
    assert cast(Any, bare)._metadata == cast(Any, Net().state_dict())._metadata


def test_attributes_and_methods_of_the_model_are_available(wrapped: DistributedModel) -> None:
    assert wrapped.config == {"width": 4}
    assert wrapped.encode(images()).shape == (2, 4)
    assert wrapped.head is wrapped.module.head
    assert {"config", "encode", "no_sync"} <= set(dir(wrapped))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        wrapped.missing  # noqa: B018


def test_setting_an_attribute_sets_it_on_the_model(wrapped: DistributedModel) -> None:
    before = wrapped(images())
    wrapped.temperature = 2.0
    wrapped.eval().train()
    assert torch.allclose(wrapped(images()), before / 2)
    wrapped.num_steps = 7
    assert vars(unwrap(wrapped))["num_steps"] == 7 == wrapped.num_steps
    del wrapped.num_steps
    assert not hasattr(unwrap(wrapped), "num_steps")


def test_names_of_ddp_are_set_on_the_wrapper(wrapped: DistributedModel) -> None:
    wrapped.require_backward_grad_sync = False
    wrapped._of_a_later_ddp = 1
    assert {"require_backward_grad_sync", "_of_a_later_ddp"}.isdisjoint(vars(unwrap(wrapped)))
    assert wrapped._of_a_later_ddp == 1
    assert not hasattr(wrapped, "__len__") and wrapped


class Stack(nn.Module):
    """A container of a user, with an index and no length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def __getitem__(self, index: int) -> nn.Module:
        if index:
            raise IndexError
        return self.layer


def test_prepared_sequential_has_length_index_and_iteration(world: Enter, group: None) -> None:
    world()
    layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    model = cast(Any, prepare_model(layers))
    assert isinstance(model, DistributedModel)
    assert len(model) == 3 and model[0] is layers[0] and model[-1] is layers[2]
    assert list(model) == list(layers) and isinstance(model[1:], nn.Sequential)
    model[1] = nn.Tanh()
    assert isinstance(layers[1], nn.Tanh) and model[1] in model
    model(torch.ones(1, 2)).sum().backward()
    assert type(copy.deepcopy(model)) is nn.Sequential


def test_prepared_container_has_only_the_methods_of_the_model(world: Enter, group: None) -> None:
    world()
    model = cast(Any, prepare_model(Stack()))
    assert model[0] is model.layer and list(model) == [model.layer]
    assert not hasattr(model, "__len__")


def test_attributes_hidden_by_ddp_are_logged(world: Enter, group: None, caplog: pytest.LogCaptureFixture) -> None:
    class Clash(nn.Linear):
        dim = 512
        device = "mine"

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.logger = logging.getLogger("user")

        def join(self) -> str:
            return "mine"

    world()
    model = prepare_model(Clash())
    assert model.dim == 512  # type: ignore[comparison-overlap]
    assert [record.getMessage() for record in caplog.records] == [
        "DistributedDataParallel hides join, logger of Clash: use raysgd.torch.unwrap(model) to reach them."
    ]
    assert cast(Any, unwrap(model)).join() == "mine"
    model(torch.ones(1, 2)).sum().backward()


def test_ordinary_model_logs_no_hidden_attributes(wrapped: DistributedModel, caplog: pytest.LogCaptureFixture) -> None:
    assert caplog.records == []


def test_unwrap_returns_other_models_unchanged() -> None:
    model = nn.Linear(1, 1)
    assert unwrap(model) is model


def test_unwrap_removes_every_kind_of_wrapper(wrapped: DistributedModel) -> None:
    assert unwrap(wrapped) is wrapped.module
    plain = DistributedDataParallel(Net())
    assert unwrap(plain) is plain.module
    assert wrapped.__raysgd_unwrap__() is wrapped.module


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_pickle_keeps_the_inner_model(wrapped: DistributedModel, pickler: Any) -> None:
    data = pickler.dumps({"model": wrapped, "inner": wrapped.module, "head": wrapped.head})
    groups.leave()
    found = pickle.loads(data)
    assert type(found["model"]).__qualname__ == "Net"
    assert found["model"] is found["inner"]
    assert found["model"].head is found["head"]
    assert torch.equal(found["model"].conv.weight, wrapped.conv.weight)
    groups.enter()


def test_saved_model_loads_without_raysgd(
    world: Enter, group: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world()
    torch.save(prepare_model(nn.Linear(3, 2)), tmp_path / "model.pt")
    for name in [name for name in sys.modules if name.partition(".")[0] == "raysgd"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert str(loaded) == "Linear(in_features=3, out_features=2, bias=True)"


def test_deepcopy_returns_an_independent_inner_model(wrapped: DistributedModel) -> None:
    clone = copy.deepcopy(wrapped)
    assert type(clone) is Net
    assert clone.conv.weight is not wrapped.conv.weight
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    average.update_parameters(wrapped)
    assert torch.equal(average.module.conv.weight, wrapped.conv.weight)


def test_copy_to_another_device_leaves_the_original_in_place() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
            self.b.weight = self.a.weight
            self.register_buffer("mean", torch.zeros(2))

    model = Tied()
    assert copy_to(model, torch.device("cpu")) is model
    moved = copy_to(model, torch.device("meta"))
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert moved.b.weight is moved.a.weight
    assert [parameter.requires_grad for parameter in moved.parameters()] == [True, True, False]


def test_ddp_kwargs_reach_ddp(world: Enter, group: None) -> None:
    world()
    model = prepare_model(Net(), ddp_kwargs={"find_unused_parameters": True})
    assert model.find_unused_parameters is True
    with pytest.raises(TypeError, match="no_such_argument"):
        prepare_model(Net(), ddp_kwargs={"no_such_argument": 1})


def test_skipping_buckets_is_refused_with_deterministic(world: Enter, group: None) -> None:
    world(deterministic=True)
    with pytest.raises(ConfigError, match="skip_all_reduce_unused_params"):
        prepare_model(Net(), ddp_kwargs={"skip_all_reduce_unused_params": True})


def test_optimizer_may_be_made_before_prepare_model(world: Enter, group: None) -> None:
    world()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = prepare_model(model)
    before = prepared.conv.weight.clone()
    prepared(images() * torch.rand(2, 1, 5, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(prepared.conv.weight, before)

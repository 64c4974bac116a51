"""`prepare_model` and the wrapper, in one process: DDP over a group of one where a wrapper is wanted."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.session.progress import Progress
from raysgd.torch import prepare_model, unwrap
from raysgd.torch.wrapper import DistributedModel, copy_to, without_prefix
from support import groups
from support.groups import group_of_one

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
    """Be a worker of a group that is said to have ``size`` members."""

    def enter(size: int = 2, deterministic: bool = False) -> None:
        session = SimpleNamespace(
            progress=Progress(), world_rank=0, world_size=size, seed=0, in_worker=True, deterministic=deterministic
        )
        context.install(cast(Any, session))

    yield enter
    context.uninstall()


@pytest.fixture
def group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.fixture
def wrapped(world: Enter, group: None) -> DistributedModel:
    world()
    model = prepare_model(Net())
    assert isinstance(model, DistributedModel)
    return model


def images() -> torch.Tensor:
    return torch.ones(2, 1, 5, 5)


def plain_ddp_state(model: nn.Module) -> dict[str, Any]:
    """What a plain DistributedDataParallel saves, versions of the modules included."""
    return nn.ModuleDict({"module": model}).state_dict()


def test_a_world_of_one_gets_its_own_model(world: Enter) -> None:
    world(1)
    model = Net()
    assert prepare_model(model) is model


def test_several_workers_without_a_group_are_told_what_is_missing(world: Enter) -> None:
    world(3)
    with pytest.raises(UsageError, match=r"3 workers needs a torch process group.*backend=\"torch\""):
        prepare_model(Net())


def test_a_wrapped_model_is_returned_as_it_is(wrapped: DistributedModel) -> None:
    assert prepare_model(wrapped) is wrapped
    plain = DistributedDataParallel(Net())
    assert prepare_model(plain) is plain


def test_a_model_without_trainable_parameters_is_not_wrapped(world: Enter, group: None) -> None:
    world()
    for model in (nn.Flatten(), Net().requires_grad_(False)):
        assert prepare_model(model) is model


def test_state_has_the_models_own_names(wrapped: DistributedModel) -> None:
    names = list(Net().state_dict())
    assert list(wrapped.state_dict()) == names
    assert list(wrapped.state_dict(prefix="net.", keep_vars=True)) == [f"net.{name}" for name in names]
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in Net().named_buffers()]
    assert len(list(wrapped.parameters())) == len(list(Net().parameters()))


@pytest.mark.parametrize("state_of", [nn.Module.state_dict, plain_ddp_state], ids=["bare", "prefixed"])
def test_state_loads_with_and_without_the_prefix(wrapped: DistributedModel, state_of: Any) -> None:
    other = Net()
    assert not torch.equal(wrapped.conv.weight, other.conv.weight)
    assert str(wrapped.load_state_dict(state_of(other))) == "<All keys matched successfully>"
    assert torch.equal(wrapped.conv.weight, other.conv.weight)


def test_wrong_names_are_named_as_the_model_has_them(wrapped: DistributedModel) -> None:
    state = plain_ddp_state(Net())
    del state["module.head.bias"]
    with pytest.raises(RuntimeError, match=r'Net:\s+Missing key\(s\) in state_dict: "head.bias"'):
        wrapped.load_state_dict(state)
    assert wrapped.load_state_dict(state, strict=False).missing_keys == ["head.bias"]


def test_replacing_parameters_by_a_load_is_refused(wrapped: DistributedModel) -> None:
    with pytest.raises(UsageError, match="assign=True"):
        wrapped.load_state_dict(Net().state_dict(), assign=True)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_wrapped_part_of_a_larger_model_saves_and_loads_without_the_prefix(
    wrapped: DistributedModel, prefix: str
) -> None:
    parent = nn.ModuleDict({"net": wrapped, "other": nn.Linear(1, 1)})
    bare = nn.ModuleDict({"net": Net(), "other": nn.Linear(1, 1)})
    assert list(parent.state_dict()) == list(bare.state_dict())
    state = {key.replace("net.", f"net.{prefix}"): value for key, value in bare.state_dict().items()}
    parent.load_state_dict(state)
    assert torch.equal(wrapped.conv.weight, bare["net"].conv.weight)


def test_the_prefix_is_told_from_a_part_of_that_name() -> None:
    own = {"module.weight": 1}
    assert without_prefix(own, own.keys()) is own
    assert dict(without_prefix({"module.module.weight": 1}, own.keys())) == own
    assert dict(without_prefix({}, own.keys())) == {}


def test_module_versions_survive_the_prefix() -> None:
    bare = without_prefix(plain_ddp_state(Net()), Net().state_dict().keys())
    assert cast(Any, bare)._metadata == cast(Any, Net().state_dict())._metadata


def test_the_models_own_attributes_and_methods_are_there(wrapped: DistributedModel) -> None:
    assert wrapped.config == {"width": 4}
    assert wrapped.encode(images()).shape == (2, 4)
    assert wrapped.head is wrapped.module.head
    assert {"config", "encode", "no_sync"} <= set(dir(wrapped))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        wrapped.missing  # noqa: B018


def test_setting_an_attribute_reaches_the_model(wrapped: DistributedModel) -> None:
    before = wrapped(images())
    wrapped.temperature = 2.0
    wrapped.eval().train()
    assert torch.allclose(wrapped(images()), before / 2)
    wrapped.note = "of the wrapper"
    wrapped.require_backward_grad_sync = True
    assert {"note", "require_backward_grad_sync"}.isdisjoint(vars(unwrap(wrapped)))


def test_attributes_that_ddp_has_too(world: Enter, group: None, caplog: pytest.LogCaptureFixture) -> None:
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
        "join, logger of Clash are hidden by DistributedDataParallel's own; reach them by raysgd.torch.unwrap(model)."
    ]
    assert cast(Any, unwrap(model)).join() == "mine"
    model(torch.ones(1, 2)).sum().backward()


def test_an_ordinary_model_hides_nothing(wrapped: DistributedModel, caplog: pytest.LogCaptureFixture) -> None:
    assert caplog.records == []


def test_unwrapping() -> None:
    model = nn.Linear(1, 1)
    assert unwrap(model) is model


def test_unwrapping_every_kind_of_wrapper(wrapped: DistributedModel) -> None:
    assert unwrap(wrapped) is wrapped.module
    plain = DistributedDataParallel(Net())
    assert unwrap(plain) is plain.module
    assert wrapped.__raysgd_unwrap__() is wrapped.module


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_pickled_model_arrives_as_the_model(wrapped: DistributedModel, pickler: Any) -> None:
    data = pickler.dumps({"model": wrapped, "inner": wrapped.module, "head": wrapped.head})
    groups.leave()
    found = pickle.loads(data)
    assert type(found["model"]).__qualname__ == "Net"
    assert found["model"] is found["inner"]
    assert found["model"].head is found["head"]
    assert torch.equal(found["model"].conv.weight, wrapped.conv.weight)
    groups.enter()


def test_a_saved_model_loads_without_raysgd(world: Enter, group: None, tmp_path: Any) -> None:
    world()
    torch.save(prepare_model(nn.Linear(3, 2)), tmp_path / "model.pt")
    program = (
        "import sys, torch; sys.modules['raysgd'] = None; "
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Linear(in_features=3, out_features=2, bias=True)"


def test_a_deep_copy_is_a_model_of_its_own(wrapped: DistributedModel) -> None:
    clone = copy.deepcopy(wrapped)
    assert type(clone) is Net
    assert clone.conv.weight is not wrapped.conv.weight
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    average.update_parameters(wrapped)
    assert torch.equal(average.module.conv.weight, wrapped.conv.weight)


def test_a_copy_for_another_device_makes_no_second_one_beside_the_original() -> None:
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


def test_arguments_reach_ddp(world: Enter, group: None) -> None:
    world()
    model = prepare_model(Net(), ddp_kwargs={"find_unused_parameters": True})
    assert model.find_unused_parameters is True
    with pytest.raises(TypeError, match="no_such_argument"):
        prepare_model(Net(), ddp_kwargs={"no_such_argument": 1})


def test_leaving_out_buckets_does_not_go_with_determinism(world: Enter, group: None) -> None:
    world(deterministic=True)
    with pytest.raises(ConfigError, match="skip_all_reduce_unused_params"):
        prepare_model(Net(), ddp_kwargs={"skip_all_reduce_unused_params": True})


def test_the_optimizer_may_be_made_before(world: Enter, group: None) -> None:
    world()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = prepare_model(model)
    before = prepared.conv.weight.clone()
    prepared(images() * torch.rand(2, 1, 5, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(prepared.conv.weight, before)

"""The plan of tensor parallelism: which style each layer of a model gets, and why a model has no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from raysgd.engine.tensor_parallel.attention import ShardedMultiheadAttention
from raysgd.engine.tensor_parallel.context import SequenceStack, TensorContext
from raysgd.engine.tensor_parallel.layers import (
    Block,
    ColumnLinear,
    Region,
    RegionDropout,
    Replicated,
    RowLinear,
    SequenceBlock,
    Style,
    VocabularyEmbedding,
)
from raysgd.engine.tensor_parallel.structure import (
    BLOCKS,
    STACKS,
    Linear,
    Unit,
    UnsureError,
    has_linear_weights,
    is_linear,
    known_class,
    units_of,
)
from raysgd.engine.tensor_parallel.transformers_plans import check_sequence, planned_layers, planned_unit
from raysgd.errors import ConfigError

#: Names in one message; a model of 96 equal blocks has the same problem 96 times.
_MAX_NAMES = 8


@dataclass(frozen=True)
class TensorPlan:
    """A style for each layer that is sharded or draws random numbers. Others are replicated.

    Attributes:
        size: The ranks over which each layer is sharded.
        sequence_parallel: Whether the activations between regions are sharded too.
        styles: The styles by the layers' paths: torch's, and those of `layers` where torch has none.
        context: What the layers will share; a plan is applied once.
    """

    size: int
    sequence_parallel: bool
    styles: dict[str, ParallelStyle]
    context: TensorContext


def make_tensor_plan(model: nn.Module, size: int, sequence_parallel: bool = False) -> TensorPlan:
    """Make a plan from the structure of a model; the model may be on the meta device.

    Known are the models of transformers whose configuration has a ``base_model_tp_plan``, such as LLaMA, Qwen3 and Gemma 3,
    further GPT-2, BERT and T5, and the layers ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer`` and
    ``nn.TransformerDecoderLayer`` in any model.

    Args:
        model: The model, with ordinary parameters.
        size: The ranks over which each layer is sharded.
        sequence_parallel: Whether the activations between regions are sharded too, along the sequence.

    Raises:
        ConfigError: `size` does not divide heads or features, or the structure is not known; the message has the modules'
            names.
    """
    return _Planner(model, size, sequence_parallel).plan()


def fused_shard(dim: int, num_parts: int) -> Placement:
    """Return the placement of a fused weight: each of its `num_parts` parts is cut among the ranks, along `dim`."""
    return _StridedShard(dim, split_factor=num_parts) if num_parts > 1 else Shard(dim)


class _Planner:
    def __init__(self, model: nn.Module, size: int, is_on_parts: bool) -> None:
        self.model, self.size, self.is_on_parts = model, size, is_on_parts
        self.context = TensorContext()
        self.styles: dict[str, ParallelStyle] = {}
        self.unsure: dict[str, str] = {}
        self.undivided: dict[str, str] = {}
        self.units: dict[str, list[Unit]] = {}
        self.modules = dict(model.named_modules())
        #: The models that have a plan of transformers, by path.
        self.planned: dict[str, nn.Module] = {}

    def plan(self) -> TensorPlan:
        for path, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor):
                raise ConfigError(
                    f"{path} is a DTensor already; a tensor plan is made for a model of ordinary parameters."
                )
        for path, module in self.modules.items():
            self._read_units(path, lambda module=module: units_of(module))  # type: ignore[misc]
            self._read_planned(path, module)
        self._plan_vocabulary()
        blocks = self._blocks()
        self._plan_blocks(blocks)
        self._check_others(blocks)
        self._raise_problems()
        return TensorPlan(self.size, self.is_on_parts, self.styles, self.context)

    # Units

    def _read_units(self, path: str, read: Callable[[], Iterable[Unit]]) -> None:
        try:
            for unit in read():
                self.units.setdefault(path, []).append(unit)
                self._plan_unit(path, unit)
        except UnsureError as problem:
            self.unsure[path] = str(problem)

    def _read_planned(self, path: str, module: nn.Module) -> None:
        for parent, styles in planned_layers(module).items():
            self.planned[path] = module
            of = module.get_submodule(parent)
            self._read_units(_join(path, parent), lambda of=of, styles=styles: [planned_unit(module, of, styles)])  # type: ignore[misc]

    def _plan_unit(self, path: str, unit: Unit) -> None:
        for what, number in unit.counts.items():
            if number % self.size:
                self.undivided[path] = f"{number} {what} ({number} % {self.size} = {number % self.size})"
                return
        at = partial(_join, path)
        if unit.is_whole:
            self.styles |= {at(one.path): ColwiseParallel(output_layouts=Replicate()) for one in unit.columns}
            self.styles |= {at(name): RowwiseParallel(input_layouts=Replicate()) for name in unit.rows}
            return
        for one in unit.columns:
            self._plan_columns(at(one.path), one)
        for name in map(at, unit.rows):
            self._plan_layer(name, RowLinear, {"weight": Shard(self._dim_of_inputs(name))})
        for name in map(at, unit.summed):
            self._plan_layer(name, Replicated, is_inside=True)
        for name in map(at, unit.head_embeddings):
            self.styles[name] = ColwiseParallel()
        for name in map(at, unit.own_dropouts):
            if isinstance(self.modules.get(name), nn.Dropout):
                self._plan_layer(name, RegionDropout)
        self._plan_region(path, unit)

    def _plan_columns(self, path: str, one: Linear) -> None:
        """Shard the outputs of a linear layer."""
        bias = Replicate() if one.num_parts > 1 else Shard(0)
        placements = {"weight": fused_shard(1 - self._dim_of_inputs(path), one.num_parts), "bias": bias}
        self._plan_layer(path, ColumnLinear, placements, num_parts=one.num_parts, is_input=one.is_input)

    def _dim_of_inputs(self, path: str) -> int:
        return 1 if isinstance(self.modules[path], nn.Linear) else 0

    def _plan_region(self, path: str, unit: Unit) -> None:
        """Shard the heads or features of a layer whose linear layers have styles of their own."""
        if unit.is_multihead:
            placements = {"in_proj_weight": fused_shard(0, 3), **{f"{name}_proj_weight": Shard(0) for name in "qkv"}}
            self._plan_layer(path, ShardedMultiheadAttention, placements)
        if unit.region is not None:
            style = self._plan_layer(_join(path, unit.region), Region, inputs=unit.inputs, weights=unit.weights)
            style.attributes = {name: value // self.size for name, value in unit.local.items()}

    def _plan_layer(
        self, path: str, layer: Any, placements: dict[str, Placement] | None = None, **options: Any
    ) -> Style:
        self.styles[path] = style = Style(self.context, layer, placements or {}, options)
        return style

    # Embeddings and the output layer

    def _plan_vocabulary(self) -> None:
        """Shard the model's vocabulary, in its embeddings and in the output layer.

        If the size does not divide the vocabulary, its features are sharded instead: a cut that is not even has no good
        description as a DTensor.
        """
        for path, module in self._vocabulary_layers():
            assert isinstance(module.weight, Tensor)
            has_even_rows, has_even_features = (number % self.size == 0 for number in module.weight.shape)
            is_embedding = isinstance(module, nn.Embedding)
            if has_even_rows and is_embedding:
                self._plan_layer(path, VocabularyEmbedding, {"weight": Shard(0)})
            elif has_even_rows or (has_even_features and is_embedding):
                self.styles[path] = ColwiseParallel(output_layouts=Replicate())
            elif has_even_features:
                self.styles[path] = RowwiseParallel(input_layouts=Replicate())

    def _vocabulary_layers(self) -> Iterator[tuple[str, nn.Module]]:
        embeddings = {path: one for path, one in self.modules.items() if _is_plain_embedding(one)}
        embeddings = {path: one for path, one in embeddings.items() if path not in self.styles}
        heads = {path: one for path, one in self.modules.items() if type(one) is nn.Linear and path not in self.styles}
        inputs, outputs = (_call(self.model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
        head_weights = {id(one.weight) for one in heads.values()}
        if inputs is None and embeddings:
            # Without transformers' interface: the largest embedding is the vocabulary, if it outweighs a linear layer.
            largest = max(embeddings.values(), key=lambda one: one.weight.numel())
            weights = (one.weight for one in self.model.modules() if is_linear(one))
            if largest.weight.numel() > max((one.numel() for one in weights if isinstance(one, Tensor)), default=0):
                inputs = largest
        wanted = {id(one.weight) for one in (inputs, outputs) if isinstance(one, (nn.Embedding, nn.Linear))}
        wanted |= {id(one.weight) for one in embeddings.values() if id(one.weight) in head_weights}
        # Tied layers must be cut alike, so one that cannot be cut keeps the others whole.
        tied = [
            path
            for path, one in self.modules.items()
            if isinstance(one, (nn.Embedding, nn.Linear)) and path not in embeddings and path not in heads
        ]
        wanted -= {id(self.modules[path].weight) for path in tied}
        for path, one in (*embeddings.items(), *heads.items()):
            if id(one.weight) in wanted:
                yield path, one

    # Blocks

    def _blocks(self) -> dict[str, nn.Module]:
        """Return the blocks: the elements of lists, and modules of known classes, that hold units."""
        blocks: dict[str, nn.Module] = {}
        for unit in (*self.units, *self.unsure):
            names = unit.split(".") if unit else []
            prefixes = [".".join(names[:end]) for end in range(len(names) + 1)]
            for at in prefixes:
                parent = self.modules.get(at.rpartition(".")[0]) if at else None
                if isinstance(parent, nn.ModuleList) or self._is_block(at):
                    blocks[at] = self.modules[at]
                    break
            else:
                blocks[unit] = self.modules[unit]
        return blocks

    def _is_block(self, path: str) -> bool:
        try:
            return known_class(self.modules[path], BLOCKS) is not None
        except UnsureError as problem:
            self.unsure[path] = str(problem)
            return True

    def _planned_at(self, path: str) -> str | None:
        """Return the path of the innermost model with a plan of transformers in which a module is."""
        return max((one for one in self.planned if _is_below(path, [one])), key=len, default=None)

    def _plan_blocks(self, blocks: Mapping[str, nn.Module]) -> None:
        for path, block in blocks.items():
            if self.is_on_parts:
                if self._is_block(path) or self._is_planned_block(path, block, blocks):
                    self._plan_sequence_block(path, block)
            elif isinstance(block, nn.TransformerEncoderLayer) and path not in self.styles:
                self._plan_layer(path, Block)
            style = self.styles.get(path)
            if isinstance(block, nn.TransformerEncoderLayer) and isinstance(style, Style):
                # torch's inference path hands all weights to one kernel, which knows no DTensors; so it is not taken.
                style.attributes = {"activation_relu_or_gelu": 0}

    def _is_planned_block(self, path: str, block: nn.Module, blocks: Mapping[str, nn.Module]) -> bool:
        at = self._planned_at(path)
        parent = self.modules.get(path.rpartition(".")[0])
        problem = f"sequence_parallel=True does not know how a {type(block).__name__} uses the sequence"
        if (
            at is not None
            and isinstance(parent, nn.ModuleList)
            and {id(one) for one in parent} <= set(map(id, blocks.values()))
        ):
            units = {one[len(path) + 1 :]: units[0] for one, units in self.units.items() if _is_below(one, [path])}
            try:
                check_sequence(self.planned[at], path[len(at) :].lstrip("."), block, units)
                return True
            except UnsureError as error:
                problem = str(error)
        self.unsure.setdefault(path, problem)
        return False

    def _plan_sequence_block(self, path: str, block: nn.Module) -> None:
        parent = path.rpartition(".")[0]
        siblings = [path]
        owner = self.modules.get(parent.rpartition(".")[0]) if parent else None
        is_stack = owner in self.planned.values() or (owner is not None and _is_stack(owner))
        if is_stack and isinstance(self.modules.get(parent), nn.ModuleList):
            siblings = [f"{parent}.{name}" for name in self.modules[parent]._modules]
        first = self.styles.get(siblings[0])
        is_planned = isinstance(first, Style) and first.layer is SequenceBlock
        stack = (
            first.options["stack"] if isinstance(first, Style) and is_planned else SequenceStack(_sequence_dim(block))
        )
        is_first, is_last = path == siblings[0], path == siblings[-1]
        self._plan_layer(path, SequenceBlock, stack=stack, is_first=is_first, is_last=is_last)

    # Everything else

    def _check_others(self, blocks: Mapping[str, nn.Module]) -> None:
        own = [path for path in blocks if self._planned_at(path) is None]
        for path, module in self.modules.items():
            is_known = path in self.styles or _is_below(path, self.unsure)
            if not is_known and _is_below(path, own) and has_linear_weights(module):
                self.unsure[path] = f"a {type(module).__name__} that no known layer uses"

    def _raise_problems(self) -> None:
        if self.undivided:
            raise ConfigError(
                f"tensor_parallel={self.size} does not divide {_listed(self.undivided)}. Give a number that divides them all."
            )
        if self.unsure:
            raise ConfigError(
                f"The tensor-parallel plan is not sure about {_listed(self.unsure)}. Give a plan of your own: a dict of "
                "module paths and torch ParallelStyles, or a function."
            )
        if not self.units:
            linears = {path: type(one).__name__ for path, one in self.modules.items() if has_linear_weights(one)}
            raise ConfigError(
                f"{type(self.model).__name__} has no layer that the tensor-parallel plan knows (models of transformers with "
                "a base_model_tp_plan, GPT-2, BERT, T5, nn.Transformer*, nn.MultiheadAttention); it has "
                f"{_listed(linears) or 'no linear layers'}. Give a plan of your own: a dict of module paths and torch "
                "ParallelStyles, or a function."
            )


def _join(path: str, name: str) -> str:
    return ".".join(one for one in (path, name) if one)


def _listed(problems: Mapping[str, str]) -> str:
    shown = [f"{path or 'the model'}: {text}" for path, text in list(problems.items())[:_MAX_NAMES]]
    return "; ".join(shown) + (f"; and {len(problems) - _MAX_NAMES} more" if len(problems) > _MAX_NAMES else "")


def _is_below(path: str, paths: Iterable[str]) -> bool:
    return any(path == one or not one or path.startswith(one + ".") for one in paths)


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding as torch has it, or one that multiplies its outputs by a number."""
    return (
        isinstance(module, nn.Embedding)
        and (type(module) is nn.Embedding or hasattr(module, "embed_scale"))
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def _call(model: nn.Module, name: str) -> Any:
    try:
        return getattr(model, name)()
    except (AttributeError, NotImplementedError):
        return None


def _is_stack(module: nn.Module) -> bool:
    try:
        return known_class(module, STACKS) is not None
    except UnsureError:
        return False


def _sequence_dim(block: nn.Module) -> int:
    attention = getattr(block, "self_attn", None)
    return 0 if isinstance(attention, nn.MultiheadAttention) and not attention.batch_first else 1

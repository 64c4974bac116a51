"""The `ParallelStyle`s of raysgd's own plans: each cuts the parameters of one layer, and changes its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from raysgd.engine.tensor_parallel.attention import ShardedMultiheadAttention
from raysgd.engine.tensor_parallel.layers import (
    ColumnLinear,
    FeatureEmbedding,
    Region,
    RegionDropout,
    Replicated,
    RowLinear,
    SequenceBlock,
    VocabularyEmbedding,
    draws,
    mix_in,
)
from raysgd.engine.tensor_parallel.placements import fused_shard
from raysgd.engine.tensor_parallel.structure import holds_for_others

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from raysgd.engine.tensor_parallel.context import SequenceStack, TensorContext


@dataclass
class Style(ParallelStyle):
    """Base of the styles.

    Attributes:
        context: What the model's layers share.
        path: The layer's name, for messages.
    """

    context: TensorContext = field(repr=False)
    path: str

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.placements(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            path = f"{self.path}.{name}" if self.path else name
            placement = placements.get(name, Replicate())
            new = self.context.distribute(parameter, placement, path, follows=self.follows(module))
            module.register_parameter(name, new)
        self.change(module)
        return module

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Return how the module's own parameters are cut; others are replicated."""
        return {}

    def follows(self, module: nn.Module) -> bool:
        """Whether the module's own parameters may be cut as the layers need that they are tied to."""
        return False

    def change(self, module: nn.Module) -> None:
        """Change the module's forward pass."""

    def describe(self) -> str:
        """Say in a few words what the style does."""
        raise NotImplementedError


@dataclass
class Columns(Style):
    """Shard the outputs of a linear layer."""

    num_parts: int = 1
    is_input: bool = False
    is_gathered: bool = False

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        dim = 0 if isinstance(module, nn.Linear) else 1
        return {
            "weight": fused_shard(dim, self.num_parts),
            "bias": Replicate() if self.num_parts > 1 else Shard(0),
        }

    def change(self, module: nn.Module) -> None:
        mix_in(
            module,
            ColumnLinear,
            self.context,
            _tp_num_parts=self.num_parts,
            _tp_is_input=self.is_input,
            _tp_is_gathered=self.is_gathered,
        )

    def describe(self) -> str:
        parts = f", {self.num_parts} fused parts" if self.num_parts > 1 else ""
        return f"outputs sharded{parts}{', then gathered' if self.is_gathered else ''}"


@dataclass
class Rows(Style):
    """Shard the inputs of a linear layer."""

    is_split: bool = False

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {"weight": Shard(1 if isinstance(module, nn.Linear) else 0)}

    def change(self, module: nn.Module) -> None:
        mix_in(module, RowLinear, self.context, _tp_is_split=self.is_split)

    def describe(self) -> str:
        return "inputs split, then sharded" if self.is_split else "inputs sharded"


@dataclass
class EmbeddingRows(Style):
    """Shard the rows of an embedding."""

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {"weight": Shard(0)}

    def change(self, module: nn.Module) -> None:
        mix_in(module, VocabularyEmbedding, self.context)

    def describe(self) -> str:
        return "vocabulary sharded"


@dataclass
class EmbeddingColumns(Style):
    """Shard the columns of an embedding."""

    is_inside: bool = False

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {"weight": Shard(1)}

    def change(self, module: nn.Module) -> None:
        mix_in(module, FeatureEmbedding, self.context, _tp_is_inside=self.is_inside)

    def describe(self) -> str:
        return "heads sharded" if self.is_inside else "features sharded"


@dataclass
class Whole(Style):
    """Replicate the parameters of a layer.

    Attributes:
        is_inside: See `Replicated`.
    """

    is_inside: bool = False

    def follows(self, module: nn.Module) -> bool:
        return holds_for_others(module)

    def change(self, module: nn.Module) -> None:
        mix_in(module, Replicated, self.context, _tp_is_inside=self.is_inside)

    def describe(self) -> str:
        return "replicated, gradients summed" if self.is_inside else "replicated"


@dataclass
class Heads(Style):
    """Shard the heads or features of a layer whose linear layers have styles of their own.

    Attributes:
        inputs: See `Region`.
        weights: See `Region`.
        local: Attributes with which the layer's forward pass counts heads or features: this rank's values.
    """

    inputs: tuple[str, ...]
    weights: int | None
    local: Mapping[str, int]

    def change(self, module: nn.Module) -> None:
        mix_in(
            module,
            Region,
            self.context,
            _tp_inputs=self.inputs,
            _tp_weights=self.weights,
            _tp_draws=draws(module),
            **self.local,
        )

    def describe(self) -> str:
        return "heads sharded" if self.weights is not None else "features sharded"


@dataclass
class MultiheadHeads(Style):
    """Shard the heads of an ``nn.MultiheadAttention``."""

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {
            "in_proj_weight": fused_shard(0, 3),
            **{f"{name}_proj_weight": Shard(0) for name in "qkv"},
        }

    def change(self, module: nn.Module) -> None:
        mix_in(module, ShardedMultiheadAttention, self.context, _tp_draws=draws(module))

    def describe(self) -> str:
        return "heads sharded"


@dataclass
class Dropout(Style):
    """Draw the random numbers of a dropout inside of a unit per rank."""

    def change(self, module: nn.Module) -> None:
        mix_in(module, RegionDropout, self.context)

    def describe(self) -> str:
        return "draws its own numbers"


@dataclass
class Block(Style):
    """Run a block on parts of the sequence, where the stack is given, and never through torch's inference path."""

    stack: SequenceStack | None = None
    is_first: bool = False
    is_last: bool = False

    def change(self, module: nn.Module) -> None:
        if isinstance(module, nn.TransformerEncoderLayer):
            # That path hands all weights to one kernel, which knows no DTensors; without this flag it is not taken.
            module.activation_relu_or_gelu = 0
        if self.stack is not None:
            mix_in(
                module,
                SequenceBlock,
                self.context,
                _tp_stack=self.stack,
                _tp_is_first=self.is_first,
                _tp_is_last=self.is_last,
                _tp_draws=draws(module),
            )

    def describe(self) -> str:
        return "on parts of the sequence" if self.stack is not None else "heads and features sharded"

"""How a model is cut into the stages of a pipeline: which blocks each stage has, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from raysgd.engine.tensor_parallel.structure import UnsureError, known_class
from raysgd.errors import ConfigError

_MODELS = "transformers.models."


@dataclass(frozen=True)
class _Family:
    """Where the models of a family have their parts.

    Attributes:
        base: The attribute of a model that has everything but the head.
        blocks: The list of blocks, below `base`.
        front: What the first stage has, below `base`, and what stands there on other stages.
        back: What the last stage has, below `base`, and what stands there on other stages.
    """

    base: str
    blocks: str
    front: Mapping[str, Callable[[], nn.Module | None]]
    back: Mapping[str, Callable[[], nn.Module | None]]


class _NoPositions(nn.Module):
    """In place of GPT-2's position embedding, which the first stage has added."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class _NoEmbeddings(nn.Module):
    """In place of BERT's embeddings: the hidden states of the stage before."""

    def forward(self, inputs_embeds: Tensor, **others: Any) -> Tensor:
        return inputs_embeds


_GPT2 = _Family(
    "transformer",
    "h",
    {"wte": nn.Identity, "wpe": _NoPositions, "drop": nn.Identity},
    {"ln_f": nn.Identity},
)
_LLAMA = _Family("model", "layers", {"embed_tokens": nn.Identity}, {"norm": nn.Identity})
_BERT = _Family("bert", "encoder.layer", {"embeddings": _NoEmbeddings}, {"pooler": lambda: None})


def _next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def _tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def _rows(batch: Mapping[str, Tensor]) -> int:
    return batch["labels"].shape[0]


#: The model classes that can be split, with the number of items over which each one's own loss is a mean. A classifier of a
#: decoder is not among them: its head looks for the last token in `input_ids`, which the last stage does not see as such.
_CLASSES: dict[str, tuple[_Family, Callable[[Mapping[str, Tensor]], Tensor | int]]] = {
    _MODELS + "gpt2.modeling_gpt2.GPT2LMHeadModel": (_GPT2, _next_tokens),
    _MODELS + "llama.modeling_llama.LlamaForCausalLM": (_LLAMA, _next_tokens),
    _MODELS + "bert.modeling_bert.BertForMaskedLM": (_BERT, _tokens),
    _MODELS + "bert.modeling_bert.BertForTokenClassification": (_BERT, _tokens),
    _MODELS + "bert.modeling_bert.BertForSequenceClassification": (_BERT, _rows),
}


@dataclass(frozen=True)
class StageSplit:
    """The stages of a pipeline: the blocks of each, and the parameters that stages share.

    Attributes:
        base: The attribute of the model that has everything but the head.
        hidden_size: The features of the hidden states.
        blocks: For each stage, the names of its blocks.
        ties: Names of the parameters that the first and the last stage share, on the first and on the last.
    """

    base: str
    hidden_size: int
    blocks: tuple[tuple[str, ...], ...]
    ties: tuple[tuple[str, str], ...]
    _family: _Family

    def keep_stage(self, model: nn.Module, stage: int) -> None:
        """Remove from the model what other stages have."""
        base, is_first, is_last = model.get_submodule(self.base), stage == 0, stage == len(self.blocks) - 1
        kept = nn.ModuleList()
        for name in self.blocks[stage]:
            kept.add_module(name, base.get_submodule(f"{self._family.blocks}.{name}"))
        _replace(base, self._family.blocks, kept)
        for parts, is_own in ((self._family.front, is_first), (self._family.back, is_last)):
            for path, placeholder in parts.items():
                if not is_own:
                    _replace(base, path, placeholder())
        if not is_last:
            for name, _ in list(model.named_children()):
                if name != self.base:
                    setattr(model, name, nn.Identity())


def read_model(model: nn.Module, num_stages: int) -> StageSplit:
    """Cut a model into stages.

    Raises:
        ConfigError: The model has a class that is not known, too few blocks, or parameters that are shared between blocks.
    """
    family = _family_of(model)
    base = model.get_submodule(family.base)
    blocks = base.get_submodule(family.blocks)
    config: Any = model.config
    if getattr(config, "is_decoder", False) and getattr(config, "add_cross_attention", False):
        raise ConfigError(
            "pipeline_parallel has no way for encoder_hidden_states: add_cross_attention=True cannot be split."
        )
    names = list(blocks._modules)
    if len(names) < num_stages:
        raise ConfigError(
            f"pipeline_parallel={num_stages} needs as many blocks, and {family.base}.{family.blocks} has {len(names)}."
        )
    counts = [_count(one) for one in blocks.children()]
    front, back = (_paths(model, family, parts) for parts in (family.front, family.back))
    heads = [name for name, _ in model.named_children() if name != family.base]
    sizes = [sum(_count(model.get_submodule(path)) for path in paths) for paths in (front, [*back, *heads])]
    ranges = balance(counts, num_stages, sizes[0], sizes[1])
    ties = tuple(_ties(model, front, [*back, *heads]))
    stages = tuple(tuple(names[at] for at in one) for one in ranges)
    return StageSplit(family.base, config.hidden_size, stages, ties, family)


def item_counter(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor | int]:
    """Return how many items of a batch a model's own loss is a mean over."""
    name = known_class(model, _CLASSES)
    assert name is not None
    return _CLASSES[name][1]


def balance(sizes: Sequence[int], num_stages: int, front: int = 0, back: int = 0) -> list[range]:
    """Cut a list into consecutive parts, so that the largest part is as small as possible; no part is empty.

    Args:
        sizes: The size of each element; at least as many as parts.
        num_stages: The number of parts.
        front: What is added to the first part.
        back: What is added to the last part.
    """
    number = len(sizes)
    sums = [front]
    for one in sizes:
        sums.append(sums[-1] + one)
    sums[-1] += back
    # best[end]: the largest part of the best cut of the first `end` elements, and where its last part begins.
    starts: list[list[int]] = []
    best = [sums[end] for end in range(number + 1)]
    for stage in range(1, num_stages):
        cut, new = [0] * (number + 1), [0] * (number + 1)
        for end in range(stage + 1, number + 1):
            new[end], cut[end] = min((max(best[at], sums[end] - sums[at]), at) for at in range(stage, end))
        best = new
        starts.append(cut)
    ends = [number]
    for cut in reversed(starts):
        ends.append(cut[ends[-1]])
    bounds = [0, *reversed(ends)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _family_of(model: nn.Module) -> _Family:
    try:
        name = known_class(model, _CLASSES)
    except UnsureError as problem:
        raise ConfigError(f"pipeline_parallel cannot split the model: {problem}.") from None
    if name is None:
        known = ", ".join(one.rpartition(".")[2] for one in _CLASSES)
        raise ConfigError(
            f"pipeline_parallel cannot split a {type(model).__name__}: it splits {known}. Models of an encoder and a decoder "
            "(T5) have two streams of hidden states, and are not split."
        )
    return _CLASSES[name][0]


def _paths(model: nn.Module, family: _Family, parts: Mapping[str, Any]) -> list[str]:
    paths = [f"{family.base}.{path}" for path in parts]
    return [path for path in paths if path in dict(model.named_modules())]


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _ties(model: nn.Module, front: Sequence[str], back: Sequence[str]) -> Iterator[tuple[str, str]]:
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for names in places.values():
        groups = [[name for name in names if _is_below(name, paths)] for paths in (front, back)]
        others = [name for name in names if name not in groups[0] and name not in groups[1]]
        if len(names) > 1 and others:
            raise ConfigError(f"pipeline_parallel cannot split blocks that share a parameter: {', '.join(names)}.")
        if groups[0] and groups[1]:
            yield groups[0][0], groups[1][0]


def _is_below(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(path + ".") for path in paths)


def _replace(module: nn.Module, path: str, by: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, by)

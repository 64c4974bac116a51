"""How a model is cut into the stages of a pipeline: which blocks each stage has, and where the rest goes.

The model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from raysgd.engine.config import ZERO_BUBBLE_SCHEDULES
from raysgd.errors import ConfigError

#: Stages that a rank has with schedules that give it several.
_CHUNKS = 2
_SINGLE_SCHEDULES = (None, "1F1B", "GPipe")
#: Schedules that give a rank the stages of a V: rank 0 has the first and the last one.
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")

#: For models without a plan of transformers, by the class of the model without its head: modules that call the blocks one after
#: the other, with the names below them of the list of blocks, of what comes before it, and of what comes after it.
_STACKS: dict[str, tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "GPT2Model": (("", "h", ("wte", "wpe"), ("ln_f",)),),
    "BertModel": (("", "encoder.layer", ("embeddings",), ("pooler",)),),
    "RobertaModel": (("", "encoder.layer", ("embeddings",), ("pooler",)),),
    "BartModel": (
        ("encoder", "layers", ("embed_tokens", "embed_positions", "layernorm_embedding"), ()),
        ("decoder", "layers", ("embed_tokens", "embed_positions", "layernorm_embedding"), ()),
    ),
    "T5ForConditionalGeneration": (
        ("encoder", "block", ("embed_tokens",), ("final_layer_norm",)),
        ("decoder", "block", ("embed_tokens",), ("final_layer_norm",)),
    ),
}
#: Of these, models that classify by their first token.
_ENCODERS = ("BertModel", "RobertaModel")
#: Weights of embeddings that several stacks share, under a name of their own; the first stage has it.
_SHARED_EMBEDDING = "shared"


@dataclass(frozen=True)
class Stack:
    """A module that calls blocks one after the other: a decoder, or an encoder.

    Attributes:
        module: Its path in the model.
        blocks: The path of its list of blocks.
        front: The paths of what is called before the blocks.
        back: The paths of what is called after them.
    """

    module: str
    blocks: str
    front: tuple[str, ...]
    back: tuple[str, ...]


@dataclass(frozen=True)
class StageSplit:
    """The stages of a pipeline, in the order in which hidden states pass through them.

    Attributes:
        stacks: Of the model: one, or an encoder and a decoder.
        ranges: For each stage, which blocks it has, counted over the stacks.
        rank_of: For each stage, the rank that has it.
        ties: The parameters that several ranks have: for each one its name on each of the ranks.
        hidden_size: The features of the hidden states.
        num_encoder_blocks: Of an encoder that another stack follows.
    """

    stacks: tuple[Stack, ...]
    ranges: tuple[range, ...]
    rank_of: tuple[int, ...]
    ties: tuple[Mapping[int, str], ...]
    hidden_size: int
    num_encoder_blocks: int
    _stages_of: Mapping[str, frozenset[int]]

    def stages_of(self, path: str) -> frozenset[int]:
        """Return the stages that have a module or a parameter; none, if all have it."""
        return _find(self._stages_of, path)

    def has(self, rank: int, path: str) -> bool:
        """Whether a rank has a module or a parameter."""
        stages = self.stages_of(path)
        return not stages or any(self.rank_of[one] == rank for one in stages)

    def num_sent(self, stage: int) -> int:
        """Return how many hidden states a stage sends: in a decoder after an encoder, it passes on the encoder's too."""
        return 1 + (len(self.stacks) == 2 and self.ranges[stage].stop > self.num_encoder_blocks)

    @property
    def parts(self) -> Sequence[str]:
        """The paths of all modules that only some stages have."""
        return tuple(self._stages_of)


def read_model(model: nn.Module, num_ranks: int, schedule: str | None = None) -> StageSplit:
    """Cut a model into stages. They are balanced by their parameters.

    Args:
        model: A model of transformers with a head and a loss.
        num_ranks: Ranks of the pipeline.
        schedule: See `raysgd.EngineConfig`; some give each rank several stages.

    Raises:
        ConfigError: The model cannot be split, or has too few blocks; the message says why.
    """
    stacks = _read_stacks(model)
    if len(stacks) > 1 and schedule in ZERO_BUBBLE_SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule={schedule!r} computes the gradients of weights later than those of hidden states, which torch "
            f"cannot do where several blocks use one result, as the decoder of a {type(model).__name__} does: give another one."
        )
    item_counter(model)  # refuses losses that cannot be computed in micro-batches
    blocks = [f"{stack.blocks}.{name}" for stack in stacks for name in model.get_submodule(stack.blocks)._modules]
    rank_of = stage_ranks(num_ranks, schedule)
    if len(blocks) < len(rank_of):
        lists = " and ".join(stack.blocks for stack in stacks)
        stages = f" with {schedule} is {len(rank_of)} stages, and" if len(rank_of) > num_ranks else ""
        raise ConfigError(f"pipeline_parallel={num_ranks}{stages} needs as many blocks, and {lists} has {len(blocks)}.")
    ends = {one: end for stack in stacks for one, end in _ends(model, stack).items()}
    heads = [name for name, _ in model.named_children() if not _is_above(name, stacks) and name not in ends]
    ends |= dict.fromkeys(heads, blocks[-1])
    sizes = [_count(model, one) + sum(_count(model, path) for path in ends if ends[path] == one) for one in blocks]
    ranges = balance(sizes, len(rank_of))
    stages_of = {block: frozenset({stage}) for stage, one in enumerate(ranges) for block in (blocks[at] for at in one)}
    stages_of |= {path: stages_of[block] for path, block in ends.items()}
    for stack in stacks:
        if bias := find_bias(model, stack):
            own = [stages_of[block] for block in blocks if block.startswith(stack.blocks + ".")]
            stages_of = {bias: frozenset().union(*own), **stages_of}
    if odd := [name for name, _ in model.named_parameters() if not _find(stages_of, name)]:
        raise refuse(model, f"it uses {', '.join(odd)} outside of its blocks, and it is not known at which stage")
    config: Any = model.config
    ties = tuple(_ties(model, stages_of, rank_of))
    num_encoder_blocks = sum(one.startswith(stacks[0].blocks + ".") for one in blocks)
    return StageSplit(stacks, tuple(ranges), rank_of, ties, config.hidden_size, num_encoder_blocks, stages_of)


def stage_ranks(num_ranks: int, schedule: str | None) -> tuple[int, ...]:
    """Return the rank of each stage: one for each rank, or several in loops over the ranks, or down a V and up again."""
    ranks = tuple(range(num_ranks))
    if schedule in _SINGLE_SCHEDULES:
        return ranks
    return ranks + ranks[::-1] if schedule in V_SCHEDULES else ranks * _CHUNKS


def refuse(model: nn.Module, reason: str) -> ConfigError:
    """Return the error for a model that cannot be split."""
    return ConfigError(
        f"pipeline_parallel cannot split a {type(model).__name__}: {reason}. Use zero_stage=3 or tensor_parallel, which also "
        "divide the memory of a model."
    )


def item_counter(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor | int]:
    """Return how many items of a batch a model's own loss is a mean over.

    Raises:
        ConfigError: The loss is another one than transformers gives the class, or no mean over items.
    """
    config: Any = model.config
    name = type(model).__name__
    kind = getattr(model, "loss_type", None) or ("ForCausalLM" if name.endswith("LMHeadModel") else None)
    if hasattr(model, "_loss_function"):
        raise refuse(
            model, "its loss_function is one of your own, and it is not known over how many items it is a mean"
        )
    if getattr(config, "output_router_logits", False):
        raise refuse(model, "output_router_logits=True adds a loss over the routers of all stages; leave it out")
    if kind == "ForCausalLM":
        return lambda batch: (batch["labels"][:, 1:] != -100).sum()
    if kind in ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"):
        return lambda batch: (batch["labels"] != -100).sum()
    if kind == "ForSequenceClassification":
        if not any(one.__name__ in _ENCODERS for one in type(model.base_model).__mro__):
            raise refuse(model, "its head looks for the last token in input_ids, which the last stage does not see")
        return _count_rows
    raise refuse(model, f"its loss is {kind or 'not known'}, and not one of a language model or of a classifier")


def _count_rows(batch: Mapping[str, Tensor]) -> Tensor | int:
    labels = batch["labels"]
    return labels.shape[0] if labels.is_floating_point() else (labels != -100).sum()


def find_bias(model: nn.Module, stack: Stack) -> str | None:
    """Return the path of T5's relative position bias, which its first block computes for all blocks of the stack."""
    path = f"{stack.blocks}.0.layer.0.SelfAttention.relative_attention_bias"
    return path if _has(model, path) else None


def balance(sizes: Sequence[int], num_stages: int) -> list[range]:
    """Cut a list into consecutive parts, so that the largest part is as small as possible; no part is empty.

    Args:
        sizes: The size of each element; at least as many as parts.
        num_stages: The number of parts.
    """
    number = len(sizes)
    sums = [0]
    for one in sizes:
        sums.append(sums[-1] + one)
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


def _read_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return the stacks of a model, by transformers' plan or our own."""
    config, base = getattr(model, "config", None), getattr(model, "base_model", None)
    if base is None or not type(model).forward.__module__.startswith("transformers."):
        raise refuse(model, "it is no model of transformers, or has another forward pass than that")
    if getattr(config, "is_decoder", False) and getattr(config, "add_cross_attention", False):
        raise refuse(model, "there is no way for encoder_hidden_states with add_cross_attention=True")
    path = next(name for name, module in model.named_modules() if module is base)
    known = next((_STACKS[one.__name__] for one in type(base).__mro__ if one.__name__ in _STACKS), None)
    if known is None:
        known = (_read_plan(model, base),)
    stacks: list[Stack] = []
    for module, blocks, front, back in known:
        at = _join(path, module)
        paths = [tuple(_join(at, one) for one in names if _has(base, _join(module, one))) for names in (front, back)]
        if len(known) > 1 and not stacks:
            paths[0] += (_join(path, _SHARED_EMBEDDING),)
        stacks.append(Stack(at, _join(at, blocks), *paths))
    return tuple(stacks)


def _read_plan(model: nn.Module, base: nn.Module) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """Return what transformers' plan for pipelines says of a model's parts, in the order in which they are called."""
    plan = getattr(base.config, "base_model_pp_plan", None)
    names = [name for name in plan or () if _has(base, name)]
    lists = [name for name in names if isinstance(base.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        raise refuse(
            model,
            f"it is none of {', '.join(_STACKS)}, and transformers has no plan for its stages (base_model_pp_plan)",
        )
    at = names.index(lists[0])
    return "", lists[0], tuple(names[:at]), tuple(names[at + 1 :])


def _ends(model: nn.Module, stack: Stack) -> dict[str, str]:
    """Return the block with which each part before and after the blocks goes."""
    names = list(model.get_submodule(stack.blocks)._modules)
    return {
        path: f"{stack.blocks}.{name}"
        for paths, name in ((stack.front, names[0]), (stack.back, names[-1]))
        for path in paths
    }


def _ties(
    model: nn.Module, stages_of: Mapping[str, frozenset[int]], rank_of: Sequence[int]
) -> Iterator[dict[int, str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for several in names.values():
        ranks: dict[int, str] = {}
        for name in several:
            for stage in _find(stages_of, name):
                ranks.setdefault(rank_of[stage], name)
        if len(ranks) > 1:
            yield dict(sorted(ranks.items()))


def _find(stages_of: Mapping[str, frozenset[int]], path: str) -> frozenset[int]:
    return next((stages for one, stages in stages_of.items() if f"{path}.".startswith(one + ".")), frozenset())


def _is_above(name: str, stacks: Sequence[Stack]) -> bool:
    return any(f"{stack.module}.".startswith(name + ".") for stack in stacks)


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _count(model: nn.Module, path: str) -> int:
    return sum(one.numel() for one in model.get_submodule(path).parameters())


def _join(path: str, name: str) -> str:
    return ".".join(one for one in (path, name) if one)

"""The forward pass of one stage: the model's own, with other stages' blocks out of the way. Worker side.

The model's own forward pass makes masks, rotary embeddings and losses, and names of parameters stay. While a chunk runs, its
lists of blocks have a `_Passage` in the place of each block of another stage, so that what a model looks up by a block's index
is right. The first passage replaces whatever the model has computed by the hidden states of the stage before, and the last one
keeps what the next stage gets: what models do before and after their blocks (scaling, dropout) needs no rules here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from raysgd.engine.pipeline.stages import Stack, StageSplit, find_bias, item_counter, refuse

#: What only the first stage takes from a batch, and what all stages take.
_FRONT_KEYS = frozenset({"input_ids", "inputs_embeds", "token_type_ids"})
_STAGE_KEYS = frozenset({"attention_mask", "position_ids"})
#: What a batch may have, by the number of stacks.
BATCH_KEYS = {
    1: frozenset({"labels", *_FRONT_KEYS, *_STAGE_KEYS}),
    2: frozenset(
        {"labels", "input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
    ),
}

#: Further arguments of the model: hidden states are all that passes on from a forward pass.
_OPTIONS = {"use_cache": False, "return_dict": True}
#: The relative difference of losses above which stages do not compute what the model does.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_LOW_TOLERANCE = 3e-2


class _Elsewhere(nn.Module):
    """In place of a module that another stage has. What it returns has a fitting shape, and no influence."""

    is_elsewhere = True  # for tensor parallelism, which may have a style for the module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        hidden = next((one for one in given if one.is_floating_point()), None)
        return torch.zeros((), device=given[0].device) if hidden is None else hidden


class _Passage(nn.Module):
    """In place of a block of another stage: hands hidden states on.

    Attributes:
        received: What it hands on instead, if it is not None: what the stage before has sent.
        passed: What it has handed on last.
    """

    received: Tensor | None = None
    passed: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.passed = hidden_states if self.received is None else self.received
        return self.passed


class _BiasPassage(_Passage):
    """The same for a model whose first block makes a position bias for all of them, as T5's does.

    Args:
        attention: The first block's, without its linear layers.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self._attention: tuple[Any] = (attention,)  # its parameters are not this module's

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        passed = super().forward(hidden_states)
        position_bias, cross_bias = args[1], args[4]
        if position_bias is None:
            length = passed.shape[1]
            position_bias = self._attention[0].compute_bias(length, length, passed.device)
        return passed, position_bias, cross_bias


class Chunk:
    """One stage of a model. It is made of the whole model, from which other stages' parts may be removed afterwards.

    Args:
        model: The model.
        split: Which blocks each stage has.
        stage: The index of the stage.

    Attributes:
        model: The model.
        is_first: Whether it gets a batch, and no hidden states.
        is_last: Whether it computes the loss.
        num_items: The items of the whole batch, over which its loss is a mean.
        dtype: The type of what it sends.
    """

    def __init__(self, model: nn.Module, split: StageSplit, stage: int) -> None:
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == len(split.ranges) - 1
        self.num_items: Tensor | int = 1
        self.dtype = torch.float32
        self.model, self._forward = model, model.forward
        self._split = split
        self.count_items = item_counter(model)
        self._lists: dict[Stack, dict[str, nn.Module]] = {}
        start, own = 0, split.ranges[stage]
        for stack in split.stacks:
            blocks = dict(model.get_submodule(stack.blocks)._modules)
            at = range(max(own.start - start, 0), min(own.stop - start, len(blocks)))
            if at:
                self._lists[stack] = self._with_passages(stack, blocks, at)
            start += len(blocks)

    def _with_passages(self, stack: Stack, blocks: Mapping[str, Any], own: range) -> dict[str, nn.Module]:
        bias = find_bias(self.model, stack)
        attention = None if bias is None else self.model.get_submodule(bias.rpartition(".")[0])
        return {
            name: block if at in own else _Passage() if attention is None else _BiasPassage(attention)
            for at, (name, block) in enumerate(blocks.items())
        }

    def __call__(self, *hidden: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage gets, or what the micro-batch adds to the batch's loss.

        Args:
            hidden: What the stage before has sent: hidden states, or an encoder's last ones and the decoder's.
            batch: The micro-batch.
        """
        with self._only_own_blocks(hidden):
            if len(self._split.stacks) == 2:
                return self._run_both(hidden, batch)
            keys = _STAGE_KEYS | _FRONT_KEYS if self.is_first else _STAGE_KEYS
            inputs: dict[str, Any] = {key: value for key, value in batch.items() if key in keys}
            if not self.is_first:
                inputs["inputs_embeds"] = hidden[0]
            return self._share_of_loss(batch, inputs) if self.is_last else self._run(self._split.stacks[0], inputs)

    def _run_both(self, hidden: Sequence[Tensor], batch: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Run a part of an encoder, of a decoder, or the end of one and the start of the other."""
        encoder, decoder = self._split.stacks
        mask = batch.get("attention_mask")
        if encoder in self._lists:
            keys = ("input_ids", "inputs_embeds")
            front = {key: batch[key] for key in keys if key in batch} if self.is_first else {"inputs_embeds": hidden[0]}
            states = self._run(encoder, {**front, "attention_mask": mask})
        else:
            states = hidden[0].view_as(hidden[0])  # what passes through a stage is part of its graph
        if decoder not in self._lists:
            return states
        front = {"inputs_embeds": hidden[1]} if len(hidden) == 2 else {"input_ids": self._shifted(batch)}
        inputs = {**front, "attention_mask": batch.get("decoder_attention_mask")}
        if self.is_last:
            inputs = {f"decoder_{key}": value for key, value in inputs.items()}
            return self._share_of_loss(batch, {**inputs, "encoder_outputs": (states,), "attention_mask": mask})
        others = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        return states, self._run(decoder, {**inputs, **others})

    def _shifted(self, batch: Mapping[str, Tensor]) -> Tensor:
        model: Any = self.model
        given = batch.get("decoder_input_ids")
        return model.prepare_decoder_input_ids_from_labels(batch["labels"]) if given is None else given

    def _run(self, stack: Stack, inputs: Mapping[str, Any]) -> Tensor:
        """Return the hidden states after a stack's own blocks, and after what follows the last one if that is among them."""
        outputs = self.model.get_submodule(stack.module)(**inputs, **_OPTIONS)
        end = list(self._lists[stack].values())[-1]
        passed: Tensor | None = end.passed if isinstance(end, _Passage) else outputs.last_hidden_state
        assert passed is not None
        return passed.to(self.dtype)

    def _share_of_loss(self, batch: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """Return what the micro-batch adds to the batch's loss, the mean over all items."""
        num_items = self.count_items(batch)
        value = self._forward(**inputs, labels=batch["labels"], **_OPTIONS).loss
        # A mean over no items is not a number; such a micro-batch adds nothing.
        share = torch.where(torch.as_tensor(num_items, device=value.device) > 0, value.float(), 0.0)
        return torch.stack([share * num_items / self.num_items])

    @contextmanager
    def _only_own_blocks(self, hidden: Sequence[Tensor]) -> Iterator[None]:
        """Put passages into the lists of blocks, of which the first has what the stage before has sent."""
        lists = [(self.model.get_submodule(stack.blocks), modules) for stack, modules in self._lists.items()]
        before = [blocks._modules for blocks, _ in lists]
        try:
            for blocks, modules in lists:
                blocks._modules = modules  # type: ignore[assignment]
                first = next(iter(modules.values()))
                if isinstance(first, _Passage):
                    first.received = hidden[-1]
            yield
        finally:
            for (blocks, modules), kept in zip(lists, before, strict=True):
                blocks._modules = kept
                for one in modules.values():
                    if isinstance(one, _Passage):
                        one.received = one.passed = None


def remove_others(model: nn.Module, split: StageSplit, rank: int) -> None:
    """Remove from a model what only other ranks have."""
    for stack in split.stacks:
        bias = find_bias(model, stack)
        kept = nn.ModuleList()
        for name, block in model.get_submodule(stack.blocks).named_children():
            path = f"{stack.blocks}.{name}"
            if split.has(rank, path):
                kept.add_module(name, block)
            elif bias is not None and bias.startswith(f"{path}.") and split.has(rank, bias):
                kept.add_module(name, _keep_bias(block))
        _replace(model, stack.blocks, kept)
    for path in split.parts:
        if not split.has(rank, path) and not any(path.startswith(f"{stack.blocks}.") for stack in split.stacks):
            _replace(model, path, _Elsewhere())


def _keep_bias(block: nn.Module) -> nn.Module:
    """Return a module with the parameters of a block's position bias alone, under the names that they have in the block."""
    attention = block.get_submodule("layer.0.SelfAttention")
    for name, _ in list(attention.named_children()):
        if name != "relative_attention_bias":
            setattr(attention, name, None)
    layer, kept = nn.Module(), nn.Module()
    layer.SelfAttention = attention
    kept.layer = nn.ModuleList([layer])
    return kept


def check_split(model: nn.Module, split: StageSplit) -> None:
    """Compare the loss of a small batch with that of the stages, one after the other, in two micro-batches.

    Raises:
        ConfigError: The model does more between its blocks than to hand hidden states on, or has another loss.
    """
    batch = _make_example(model)
    config: Any = model.config
    modes, problem_type = {one: one.training for one in model.modules()}, getattr(config, "problem_type", None)
    chunks = [Chunk(model, split, stage) for stage in range(len(split.ranges))]
    try:
        model.eval()
        with torch.no_grad():
            expected = float(model(**batch, **_OPTIONS).loss)
            found = _run_in_rows(chunks, batch)
    finally:
        for one, is_training in modes.items():
            one.training = is_training
        if hasattr(config, "problem_type"):
            config.problem_type = problem_type  # the loss of a classifier sets it
    tolerance = _TOLERANCE.get(chunks[0].dtype, _LOW_TOLERANCE)
    if abs(found - expected) > tolerance * max(abs(expected), 1e-3):
        raise refuse(model, f"the loss of its stages, {found:.6g}, is not that of the model, {expected:.6g}")


def _run_in_rows(chunks: Sequence[Chunk], batch: Mapping[str, Tensor]) -> float:
    """Return the loss of a batch of which each row is a micro-batch."""
    loss = 0.0
    for chunk in chunks:
        chunk.num_items, chunk.dtype = chunk.count_items(batch), next(chunk.model.parameters()).dtype
    for row in range(batch["labels"].shape[0]):
        states: Any = ()
        for chunk in chunks:
            try:
                states = chunk(*states, **{key: value[row : row + 1] for key, value in batch.items()})
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as problem:
                raise refuse(chunk.model, f"its blocks cannot be run stage by stage ({problem})") from problem
            states = states if isinstance(states, tuple) else (states,)
        loss += float(states[0])
    return loss


def _make_example(model: nn.Module) -> dict[str, Tensor]:
    """Make a batch of two rows with different numbers of items."""
    config: Any = model.config
    device = next(model.parameters()).device
    words = torch.arange(3, 15, device=device).view(2, 6) % config.vocab_size
    mask = torch.ones_like(words)
    mask[1, 4:] = 0
    labels = words.masked_fill(mask == 0, -100)
    if "SequenceClassification" in type(model).__name__:
        is_regression = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        shape = (2, config.num_labels) if is_regression or config.problem_type == "multi_label_classification" else (2,)
        labels = torch.zeros(shape, device=device, dtype=torch.long if len(shape) == 1 else torch.float)
    elif "TokenClassification" in type(model).__name__:
        labels = labels.clamp(max=config.num_labels - 1)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def _replace(module: nn.Module, path: str, by: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, by)

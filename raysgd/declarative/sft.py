"""Ready parts of a file that fine-tunes a language model: rows with masked prompts, packing, LoRA. Worker side."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from raysgd._util.logs import get_logger
from raysgd.config.checks import check_choice
from raysgd.declarative.hooks import TrainHook
from raysgd.errors import ConfigError

__all__ = ["CausalLM", "Conversations", "collate"]

#: The label of tokens that no loss is computed of, as in transformers.
IGNORED = -100
_KINDS = "messages, prompt and completion, or text"


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """Documents of a JSONL file as tokens, of which only the answers are trained on.

    A line has ``messages`` with a ``role`` and ``content`` each, of which the assistant's are answers; or ``prompt`` and
    ``completion``; or ``text``, which is an answer as a whole. Messages are written by the tokenizer's chat template; the other
    kinds begin with its BOS token, if it sets one, and end with its EOS token, which is part of the answer.

    The prompt of an answer has the tokens that it has by itself, as when the model answers it later. A document that is longer
    than ``max_length`` is cut at its end; one without a token of an answer is left out. A warning has both numbers.

    Args:
        path: The file.
        tokenizer: Folder or name of the tokenizer.
        max_length: Tokens of a row.
        packing: Whether a row has as many documents as fit, each with positions from 0 on.

    Raises:
        ConfigError: There is no such file, a line is none of these kinds, the chat template changes earlier messages, or no row
            is left.
    """

    def __init__(self, path: str, tokenizer: str, *, max_length: int, packing: bool = False) -> None:
        from transformers import AutoTokenizer

        if not Path(path).is_file():
            raise ConfigError(
                f"there is no file {path} in {os.getcwd()} on this machine; give a path that all nodes see."
            )
        self.packing = packing
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        counts: Counter[str] = Counter()
        documents = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                pieces = self._split(json.loads(line))
            except Exception as error:  # a chat template raises what it likes
                raise ConfigError(f"{path}, line {number}: {error}") from error
            document = make_document(pieces, max_length)
            counts["cut"] += sum(len(ids) for ids, _ in pieces) > max_length
            if document is None:
                counts["left out"] += 1
            else:
                counts["endless"] += not self._is_ended(pieces)
                documents.append(document)
        if not documents:
            raise ConfigError(f"{path} has no document with a token of an answer among the first {max_length}.")
        for name, text in (
            ("cut", f"are longer than max_length={max_length} and were cut"),
            ("left out", "have no token of an answer and were left out"),
            ("endless", "have an answer that ends with no special token, so the model does not learn to end it"),
        ):
            if counts[name]:
                get_logger().warning("%s: %d documents %s.", path, counts[name], text)
        packs = pack([len(each["input_ids"]) for each in documents], max_length) if packing else None
        self._rows = documents if packs is None else [_join([documents[each] for each in places]) for places in packs]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return self._rows[place]

    def _split(self, line: Any) -> list[tuple[list[int], bool]]:
        """Return the tokens of a line in pieces, and whether each is an answer."""
        if isinstance(line, Mapping) and isinstance(line.get("messages"), list):
            text, spans = self._write(line["messages"])
            return list(self._encode(text, spans))
        if not isinstance(line, Mapping) or not isinstance(answer := line.get("completion", line.get("text")), str):
            what = f"the keys {sorted(line)}" if isinstance(line, Mapping) else type(line).__name__
            raise ConfigError(f"a line has {_KINDS}; this one has {what}.")
        prompt, tokenizer = str(line.get("prompt", "")), self._tokenizer
        begin = [each for each in tokenizer("").input_ids[:1] if each == tokenizer.bos_token_id]
        eos = tokenizer.eos_token
        end = [] if eos is None or answer.endswith(eos) else [tokenizer.eos_token_id]
        pieces = self._encode(prompt + answer, [(len(prompt), len(prompt) + len(answer))])
        return [(begin, False), *pieces, (end, True)]

    def _write(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where the answers in it begin and end."""
        write = self._tokenizer.apply_chat_template
        text = str(write(messages, tokenize=False))
        spans: list[tuple[int, int]] = []
        ends = tuple(self._tokenizer.all_special_tokens)
        for place, message in enumerate(messages):
            if not {"role", "content"} <= set(message):
                raise ConfigError(f"a message has role and content; this one has {', '.join(message)}.")
            if message["role"] != "assistant":
                continue
            before = str(write(messages[:place], tokenize=False, add_generation_prompt=True))
            until = str(write(messages[: place + 1], tokenize=False))
            if not (text.startswith(until) and until.startswith(before)):
                raise ConfigError(
                    f"the chat template writes the messages before answer {len(spans) + 1} differently when others follow, so "
                    "the prompt of the answer is not known: give a conversation for each answer, which it ends with."
                )
            stripped = until.rstrip()  # what a template writes after the token that ends an answer is not generated
            spans.append((len(before), len(stripped) if stripped.endswith(ends) else len(until)))
        return text, spans

    def _encode(self, text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], bool]]:
        """Yield the tokens of a text in pieces that end where an answer begins or ends, and whether each is an answer.

        A prompt has the tokens of the text until there. Where the whole text would have a token across the place, the text after
        it is encoded by itself.
        """
        start, at = 0, 0
        ids: list[int] = []
        for place, is_answer in [each for span in spans for each in ((span[0], False), (span[1], True))] + [
            (len(text), False)
        ]:
            longer = self._tokenizer(text[start:place], add_special_tokens=False).input_ids
            if longer[: len(ids)] != ids:
                start, ids = at, []
                longer = self._tokenizer(text[start:place], add_special_tokens=False).input_ids
            yield longer[len(ids) :], is_answer
            at, ids = place, longer

    def _is_ended(self, pieces: Sequence[tuple[list[int], bool]]) -> bool:
        """Return whether the last token of every answer is a special one, with which generation ends."""
        tokens = [(each, is_answer) for ids, is_answer in pieces for each in ids]
        ends = [
            each for (each, is_answer), (_, continues) in pairwise([*tokens, (0, False)]) if is_answer and not continues
        ]
        return set(ends) <= set(self._tokenizer.all_special_ids)


def make_document(pieces: Sequence[tuple[list[int], bool]], max_length: int) -> dict[str, torch.Tensor] | None:
    """Return the first tokens of a document with labels and positions; None if none of them is trained on.

    Args:
        pieces: Tokens, and whether they are an answer.
        max_length: Tokens to keep.
    """
    ids = torch.tensor([each for piece, _ in pieces for each in piece][:max_length], dtype=torch.long)
    is_answer = torch.tensor([flag for piece, flag in pieces for _ in piece][:max_length], dtype=torch.bool)
    is_answer[:1] = False  # nothing predicts it; in a row, the document before would
    labels = ids.where(is_answer, torch.tensor(IGNORED))
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(len(ids))} if is_answer.any() else None


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return which documents are in each row: the longest first, each into the row with the least room that it fits in."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # with the row, in order
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        at = bisect_left(rooms, (lengths[place], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (max_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(place)
        insort(rooms, (room - lengths[place], row))
    return rows


def _join(documents: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([each[name] for each in documents]) for name in documents[0]}


def collate(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return rows as a batch. Padding follows a row, so that no token attends to it, and has no label."""
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[torch.Tensor]] = {name: [] for name in rows[0]}
    for row in rows:
        num = length - len(row["input_ids"])
        following = row["position_ids"][-1] + 1 + torch.arange(num)  # not the start of a document
        padding = {"input_ids": torch.zeros(num), "labels": torch.full((num,), IGNORED), "position_ids": following}
        for name, values in batch.items():
            values.append(torch.cat([row[name], padding[name].long()]))
    return {name: torch.stack(values) for name, values in batch.items()}


class CausalLM(nn.Module, TrainHook):
    """A causal language model of transformers, or LoRA adapters in one, whose loss is the sum over the labels of a batch.

    Give ``grad_reduction`` and ``loss_reduction`` as ``per-token-mean``: each label counts equally then, however labels are
    divided over micro-batches and ranks.

    Args:
        name: Folder or name of the model, and of its tokenizer.
        lora: Arguments of PEFT's ``LoraConfig``; None: all parameters are trained.
        exports: What `save_pretrained` writes of a model with adapters: the ``"merged"`` model, or the ``"adapter"`` alone.
        **given: Further arguments of ``AutoModelForCausalLM.from_pretrained``, such as ``dtype`` or ``attn_implementation``.

    Raises:
        ImportError: LoRA needs PEFT, which is not installed.
    """

    def __init__(
        self,
        name: str,
        *,
        lora: Mapping[str, Any] | None = None,
        exports: Literal["merged", "adapter"] = "merged",
        **given: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        check_choice("exports", exports, ("merged", "adapter"))
        self.model: Any = AutoModelForCausalLM.from_pretrained(name, **{"dtype": torch.float32, **given})
        self._name, self._exports, self._has_adapters = name, exports, lora is not None
        if lora is not None:
            try:
                import peft
            except ImportError as error:
                raise ImportError("LoRA needs PEFT: install it by `pip install peft`.") from error
            config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear", **lora})
            self.model = peft.get_peft_model(self.model, config)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sum of the losses of all labels as ``loss``, and their number as ``num_tokens``."""
        # Without a cache and an attention mask, transformers keeps documents apart by their positions.
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        labels = batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return {"loss": loss, "num_tokens": (labels != IGNORED).sum()}

    def on_train_start(self, trainer: Any) -> None:
        """Check that the documents of a row do not see each other, if the data has such rows.

        Raises:
            ConfigError: They do: this model, or its attention, does not read positions.
        """
        loader = trainer.dataloader["train"]
        if not getattr(getattr(loader, "dataset", None), "packing", False):
            return
        trainer.model.eval()
        losses = []
        for token in (1, 2):
            ids = torch.tensor([[token, token, 1, 2]], device=next(self.parameters()).device)
            labels, positions = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
            labels[:, -1], positions[:, 1::2] = 2, 1
            with torch.no_grad():
                losses.append(trainer.model({"input_ids": ids, "labels": labels, "position_ids": positions})["loss"])
        if not torch.allclose(losses[0], losses[1], rtol=1e-4):
            raise ConfigError(
                f"packing: {self._name} lets a document of a row see the one before it: give another attn_implementation of the "
                "model, or packing: false of the dataset."
            )

    def save_pretrained(self, folder: str) -> None:
        """Write the model and its tokenizer to a folder, as transformers and PEFT load them. Adapters are merged in place."""
        from transformers import AutoTokenizer

        is_merged = self._has_adapters and self._exports == "merged"
        model = self.model.merge_and_unload() if is_merged else self.model
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self._name).save_pretrained(folder)

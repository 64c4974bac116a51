"""Folders with tiny language models of random weights and their tokenizers, as transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Tokens of several characters, also across the place where an answer may begin.
MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), (">", ">"), ("Ċ", "Ċ")]
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}


def make_tokenizer(**given: Any) -> Any:
    """Make a byte-level tokenizer with a BOS and an EOS token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", **given}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    made.chat_template = CHAT
    return made


def make_folder(folder: Path, kind: str = "llama", **given: Any) -> str:
    """Write a model of this type and a tokenizer to a folder; return its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    sizes = {**SIZE, **({"intermediate_size": 32} if kind == "llama" else {}), **given}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return str(path)

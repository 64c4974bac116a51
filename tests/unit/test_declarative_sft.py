"""Rows for the fine-tuning of a language model: what is trained on, packing, losses, and the folders that transformers loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raysgd.declarative.entry import export
from raysgd.declarative.sft import IGNORED, CausalLM, Conversations, collate, make_document, pack
from raysgd.errors import ConfigError
from support.declared_runs import assert_equal, run, run_without_seed
from support.fine_tuning import LORA, STEPS, losses_of_a_plain_loop, make_files, values_of
from support.tiny_language_models import CHAT, make_folder, make_tokenizer, write_lines

TEXTS = st.text(alphabet="abc \n>é\u2028", max_size=6)
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "hidden_size": 16}
LINES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abc"}]},
    {"prompt": "ab", "completion": "c"},
    {"prompt": "x ", "completion": "abcabc"},
    {"text": "hello"},
    {"prompt": "q", "completion": ""},
    {"prompt": "a long prompt", "completion": "b"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines") / "rows.jsonl"


def rows_of(
    path: Path, folder: str, *lines: Any, max_length: int = 1000, packing: bool = False
) -> list[dict[str, torch.Tensor]]:
    rows = Conversations(write_lines(path, lines), folder, max_length=max_length, packing=packing)
    return [rows[place] for place in range(len(rows))]


def answers_of(row: dict[str, torch.Tensor]) -> str:
    return str(make_tokenizer().decode(row["input_ids"][row["labels"] != IGNORED]))


# -- what is trained on ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_answers_and_their_ends_alone_are_trained_on(folder: str, lines: Path, turns: list[tuple[str, str]]) -> None:
    messages = [
        {"role": role, "content": text}
        for question, answer in turns
        for role, text in (("user", question), ("assistant", answer))
    ]
    (row,) = rows_of(lines, folder, {"messages": messages})
    assert answers_of(row) == "".join(f"{answer}</s>" for _, answer in turns)
    tokenizer = make_tokenizer()
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt).input_ids  # as when the model answers it
    assert row["input_ids"][: len(ids)].tolist() == ids


@given(TEXTS, TEXTS)
@settings(max_examples=60, deadline=None)
def test_a_completion_is_trained_on_and_its_prompt_is_not(folder: str, lines: Path, prompt: str, answer: str) -> None:
    (row,) = rows_of(lines, folder, {"prompt": f"x{prompt}", "completion": answer})
    ids = make_tokenizer()(f"x{prompt}").input_ids
    assert row["input_ids"][: len(ids)].tolist() == ids
    assert (row["labels"][: len(ids)] == IGNORED).all()
    assert answers_of(row) == f"{answer}</s>"


@given(st.lists(st.tuples(st.lists(st.integers(3, 9), max_size=5), st.booleans()), max_size=5), st.integers(1, 12))
def test_a_document_is_cut_at_its_end(pieces: list[tuple[list[int], bool]], max_length: int) -> None:
    ids = [each for piece, _ in pieces for each in piece]
    labels = [each if flag else IGNORED for piece, flag in pieces for each in piece][:max_length]
    labels[:1] = [IGNORED] * len(labels[:1])
    document = make_document(pieces, max_length)
    if document is None:
        assert set(labels) <= {IGNORED}
    else:
        assert document["input_ids"].tolist() == ids[:max_length]
        assert document["labels"].tolist() == labels
        assert document["position_ids"].tolist() == list(range(len(labels)))


def test_what_cannot_be_trained_on_is_counted_in_a_warning(
    folder: str, lines: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(lines, folder, {"prompt": "0123456789", "completion": "a"}, {"text": "abcxyz"}, max_length=4)
    assert [answers_of(row) for row in rows] == ["xyz"]
    assert "2 documents are longer than max_length=4 and were cut" in caplog.text
    assert "1 documents have no token of an answer and were left out" in caplog.text
    assert "special token" not in caplog.text
    with pytest.raises(ConfigError, match="no document with a token of an answer among the first 4"):
        rows_of(lines, folder, {"prompt": "0123456789", "completion": "a"}, max_length=4)


def test_an_answer_that_nothing_ends_gets_a_warning(
    folder: str, lines: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT.replace("{{ eos_token }}", "")
    tokenizer.save_pretrained(tmp_path)
    assert answers_of(rows_of(lines, str(tmp_path), LINES[0])[0]) == "abc\n"
    assert "1 documents have an answer that ends with no special token" in caplog.text


def test_special_tokens_begin_and_end_a_document_once(folder: str, lines: Path, tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    for line in ({"prompt": "x", "completion": "y"}, {"prompt": "x", "completion": "y</s>"}):
        (row,) = rows_of(lines, str(tmp_path), line)
        assert tokenizer.convert_ids_to_tokens(row["input_ids"].tolist()) == ["<s>", "x", "y", "</s>"]
    (row,) = rows_of(lines, str(tmp_path), LINES[0])
    assert row["input_ids"].tolist().count(0) == 1


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            {"question": "a", "answer": "b"},
            r"rows.jsonl, line 2: a line has messages, .* the keys \['answer', 'question'\]",
        ),
        (["a"], "line 2: .* this one has list"),
        ({"messages": [{"content": "a"}]}, "line 2: a message has role and content; this one has content"),
    ],
)
def test_a_line_of_another_kind_is_refused_by_its_number(folder: str, lines: Path, line: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rows_of(lines, folder, LINES[1], line)
    with pytest.raises(ConfigError, match=r"there is no file rows\.jsonl in .* on this machine"):
        Conversations("rows.jsonl", folder, max_length=9)
    lines.write_text(json.dumps(LINES[1]) + "\n{")
    with pytest.raises(ConfigError, match="line 2: Expecting"):
        Conversations(str(lines), folder, max_length=9)


def test_a_template_that_rewrites_earlier_answers_is_refused(lines: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT.replace(
        "{{ message.content }}", "{% if loop.last or message.role == 'user' %}{{ message.content }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    messages = LINES[0]["messages"]
    assert answers_of(rows_of(lines, str(tmp_path), {"messages": messages})[0]) == "abc</s>"
    with pytest.raises(ConfigError, match="line 1: the chat template writes the messages before answer 1 differently"):
        rows_of(lines, str(tmp_path), {"messages": messages * 2})


# -- packing -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), max_size=40))
def test_packing_has_each_document_once_and_no_row_too_many(lengths: list[int]) -> None:
    rows = pack(lengths, 20)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    sums = [sum(lengths[place] for place in row) for row in rows]
    assert all(each <= 20 for each in sums)
    assert sum(each <= 10 for each in sums) <= 1, "two rows would fit into one"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_of_a_row_have_the_losses_that_they_have_alone(
    folder: str, lines: Path, tmp_path: Path, kind: str, attention: str
) -> None:
    sizes = {"gpt2": GPT2, "gpt_neox": {"intermediate_size": 32}}.get(kind, {})
    model = CausalLM(make_folder(tmp_path / kind, kind, **sizes), attn_implementation=attention).eval()
    alone, packed = (rows_of(lines, folder, *LINES, max_length=40, packing=packing) for packing in (False, True))
    assert len(packed) == 2 < len(alone) == len(LINES)
    singly = [model(collate([row])) for row in alone]
    of_batch, of_packs = model(collate(alone)), model(collate(packed))
    for name in ("loss", "num_tokens"):
        expected = sum(float(each[name].detach()) for each in singly)
        assert float(of_batch[name].detach()) == pytest.approx(expected, rel=1e-5)
        assert float(of_packs[name].detach()) == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_padding_has_no_loss_and_no_nan(folder: str) -> None:
    labels = torch.full((1, 3), IGNORED)
    found = CausalLM(folder)({"input_ids": labels.abs(), "labels": labels, "position_ids": torch.arange(3)[None]})
    found["loss"].backward()
    assert float(found["loss"].detach()) == float(found["num_tokens"]) == 0


def test_adapters_without_peft_say_what_to_install(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        CausalLM(folder, lora={})


# -- training and export ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    return make_files(tmp_path_factory.mktemp("files"))


def logits_of(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 12)[None]).logits
    return found


@pytest.mark.usefixtures("group")
def test_losses_are_those_of_a_plain_loop(files: Path) -> None:
    expected = losses_of_a_plain_loop(files)
    for steps in (1, 2, STEPS):
        metrics, _ = run(values_of(files, max_train_steps=steps, checkpoint__no_save=True))
        assert metrics["train_loss"] == pytest.approx(expected[steps - 1], rel=1e-5)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"engine": {"activation_checkpointing": "full"}}])
def test_a_training_is_resumed_within_an_epoch_to_the_bit(files: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    values = values_of(files, **{**changes, "model__args__lora": {**LORA, "lora_dropout": 0.1}})
    whole, weights = run(values)
    run({**values, "max_train_steps": 1}, tmp_path)
    resumed, resumed_weights = run_without_seed(values, tmp_path)
    assert resumed["finished_train_steps"] == STEPS
    assert resumed["train_loss"] == whole["train_loss"]
    assert_equal(weights, resumed_weights)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "lora", [LORA, {**LORA, "modules_to_save": ["lm_head"]}, None], ids=["lora", "and head", "all"]
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_is_exported_for_transformers(tmp_path: Path, lora: Any, is_tied: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = make_files(tmp_path, tie_word_embeddings=is_tied)
    values = values_of(files, model__args__lora=lora, checkpoint__save_dir=str(tmp_path / "runs"))
    _, weights = run(values, tmp_path / "runs" / "run_001" / "checkpoints")
    given = {"name": str(files / "model"), "lora": lora}
    trained = CausalLM(**given)
    trained.load_state_dict(weights)
    expected = logits_of(trained.model)
    path = export(values, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(path)
    assert type(merged).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)
    assert (logits_of(AutoModelForCausalLM.from_pretrained(files / "model")) - expected).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(path).chat_template == CHAT
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        export(values, path)
    if lora is not None:
        values["vars"] = {"base": str(files / "model")}
        values["model"]["args"] |= {"exports": "adapter", "name": "$!(vars.base)"}
        adapter = Path(export(values, tmp_path / "adapter"))
        base = AutoModelForCausalLM.from_pretrained(files / "model")
        torch.testing.assert_close(logits_of(peft.PeftModel.from_pretrained(base, adapter)), expected)
        assert not (adapter / "model.safetensors").exists()


@pytest.mark.usefixtures("group")
def test_a_model_that_mixes_documents_is_not_trained_on_packed_rows(tmp_path: Path) -> None:
    files = make_files(tmp_path, kind="mamba")
    values = values_of(files, model__args__lora=None, checkpoint__no_save=True, max_train_steps=1)
    with pytest.raises(ConfigError, match="lets a document of a row see the one before it"):
        run(values)
    values["dataset"]["train_args"]["packing"] = False
    assert run(values)[0]["finished_train_steps"] == 1

"""Sharding plans: which dimension of each parameter is sharded, why, and which own rules are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.errors import ConfigError

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax

from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from raysgd.pipeline.sharding.plan import plan_sharding  # noqa: E402
from raysgd.pipeline.worker.train_state import zero_spec  # noqa: E402
from support import pipeline_models as models  # noqa: E402

COLUMN, ROW, WHOLE = P(None, "model"), P("model", None), P()
IMAGES = np.zeros((2, 8, 8, 3), np.float32)
TREES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: models.shapes(models.Gpt2(), models.IDS),
    "llama": lambda: models.shapes(models.Llama(), models.IDS),
    "llama_grouped": lambda: models.shapes(models.Llama(kv_heads=2), models.IDS),
    "llama_scanned": lambda: models.shapes(models.ScannedLlama(), models.IDS),
    "t5": lambda: models.shapes(models.T5(), models.IDS, models.IDS),
    "bert": lambda: models.shapes(models.Bert(), models.IDS),
    "vision": lambda: models.shapes(models.VisionTransformer(), IMAGES),
    "nnx": lambda: jax.eval_shape(lambda: nnx.state(models.NnxTransformer(nnx.Rngs(0)), nnx.Param)),
    "cnn": lambda: models.shapes(models.Cnn(), IMAGES),
    "mlp": lambda: models.shapes(models.Mlp(), np.zeros((2, 20), np.float32)),
}
TREE_OF: dict[str, Any] = {}


def tree(name: str) -> Any:
    if name not in TREE_OF:
        TREE_OF[name] = TREES[name]()
    return TREE_OF[name]


def specs_of(params: Any, shards: int = 2, rules: Any = None) -> dict[str, Any]:
    plan = plan_sharding(params, {"data": 2, "model": shards}, rules)
    return {each.path: each.spec for each in plan.parameters}


def below(specs: dict[str, Any], module: str) -> dict[str, Any]:
    return {path.removeprefix(f"{module}/"): spec for path, spec in specs.items() if path.startswith(f"{module}/")}


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)


# -------------------------------------------------------------------------------------------------------- transformers


def test_gpt2_with_transposed_and_fused_kernels() -> None:
    specs = specs_of(tree("gpt2"))
    assert below(specs, "h/1") == {
        "attn/c_attn/kernel": ROW,  # stored as (outputs, inputs)
        "attn/c_attn/bias": P("model"),
        "attn/c_proj/kernel": COLUMN,
        "attn/c_proj/bias": WHOLE,
        "mlp/c_fc/kernel": ROW,
        "mlp/c_fc/bias": P("model"),
        "mlp/c_proj/kernel": COLUMN,
        "mlp/c_proj/bias": WHOLE,
        **{f"ln_{number}/{name}": WHOLE for number in (1, 2) for name in ("scale", "bias")},
    }
    assert specs["wte/embedding"] == specs["wpe/embedding"] == ROW


@pytest.mark.parametrize("name", ["llama", "llama_grouped"])
def test_llama(name: str) -> None:
    specs = specs_of(tree(name))
    kernels = {path.split("/")[1]: spec for path, spec in below(specs, "layers_0").items() if path.endswith("kernel")}
    assert kernels == dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), COLUMN) | {
        "o_proj": ROW,
        "down_proj": ROW,
    }
    assert specs["embed_tokens/embedding"] == ROW and specs["lm_head/kernel"] == COLUMN
    assert specs["layers_0/input_layernorm/weight"] == specs["norm/weight"] == WHOLE


def test_stacked_layers_keep_their_leading_dimension_whole() -> None:
    stacked = below(specs_of(tree("llama_scanned")), "layers")
    one = below(specs_of(tree("llama")), "layers_0")
    assert {path: spec[1:] if spec else () for path, spec in stacked.items()} == {
        path: tuple(spec) for path, spec in one.items()
    }
    assert all(spec[0] is None for spec in stacked.values() if spec)


def test_t5_with_cross_attention_and_heads_of_another_width() -> None:
    specs = specs_of(tree("t5"))
    attention = {"q/kernel": COLUMN, "k/kernel": COLUMN, "v/kernel": COLUMN, "o/kernel": ROW}
    assert below(specs, "decoder_1/EncDecAttention") == below(specs, "decoder_1/SelfAttention") == attention
    assert below(specs, "decoder_1/DenseReluDense") == {"wi/kernel": COLUMN, "wo/kernel": ROW}
    assert specs["decoder_0/SelfAttention/relative_attention_bias/embedding"] == WHOLE
    assert specs["shared/embedding"] == ROW


def test_bert_with_attention_in_two_modules() -> None:
    specs = specs_of(tree("bert"))
    layer = {path: spec for path, spec in below(specs, "layer/0").items() if "LayerNorm" not in path}
    assert layer == {
        **{f"attention/self/{name}/kernel": COLUMN for name in ("query", "key", "value")},
        **{f"attention/self/{name}/bias": P("model") for name in ("query", "key", "value")},
        "attention/output/dense/kernel": ROW,
        "attention/output/dense/bias": WHOLE,
        "intermediate/dense/kernel": COLUMN,
        "intermediate/dense/bias": P("model"),
        "output/dense/kernel": ROW,
        "output/dense/bias": WHOLE,
    }
    assert specs["pooler/kernel"] == COLUMN and specs["pooler/bias"] == P("model")
    assert specs["classifier/kernel"] == ROW  # 3 classes do not divide
    assert specs["word_embeddings/embedding"] == specs["position_embeddings/embedding"] == ROW


@pytest.mark.parametrize(("name", "block"), [("vision", "layers/0"), ("nnx", "blocks/0")])
def test_attention_of_flax_is_sharded_by_heads(name: str, block: str) -> None:
    specs = below(specs_of(tree(name)), block)
    for each in ("query", "key", "value"):
        assert specs[f"attention/{each}/kernel"] == P(None, "model", None)
        assert specs[f"attention/{each}/bias"] == P("model", None)
    assert specs["attention/out/kernel"] == P("model", None, None) and specs["attention/out/bias"] == WHOLE
    assert specs["up/kernel"] == COLUMN and specs["down/kernel"] == ROW


def test_heads_that_do_not_divide_are_cut_inside() -> None:
    specs = below(specs_of(tree("nnx"), shards=8), "blocks/0/attention")
    assert specs["query/kernel"] == P(None, None, "model") and specs["out/kernel"] == P(None, "model", None)
    assert specs["query/bias"] == P(None, "model")


def test_parts_of_another_width_have_a_stream_of_their_own() -> None:
    def block(width: int, inner: int) -> Any:
        return {
            "norm": array(width),
            "up": array(width, inner),
            "down": array(inner, width),
            "gate": array(width, inner),
        }

    params = {
        "image": {"first": block(24, 16), "second": block(24, 16)},
        "text": [block(32, 48) for _ in range(6)],
    }
    specs = specs_of(params)
    assert (
        below(specs, "image/second")
        == below(specs, "text/3")
        == {
            "norm": WHOLE,
            "up": COLUMN,
            "gate": COLUMN,
            "down": ROW,
        }
    )


# ----------------------------------------------------------------------------------------------- vocabularies and sizes


def test_vocabulary_that_does_not_divide_is_stored_by_width_and_used_by_rows() -> None:
    plan = plan_sharding(models.shapes(models.Gpt2(vocabulary=97), models.IDS), {"data": 2, "model": 2})
    (table,) = (each for each in plan.parameters if each.path == "wte/embedding")
    assert (table.spec, table.used_spec) == (COLUMN, ROW)
    assert "97 does not divide by 2" in table.reason


def test_bias_of_an_output_layer_that_does_not_divide_is_whole() -> None:
    params = models.shapes(models.Bert(classes=97), models.IDS)
    assert specs_of(params)["classifier/kernel"] == ROW and specs_of(params)["classifier/bias"] == WHOLE


def test_small_tables_with_fewer_rows_than_shards_are_replicated() -> None:
    plan = plan_sharding(tree("bert"), {"data": 2, "model": 4})
    small = {each.path: each.reason for each in plan.parameters if each.reason.startswith("small")}
    assert small == {
        "classifier/kernel": "small, and 3 does not divide by 4",
        "token_type_embeddings/embedding": "small, and 2 does not divide by 4",
    }


def test_nothing_is_sharded_for_one_model_shard() -> None:
    assert set(specs_of(tree("gpt2"), shards=1).values()) == {WHOLE}


def test_kernel_that_does_not_divide_at_all_is_replicated_with_the_reason() -> None:
    plan = plan_sharding({"a": {"kernel": array(9, 15), "bias": array(15)}}, {"data": 1, "model": 2})
    assert [each.spec for each in plan.parameters] == [WHOLE, WHOLE]
    assert "neither 9 nor 15 divides by 2" in str(plan)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", TREES)
def test_each_device_holds_its_part_of_the_bytes(name: str, shards: int) -> None:
    params = tree(name)
    plan = plan_sharding(params, {"data": 2, "model": shards})
    leaves = jax.tree.leaves(params)
    total = sum(leaf.size * 4 for leaf in leaves)
    shardable = sum(leaf.size * 4 for leaf in leaves if any(size % shards == 0 for size in leaf.shape))
    assert plan.bytes_per_device <= total / shards + 0.02 * shardable


# ------------------------------------------------------------------------------------------------ MLPs, CNNs, plain trees


def test_mlp_alternates_between_outputs_and_inputs() -> None:
    assert specs_of(tree("mlp")) == {
        "Dense_0/kernel": COLUMN,
        "Dense_0/bias": P("model"),
        "Dense_1/kernel": ROW,
        "Dense_1/bias": WHOLE,
        "Dense_2/kernel": COLUMN,
        "Dense_2/bias": P("model"),
    }
    assert specs_of(tree("mlp"), shards=8)["Dense_2/kernel"] == ROW  # 4 outputs do not divide


def test_mlp_of_one_width_alternates_in_the_order_of_numbers() -> None:
    params = models.shapes(models.Mlp((16,) * 12), np.zeros((2, 16), np.float32))
    specs = specs_of(params)
    assert [specs[f"Dense_{number}/kernel"] for number in range(12)] == [COLUMN, ROW] * 6


def test_cnn_alternates_between_outputs_and_inputs() -> None:
    specs = specs_of(tree("cnn"))
    assert specs["Conv_0/kernel"] == P(None, None, None, "model") and specs["Conv_0/bias"] == P("model")
    assert specs["Conv_1/kernel"] == P(None, None, "model", None) and specs["Conv_1/bias"] == WHOLE
    assert specs["Dense_0/kernel"] == COLUMN and specs["Dense_1/kernel"] == ROW


def test_plain_lists_and_flat_dicts() -> None:
    layers = [{"w": array(6, 16), "b": array(16)}, {"w": array(16, 8), "b": array(8)}]
    assert specs_of(layers) == {"0/w": COLUMN, "0/b": P("model"), "1/w": ROW, "1/b": WHOLE}
    flat = {"w1": array(6, 16), "b1": array(16), "w2": array(16, 6), "b2": array(6)}
    assert specs_of(flat) == {"w1": COLUMN, "b1": P("model"), "w2": ROW, "b2": WHOLE}


def flat_block(**more: Any) -> dict[str, Any]:
    return {
        "norm1": array(16),
        "norm2": array(16),
        "wq": array(16, 16),
        "wk": array(16, 16),
        "wv": array(16, 16),
        "wo": array(16, 16),
        "w_in": array(16, 48),
        "w_out": array(48, 16),
    } | more


def test_transformer_of_plain_dicts() -> None:
    specs = specs_of({"embed": array(64, 16), "blocks": [flat_block(), flat_block()], "norm": array(16)})
    assert below(specs, "blocks/1") == dict.fromkeys(("wq", "wk", "wv", "w_in"), COLUMN) | {
        "wo": ROW,
        "w_out": ROW,
        "norm1": WHOLE,
        "norm2": WHOLE,
    }


# ---------------------------------------------------------------------------------------------------------------- names


def attention(names: list[str], biases: list[str] = [], leaf: str = "kernel") -> Any:  # noqa: B006
    layers = {name: {leaf: array(16, 16)} | ({"bias": array(16)} if name in biases else {}) for name in names}
    mlp = {"a": {leaf: array(16, 64)}, "b": {leaf: array(64, 16)}}
    return {"block": {"attention": layers, "mlp": mlp, "norm": {"scale": array(16)}}}


def rows_of(params: Any, row: Any = ROW) -> set[str]:
    specs = below(specs_of(params), "block/attention")
    return {path.split("/")[0] for path, spec in specs.items() if spec == row}


@pytest.mark.parametrize(
    ("names", "out"),
    [
        (["q_proj", "k_proj", "v_proj", "o_proj"], "o_proj"),
        (["query", "key", "value", "out"], "out"),
        (["to_q", "to_k", "to_v", "to_out"], "to_out"),
        (["output_query", "output_key", "output_value", "output"], "output"),
        (["queryProj", "keyProj", "valueProj", "outProj"], "outProj"),
        (["query", "key", "value", "mixed"], "mixed"),
        (["down_sample", "output_query", "key", "value"], "down_sample"),
    ],
)
def test_names_decide_by_whole_words_where_shapes_do_not(names: list[str], out: str) -> None:
    assert rows_of(attention(names)) == {out}


def test_biases_decide_before_names() -> None:
    assert rows_of(attention(["out", "key", "value", "last"], ["last"])) == {"last"}
    assert rows_of(attention(["a", "b", "c", "d"], ["b", "c", "d"])) == {"a"}
    assert rows_of(attention(["q", "k", "v", "out"], ["q", "v", "out"])) == {"out"}  # Whisper: its key has no bias


def test_storage_as_outputs_and_inputs_is_found_from_biases_and_siblings() -> None:
    params = attention(["q", "k", "v", "o"])
    params["block"]["mlp"] = {"a": {"kernel": array(64, 16), "bias": array(64)}, "b": {"kernel": array(16, 64)}}
    assert rows_of(params, COLUMN) == {"o"}
    gated = attention(["q", "k", "v", "o"])
    gated["block"]["mlp"] = {"a": array(64, 16), "b": array(16, 64), "c": array(64, 16)}
    assert rows_of(gated, COLUMN) == {"o"}
    assert rows_of(attention(["q", "k", "v", "o"], leaf="weight"), COLUMN) == {"o"}


def renamed(params: Any, seed: int) -> tuple[Any, dict[str, str]]:
    """Give each module a name at random, the same one to a module wherever it is; return the old path of each new one."""
    chooser = random.Random(seed)
    names: dict[str, str] = {}

    def walk(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        is_leafy = {key: not isinstance(value, dict) for key, value in node.items()}
        for key in node:
            names.setdefault(key, "".join(chooser.choices("abcdefghijklmnoqrstuvwxyz", k=9)))
        items = [(key if is_leafy[key] else names[key], walk(value)) for key, value in node.items()]
        chooser.shuffle(items)
        return dict(items)

    new = walk(params)
    return new, {new_name: old for old, new_name in names.items()}


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "vision", "cnn", "mlp"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), shards=st.sampled_from([2, 4]))
def test_names_of_modules_do_not_matter_where_structure_decides(name: str, seed: int, shards: int) -> None:
    params, old_names = renamed(tree(name), seed)
    found = {
        "/".join(old_names.get(key, key) for key in path.split("/")): spec
        for path, spec in specs_of(params, shards).items()
    }
    assert found == specs_of(tree(name), shards)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 30, 32])
LEAVES = st.lists(SIZES, max_size=4).map(lambda sizes: array(*sizes))
NAMES = st.sampled_from("kernel bias scale w b query out 0 1 2 dense_1 dense_2".split())
ANY_TREE = st.recursive(
    LEAVES,
    lambda below: st.dictionaries(NAMES, below, min_size=1) | st.lists(below, min_size=1, max_size=3),
    max_leaves=14,
)


@settings(max_examples=150)
@given(params=ANY_TREE, shards=st.sampled_from([2, 3, 4, 8]))
def test_sharded_dimensions_divide_in_any_tree(params: Any, shards: int) -> None:
    plan = plan_sharding(params, {"data": 2, "model": shards})
    assert jax.tree.structure(plan.specs) == jax.tree.structure(params)
    for each in plan.parameters:
        axes = [axis for axis in each.spec if axis is not None]
        assert axes in ([], ["model"])
        assert all(size % shards == 0 for size, axis in zip(each.shape, each.spec, strict=False) if axis)
        assert each.reason


# ------------------------------------------------------------------------------------------------------------ own rules


def test_first_own_rule_that_matches_decides() -> None:
    rules = [("mlp/c_fc", P()), (r"mlp/.*/kernel$", ("model", None)), ("wte", P(("model", "data")))]
    specs = specs_of(tree("gpt2"), rules=rules)
    assert specs["h/0/mlp/c_fc/kernel"] == specs["h/0/mlp/c_fc/bias"] == WHOLE
    assert specs["h/0/mlp/c_proj/kernel"] == ROW and specs["wte/embedding"] == P(("model", "data"))
    assert specs["h/0/attn/c_attn/kernel"] == specs_of(tree("gpt2"))["h/0/attn/c_attn/kernel"]


def test_plan_as_rules_gives_the_same_plan() -> None:
    plan = plan_sharding(tree("t5"), {"data": 2, "model": 2})
    again = plan_sharding(tree("t5"), {"data": 2, "model": 2}, plan.rules)
    assert [each.spec for each in again.parameters] == [each.spec for each in plan.parameters]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            ("wte", P("modle")),
            "wte/embedding of shape (96, 32): the mesh has no axis 'modle'; its axes are data, model",
        ),
        (("wte", P("model", "model")), "wte/embedding of shape (96, 32): it names the axis 'model' twice"),
        (("ln_f/bias", P(None, "model")), "ln_f/bias of shape (32,): it has 2 entries for 1 dimensions"),
        (("wpe", ("data", "model")), "wpe/embedding of shape (8, 32): dimension 0 of size 8 does not divide by 5"),
        (("wtf", P("model")), "(\\'wtf\\', P(\\'model\\',)) matches no parameter".replace("\\", "")),
        (("(", P()), "does not begin with a regular expression"),
        (("wte", "model"), "is not a pair: give (regular expression, PartitionSpec or tuple)"),
    ],
)
def test_own_rule_that_does_not_fit_is_refused(rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        plan_sharding(tree("gpt2"), {"data": 5, "model": 2}, [rule])
    assert repr(rule[0]) in str(caught.value)


def test_table_shows_path_shape_spec_and_reason() -> None:
    rows = str(plan_sharding(tree("mlp"), {"data": 1, "model": 2})).splitlines()
    assert re.split(r"\s{2,}", rows[0]) == ["parameter", "shape", "spec", "why"]
    expected = ["Dense_0/kernel", "20x48", "-, model", "column parallel: begins a pair of a chain"]
    assert re.split(r"\s{2,}", rows[2]) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "params has no arrays"),
        ({"a": {"count": jax.ShapeDtypeStruct((), np.int32)}}, "a/count has dtype int32, which has no gradient"),
        ({"a": 3}, "a is of type int: give an array"),
    ],
)
def test_trees_that_cannot_be_trained_are_refused(params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_sharding(params, {"data": 1, "model": 2})


# ------------------------------------------------------------------------------------------------ the optimizer's state


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((8, 12), P(), P(None, "data")),  # the largest dimension
        ((8, 10), P(), P("data", None)),  # the largest that divides by 4
        ((8, 12), P(None, "model"), P("data", "model")),
        ((6, 16), P(None, "model"), P(None, ("model", "data"))),  # no other divides
        ((6, 12), P(None, "model"), P(None, "model")),
        ((8, 12), P("data"), P("data")),
        ((8, 12), P(("model", "data")), P(("model", "data"))),
        ((), P(), P()),
        ((0,), P(), P()),
        ((3,), P(), P()),
    ],
)
def test_state_is_divided_among_replicas_along_a_dimension_that_divides(shape: Any, spec: Any, expected: Any) -> None:
    mesh: Any = SimpleNamespace(shape={"data": 4, "model": 2})
    assert zero_spec(mesh, shape, spec) == expected
    alone: Any = SimpleNamespace(shape={"data": 1, "model": 2})
    assert zero_spec(alone, shape, spec) == spec

"""Sharding plans: which dimension of each parameter is sharded by its name, why, and which own rules are refused."""

from __future__ import annotations

import math
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

from raysgd.functions.sharding import ShardingRules, plan_sharding  # noqa: E402
from raysgd.functions.worker.train_state import zero_spec  # noqa: E402
from support import functions_models as models  # noqa: E402

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


def used_of(params: Any, shards: int = 2) -> dict[str, Any]:
    plan = plan_sharding(params, {"data": 2, "model": shards})
    return {each.path: (each.spec, each.used_spec) for each in plan.parameters}


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


# ----------------------------------------------------------------------------------------------- vocabularies and sizes


def test_vocabulary_that_does_not_divide_is_stored_by_width_and_used_by_rows() -> None:
    plan = plan_sharding(models.shapes(models.Gpt2(vocabulary=97), models.IDS), {"data": 2, "model": 2})
    (table,) = (each for each in plan.parameters if each.path == "wte/embedding")
    assert (table.spec, table.used_spec) == (COLUMN, ROW)
    assert "97 does not divide by 2" in table.reason


def test_output_layer_that_does_not_divide_is_used_in_padded_shards_if_it_is_large() -> None:
    params = models.shapes(models.Bert(classes=97), models.IDS)
    kernel, bias = (used_of(params)[f"classifier/{name}"] for name in ("kernel", "bias"))
    assert kernel == (ROW, COLUMN) and bias == (WHOLE, WHOLE)
    assert used_of(tree("bert"))["classifier/kernel"] == (ROW, WHOLE)  # 3 classes


def test_positions_types_and_patches_are_stored_in_shards_and_used_whole() -> None:
    used = used_of(tree("bert"), shards=4)
    assert used["position_embeddings/embedding"] == (ROW, WHOLE)
    assert used["token_type_embeddings/embedding"] == (COLUMN, WHOLE)  # 2 rows for 4 shards
    used = used_of(tree("vision"))
    assert used["patches/kernel"] == (P(None, None, None, "model"), WHOLE)
    assert used["positions"] == (P(None, None, "model"), WHOLE)


def test_nothing_is_sharded_for_one_model_shard() -> None:
    assert set(specs_of(tree("gpt2"), shards=1).values()) == {WHOLE}


def test_kernel_that_does_not_divide_at_all_is_replicated_with_the_reason() -> None:
    plan = plan_sharding({"a": {"kernel": array(9, 15), "bias": array(15)}}, {"data": 1, "model": 2})
    assert [each.spec for each in plan.parameters] == [WHOLE, WHOLE]
    assert "neither 15 nor 9 divides by 2" in str(plan)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", TREES)
def test_each_device_holds_its_part_of_the_bytes(name: str, shards: int) -> None:
    params = tree(name)
    plan = plan_sharding(params, {"data": 2, "model": shards})
    leaves = jax.tree.leaves(params)
    total = sum(leaf.size * 4 for leaf in leaves)
    shardable = sum(leaf.size * 4 for leaf in leaves if any(size % shards == 0 for size in leaf.shape))
    sharded = (math.prod(each.shape) * 4 // (shards if any(each.spec) else 1) for each in plan.parameters)
    assert sum(sharded) <= total / shards + 0.02 * shardable


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


def test_numbered_layers_alternate_in_the_order_of_numbers() -> None:
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


def layers(paths: str) -> Any:
    """Return a tree of layers with square kernels, from their paths, separated by blanks."""
    root: dict[str, Any] = {}
    for path in paths.split():
        node = root
        for key in path.split("/"):
            node = node.setdefault(key, {})
        node["kernel"] = array(16, 16)
    return root


@pytest.mark.parametrize(
    ("paths", "rows"),
    [
        ("attn/q_proj attn/k_proj attn/v_proj attn/o_proj", "attn/o_proj"),
        ("attention/to_q attention/to_k attention/to_v attention/to_out_0", "attention/to_out_0"),
        ("a/output_query a/outputKey a/down_sample a/outProj", "a/outProj"),  # whole words, the last one counts
        ("self_attention/query_key_value self_attention/dense", "self_attention/dense"),
        ("attn/qkv attn/proj patch_embed/proj", "attn/proj"),
        ("attn/Dense_0 attn/Dense_1 attn/Dense_2 attn/Dense_3", "attn/Dense_3"),
        ("attn/c_attn attn/c_proj mlp/c_fc mlp/c_proj", "attn/c_proj mlp/c_proj"),
        ("mlp/dense_h_to_4h mlp/dense_4h_to_h", "mlp/dense_4h_to_h"),
        ("ffn/w1 ffn/w2 ffn/w3", "ffn/w2"),  # gate, down, up
        ("mlp/wi_0 mlp/wi_1 mlp/wo", "mlp/wo"),
        ("fc1 fc2 fc10", "fc2"),
        ("ffn/lin1 ffn/lin2 out_lin", "ffn/lin2 out_lin"),
        ("intermediate/dense output/dense head", "output/dense"),
        ("mlp/fc_in mlp/fc_out", "mlp/fc_out"),
        ("mlp/~/linear_0 mlp/~/linear_1", "mlp/~/linear_1"),
        ("one two three", ""),  # names without a meaning
    ],
)
def test_row_parallel_layers_of_usual_families(paths: str, rows: str) -> None:
    specs = specs_of(layers(paths))
    assert {path.removesuffix("/kernel") for path, spec in specs.items() if spec == ROW} == {*rows.split()}
    assert {spec for path, spec in specs.items()} <= {ROW, COLUMN}


def test_storage_as_outputs_and_inputs_is_found_from_biases_and_torchs_name() -> None:
    layer = {"bias": array(48), "kernel": array(48, 16)}
    assert specs_of({"up": layer, "down": {"kernel": array(16, 16)}}) == {
        "up/kernel": ROW,
        "up/bias": P("model"),
        "down/kernel": COLUMN,
    }
    torch = {"up": {"weight": array(48, 16)}, "down": {"weight": array(16, 48)}, "norm": {"weight": array(16)}}
    assert specs_of(torch) == {"up/weight": ROW, "down/weight": COLUMN, "norm/weight": WHOLE}
    given = {"up": {"weight": array(16, 48), "bias": array(48)}, "down": {"weight": array(48, 16)}}
    assert specs_of(given) == {"up/weight": COLUMN, "up/bias": P("model"), "down/weight": ROW}


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


def test_own_rules_may_be_those_of_redco() -> None:
    rules = [(("mlp", "c_(fc|proj)", "kernel"), None), (("c_proj", ".*"), P()), (("embedding",), P("mp", "dp"))]
    specs = specs_of(tree("gpt2"), rules=rules)
    assert specs["h/0/mlp/c_fc/kernel"] == specs["h/1/attn/c_proj/kernel"] == WHOLE
    assert specs["wte/embedding"] == P("model", "data")
    assert specs["h/0/attn/c_attn/kernel"] == ROW
    with pytest.raises(ConfigError, match=r"\(\('c_', 'kernel'\), None\) matches no parameter"):  # whole keys
        specs_of(tree("gpt2"), rules=[(("c_", "kernel"), None)])


def test_plan_as_rules_gives_the_same_plan() -> None:
    plan = plan_sharding(tree("t5"), {"data": 2, "model": 2})
    again = plan_sharding(tree("t5"), {"data": 2, "model": 2}, list(ShardingRules(plan)))
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
    assert [re.split(r"\s{2,}", row) for row in rows[2:5]] == [
        ["Dense_0/kernel", "20x48", "-, model", "column parallel"],
        ["Dense_1/bias", "24", "replicated", "a bias of whole outputs"],
        ["Dense_1/kernel", "48x24", "model, -", "row parallel: layer 2 of 3"],
    ]


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

"""How blocks are divided among the stages of a pipeline."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.engine.pipeline.stages import balance, read_model
from raysgd.errors import ConfigError
from support.engine_models import build


def largest(sizes: list[int], parts: list[range], front: int, back: int) -> int:
    sums = [sum(sizes[at] for at in part) for part in parts]
    sums[0] += front
    sums[-1] += back
    return max(sums)


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    front=st.integers(0, 40),
    back=st.integers(0, 40),
    num_stages=st.integers(1, 8),
)
def test_largest_stage_is_as_small_as_possible(sizes: list[int], front: int, back: int, num_stages: int) -> None:
    num_stages = min(num_stages, len(sizes))
    found = balance(sizes, num_stages, front, back)
    assert [at for part in found for at in part] == list(range(len(sizes)))
    assert len(found) == num_stages and all(found)
    cuts = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), num_stages - 1))
    others = ([range(*ends) for ends in pairwise(cut)] for cut in cuts)
    assert largest(sizes, found, front, back) == min(largest(sizes, one, front, back) for one in others)


def test_stage_with_the_embedding_has_fewer_blocks() -> None:
    split = read_model(build("llama", num_blocks=6, vocabulary=960), 2)
    assert split.ties == () and {len(one) for one in split.blocks} == {3}
    tied = read_model(build("llama, biased and tied", num_blocks=6, vocabulary=960), 3)
    assert tied.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert [len(one) for one in tied.blocks] == [1, 4, 1]


@pytest.mark.parametrize("kind", ["t5", "encoder"])
def test_model_of_another_class_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel cannot split a"):
        read_model(build(kind), 2)


def test_more_stages_than_blocks_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel=3 needs as many blocks, and model\.layers has 2\."):
        read_model(build("llama"), 3)


def test_blocks_that_share_a_parameter_are_refused_by_name() -> None:
    model = build("gpt2")
    blocks = model.get_submodule("transformer.h")
    blocks[1].mlp = blocks[0].mlp  # type: ignore[index]
    with pytest.raises(
        ConfigError, match=r"share a parameter: transformer\.h\.0\.mlp\.c_fc\.weight, transformer\.h\.1"
    ):
        read_model(model, 2)

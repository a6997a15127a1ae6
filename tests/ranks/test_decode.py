"""Sharded tiny targets in two processes: the tokens of one process, and ranks that agree."""

import json

import pytest
from support.ranks import finish, start

pytestmark = pytest.mark.timeout(400)
DENSE = ("llama", "qwen2", "qwen3", "qwen3-untied", "qwen3_moe", "gpt_oss")
HYBRID = ("qwen3_5", "qwen3_5-untied", "qwen3_5_moe")
PIPELINED = ("qwen2", "qwen3_moe", "qwen3_5", "qwen3_next")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    kinds = [
        *DENSE,
        *HYBRID,
        "qwen3-wide:4",
        "qwen3_5-untied:4",
        *(f"{k}:pipeline" for k in PIPELINED),
    ]
    command = ["tests/ranks/decode_worker.py", *kinds]
    both = finish(start(tmp_path_factory.mktemp("ranks"), command, command), seconds=300)
    assert [status for status, _, _ in both] == [0, 0], both
    return [json.loads(out) for _, out, _ in both]


@pytest.mark.parametrize("kind", [*DENSE, *HYBRID])
def test_tokens_are_those_of_one_process(found, kind):
    for rank in found:
        runs = rank[f"{kind}:"]
        for name, (whole, sharded) in runs.items():
            assert whole == sharded, name
        tokens, (rounds, drafted, accepted) = runs["half"][1]
        assert len(tokens) == 14 and rounds >= 2 and 0 < accepted < drafted


@pytest.mark.parametrize("kind", ["qwen3-wide", "qwen3_5-untied"])
def test_quantized_shards(found, kind):
    """The sums of their slices round differently, so only the ranks have to agree."""
    first, second = (rank[f"{kind}:4"] for rank in found)
    assert first == second
    assert first["half"][0][0] == first["half"][1][0]
    assert first["vocab"][0] == first["vocab"][1]


@pytest.mark.parametrize("kind", PIPELINED)
def test_every_rank_refuses_a_pipelined_target(found, kind):
    for rank in found:
        assert "split over several machines" in rank[f"{kind}:pipeline"]


def test_ranks_that_disagree_are_told_with_both_values(found):
    first, second = (rank["disagree"] for rank in found)
    assert first == second
    assert first.startswith("The ranks differ in round 0 (accepted drafts and tokens): rank 0 has")
    assert "rank 1 has [[" in first

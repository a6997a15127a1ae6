"""The audit of a first difference, where the target's caches are rings."""

import mlx.core as mx
import pytest
from support.proposers import half
from support.tiny import VOCAB, make_model, plain_tokens

from mlx_dflash2.evaluation.parity import DIFFERENT, compare_tokens
from mlx_dflash2.generate import dflash_generate_step


@pytest.mark.parametrize("kind", ["gemma3_text", "muse_glimmer", "llama-sliding"])
def test_rings_in_sixteen_bits_make_ties_not_faults(kind):
    """A pass of several rows sums over keys in another order than single rows do."""
    found = []
    for seed in range(6):
        model = make_model(kind)
        model.set_dtype(mx.bfloat16)
        prompt = mx.random.randint(0, VOCAB, (5 + seed,), key=mx.random.key(seed)).tolist()
        plain = plain_tokens(model, prompt, 90)
        proposer = half(prompt + plain, VOCAB, 3)
        steps = dflash_generate_step(
            mx.array(prompt), model, proposer, max_tokens=90, verify_width=8
        )
        drafted = [token for token, _, _ in steps]
        found.append(compare_tokens(model, prompt, plain, drafted, 8))
    assert DIFFERENT not in [parity.verdict for parity in found], found


def test_a_wrong_token_of_a_ring_is_a_fault():
    model = make_model("gemma3_text")
    model.set_dtype(mx.bfloat16)
    plain = plain_tokens(model, [3, 4, 5], 60)
    logits = model(mx.array([[3, 4, 5, *plain[:50]]]))[0, -1].astype(mx.float32)
    worst = mx.argmin(logits).item()
    found = compare_tokens(model, [3, 4, 5], plain, [*plain[:50], worst], 8)
    assert found.verdict == DIFFERENT and found.index == 50

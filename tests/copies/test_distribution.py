"""Copied drafts and the drafter's own, as they come: the emitted tokens follow the target's law."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from support.tiny import make_drafter, make_model

from mlx_dflash2 import DFlashPromptCache, make_sampler
from mlx_dflash2.copies import CopyProposer
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step

V, DRAWS = 32, 4_000
# Whatever is drawn first, it stood after 7, 11 before, and two tokens followed it.
PROMPT = [x for t in range(V) for x in (7, 11, t, (5 * t + 1) % V, (3 * t) % V)] + [7, 11]


def law_of_the_drafted_tokens(model, sampling) -> np.ndarray:
    """[V * V]: the probability of each second and third token, over all first ones."""

    def rows(prompts):
        logits = model(mx.array(prompts))[:, -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return np.array(sampling.probs(logprobs, mx.random.key(0)), dtype=np.float64)

    first = rows([PROMPT])[0]
    second = rows([[*PROMPT, a] for a in range(V)])
    third = np.stack([rows([[*PROMPT, a, b] for b in range(V)]) for a in range(V)])
    return np.einsum("a,ab,abc->bc", first, second, third).flatten()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, drafter",
    [
        (dict(temp=0.7), False),
        (dict(temp=1.0, top_k=5), False),
        (dict(temp=1.5), False),
        (dict(temp=1.0, top_p=0.8), True),
        (dict(temp=1.5, min_p=0.02), True),
    ],
    ids=str,
)
def test_the_law_of_the_drafted_tokens(settings, drafter):
    model = make_model("qwen3-vocab32")
    inner = make_drafter(vocab_size=V, mask_token_id=V - 1, block_size=4) if drafter else None
    sampling, stats, proposer = make_sampler(**settings), Stats(), CopyProposer(inner)
    session, seen = DFlashPromptCache(model, proposer), Counter()
    for seed in range(DRAWS):
        # What earlier draws taught about copies is forgotten; the prompt stays processed.
        session.context = proposer.make_context()
        steps = dflash_generate_step(
            session.reuse(PROMPT), model, proposer, prompt_cache=session, max_tokens=4,
            sampler=sampling, seed=seed, stats=stats,
        )  # fmt: skip
        seen[tuple(token for token, _, _ in steps)[1:3]] += 1
    law = law_of_the_drafted_tokens(model, sampling)
    found = np.zeros_like(law)
    for (a, b), count in seen.items():
        found[a * V + b] = count / DRAWS
    assert found[law == 0].sum() == 0
    variance = law * (1 - law) / DRAWS
    expected = 0.5 * np.sqrt(2 / np.pi * variance).sum()
    sigma = 0.5 * np.sqrt((1 - 2 / np.pi) * variance.sum())
    assert 0.5 * np.abs(found - law).sum() < expected + 3 * sigma
    assert 0 < stats.copies_accepted < stats.copied
    assert drafter == (stats.copied < stats.drafted)

"""The loop on a vocabulary of 32: drafted tokens follow the law that the target enumerates."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from support.proposers import Stub
from support.tiny import make_drafter, make_model

from mlx_dflash2 import make_logits_processors, make_sampler
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step

V, DRAWS, PROMPT = 32, 4_000, [3, 7, 11]


def law_of_the_drafted_tokens(model, sampling, processors) -> np.ndarray:
    """[V * V]: the probability of each second and third token, over all first ones."""

    def rows(prompts):
        logits = model(mx.array(prompts))[:, -1]
        for process in processors:
            each = zip(prompts, logits, strict=True)
            logits = mx.concatenate([process(mx.array(p), row[None]) for p, row in each])
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return np.array(sampling.probs(logprobs, mx.random.key(0)), dtype=np.float64)

    first = rows([PROMPT])[0]
    second = rows([[*PROMPT, a] for a in range(V)])
    third = rows([[*PROMPT, a, b] for a in range(V) for b in range(V)]).reshape(V, V, V)
    return np.einsum("a,ab,abc->bc", first, second, third).flatten()


def one_hot(position, count):
    return [(5 * position + i) % V for i in range(count)]


DRAFTERS = {
    "selector": lambda: make_drafter(vocab_size=V, mask_token_id=V - 1, block_size=4),
    "one-hot": lambda: Stub(one_hot, block_size=4),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, drafter, penalties",
    [
        (dict(temp=0.7), "selector", {}),
        (dict(temp=1.0), "selector", dict(repetition_penalty=1.5, presence_penalty=1.0)),
        (dict(temp=1.0, top_k=5), "selector", {}),
        (dict(temp=1.0, top_p=0.8), "one-hot", {}),
        (dict(temp=1.5), "one-hot", {}),
    ],
    ids=str,
)
def test_the_law_of_the_drafted_tokens(settings, drafter, penalties):
    model, draft_model = make_model("qwen3-vocab32"), DRAFTERS[drafter]()
    sampling, stats = make_sampler(**settings), Stats()
    processors = make_logits_processors(**penalties)
    seen = Counter()
    for seed in range(DRAWS):
        steps = dflash_generate_step(
            mx.array(PROMPT), model, draft_model, max_tokens=4, sampler=sampling, seed=seed,
            stats=stats, logits_processors=processors,
        )  # fmt: skip
        seen[tuple(token for token, _, _ in steps)[1:3]] += 1
    law = law_of_the_drafted_tokens(model, sampling, processors)
    found = np.zeros_like(law)
    for (a, b), count in seen.items():
        found[a * V + b] = count / DRAWS
    assert found[law == 0].sum() == 0
    variance = law * (1 - law) / DRAWS
    expected = 0.5 * np.sqrt(2 / np.pi * variance).sum()
    sigma = 0.5 * np.sqrt((1 - 2 / np.pi) * variance.sum())
    variation = 0.5 * np.abs(found - law).sum()
    assert variation < expected + 3 * sigma
    assert 0 < stats.accepted < stats.drafted

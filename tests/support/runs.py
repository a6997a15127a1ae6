"""Runs of a tiny target under stub proposers, and the checks that each has to pass."""

from functools import cache

import mlx.core as mx

from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step
from support.proposers import half, liar, oracle, rand
from support.tiny import VOCAB, make_model, plain_tokens


@cache
def _model(kind, bits, seed):
    return make_model(kind, bits=bits, seed=seed)


def model_of(kind, bits=None, seed=0):
    """The same model object for the same arguments, however they are given."""
    return _model(kind, bits, seed)


@cache
def plain_of(kind, prompt: tuple, count=20, bits=None, seed=0):
    """What mlx-lm itself says to a prompt."""
    return plain_tokens(model_of(kind, bits, seed), list(prompt), count)


@cache
def prompt_and_plain(kind, length, count=34, bits=None):
    prompt = mx.random.randint(0, VOCAB, (length,), key=mx.random.key(length)).tolist()
    return prompt, plain_of(kind, tuple(prompt), count, bits)


def steps_of(kind, prompt, proposer, prompt_cache=None, bits=None, **kwargs):
    """The generator of a run with whole blocks, so that counts do not depend on times."""
    model = model_of(kind, bits)
    kwargs.setdefault("verify_width", kwargs.get("block_size") or proposer.block_size)
    return dflash_generate_step(
        mx.array(prompt), model, proposer, prompt_cache=prompt_cache, **kwargs
    )


def proposers(prompt, plain, block):
    text = prompt + plain
    named = {
        "oracle": oracle(text, block_size=block),
        "liar": liar(text, VOCAB, block_size=block),
        "rand": rand(7, VOCAB, block_size=block),
    }
    for k in {1, block // 2} - {0, block}:
        named[f"half{k}"] = half(text, VOCAB, k, block_size=block)
    return named


def widest(proposer, block_size=None):
    """The most rows that a block, or what is copied, may have."""
    return max(block_size or proposer.block_size, getattr(proposer, "max_drafts", 0) + 1)


def run(kind, prompt, proposer, max_tokens, bits=None, **kwargs):
    """The tokens of a whole run, each with whether it was drafted, and its stats."""
    stats = Stats()
    if kwargs.get("verify_width") is None:
        kwargs["verify_width"] = widest(proposer, kwargs.get("block_size"))
    steps = steps_of(
        kind, prompt, proposer, bits=bits, max_tokens=max_tokens, stats=stats, **kwargs
    )
    return [(token, from_draft) for token, _, from_draft in steps], stats


def check_counts(steps, stats, name, block):
    """The counters agree with the tokens, and the run was not a run without drafts."""
    assert stats.generation_tokens == len(steps)
    assert stats.prefills + stats.accepted + stats.bonus == len(steps)
    assert stats.accepted == sum(from_draft for _, from_draft in steps)
    assert stats.accepted == sum(stats.accepted_at) and stats.drafted == sum(stats.drafted_at)
    assert stats.rounds == stats.bonus and stats.fallback is None
    if block > 1 and len(steps) > block + 1:
        assert stats.drafted > 0
        if name == "oracle":
            assert stats.accepted == stats.drafted > 0
        if name == "liar":
            assert stats.accepted == 0 and stats.rounds == len(steps) - 1
        if name.startswith("half") and name != f"half{block - 1}":
            assert 0 < stats.accepted < stats.drafted

"""One rank: decodes whole and sharded tiny targets, and prints what came out as JSON."""

import json
import sys
from collections.abc import Callable, Iterator

import mlx.core as mx
from support.drafters import V2
from support.proposers import half
from support.tiny import CONFIGS, VOCAB, make_model, plain_tokens, random_drafter

from mlx_dflash2 import Stats, make_sampler
from mlx_dflash2.decode.generate import generate_tokens
from mlx_dflash2.decode.options import GenerationOptions
from mlx_dflash2.targets import bind

# Sharded halves of quantized matrices have to be divisible by the group size.
CONFIGS["qwen3-wide"] = CONFIGS["qwen3"] | {"intermediate_size": 128}
_UNTIED = {"tie_word_embeddings": False, "intermediate_size": 128}
CONFIGS["qwen3_5-untied"] = {"text_config": CONFIGS["qwen3_5"]["text_config"] | _UNTIED}
PROMPT, COUNT = [5, 9, 12, 77, 3, 41, 8, 19, 200, 301, 7], 14


def tokens(model, proposer, **how) -> tuple[list[int], list[int]]:
    stats = Stats()
    how = {"verify_width": 8} | how
    options = GenerationOptions(max_tokens=COUNT, check_ranks=True, **how)
    steps = generate_tokens(mx.array(PROMPT), model, proposer, options, stats=stats)
    found = [token for token, _, _ in steps]
    return found, [stats.rounds, stats.drafted, stats.accepted]


def split(kind: str, group, bits=None):
    model = make_model(kind, bits=bits)
    model.shard(group)
    mx.eval(model.parameters())
    return model


def compare(kind: str, group, bits: int | None = None) -> dict:
    """Greedy and sampled runs of both, and of a proposer that is right for three drafts."""
    whole, sharded = make_model(kind, bits=bits), split(kind, group, bits)
    text = PROMPT + plain_tokens(whole, PROMPT, COUNT)
    mx.random.seed(2)
    drafter = random_drafter(V2)
    sampling = {"sampler": make_sampler(temp=1.0, top_k=20), "seed": 3}
    runs: dict[str, Callable] = {
        "greedy": lambda model: tokens(model, drafter),
        "half": lambda model: tokens(model, half(text, VOCAB, 3)),
        "sampled": lambda model: tokens(model, drafter, **sampling),
    }
    if kind in ("qwen3", "qwen3_5"):
        runs["adaptive"] = lambda model: tokens(model, half(text, VOCAB, 3), verify_width=None)[0]
    return {name: [run(whole), run(sharded)] for name, run in runs.items()} | {
        "vocab": [bind(whole).vocab_size, bind(sharded).vocab_size]
    }


def disagree(kind: str, group) -> str:
    """A seed of each rank's own."""
    sharded = split(kind, group)
    mx.random.seed(2)
    how = {"sampler": make_sampler(temp=1.0), "seed": group.rank()}
    try:
        tokens(sharded, random_drafter(V2), **how)
    except ValueError as error:
        return str(error)
    return ""


def pipelined(kind: str, group) -> str:
    model = make_model(kind)
    model.model.pipeline(group)
    try:
        bind(model)
    except ValueError as error:
        return str(error)
    return ""


def results(group) -> Iterator[tuple[str, object]]:
    for kind in sys.argv[1:]:
        kind, _, bits = kind.partition(":")
        if bits == "pipeline":
            yield f"{kind}:{bits}", pipelined(kind, group)
        else:
            yield f"{kind}:{bits}", compare(kind, group, int(bits) if bits else None)
    yield "disagree", disagree("qwen3", group)


if __name__ == "__main__":
    print(json.dumps(dict(results(mx.distributed.init(strict=True)))))

"""Compare two paths through a drafter's candidates: the greedy walk, and what is expected best.

    python tools/walks.py FOLDER

The greedy walk takes the best step at each position. The other path has the highest expected
number of accepted drafts, V(s) = max_c q(c | s) (1 + V(c)), backward over the block, where q is a
softmax of the pair scores: what the drafter believes of the target's next token. It is a choice for
greedy targets alone. Above temperature 0 drafts are drawn from q, which keeps more of them than
any single path; a path that is not drawn would have to count as certain.

FOLDER keeps the target's answers to the 110 held-out prompts; the rounds are counted on them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_dflash2.train.chain import count_rounds

from mlx_dflash2 import embedded, load_drafter
from mlx_dflash2.drafter.logits import best_tokens, transform
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.embedded.target import NAME
from mlx_dflash2.evaluation.prompts import encode
from mlx_dflash2.targets import Target, bind
from mlx_dflash2.train.blocks import run_blocks
from mlx_dflash2.train.corpus import Corpus
from mlx_dflash2.train.data import write_answers
from mlx_dflash2.train.evaluate import interval
from mlx_dflash2.train.prompts import built_in
from mlx_dflash2.train.taps import ComputedTaps, padded_tokens

RESULTS = Path(__file__).parents[1] / "examples" / "results" / "walks.json"
ANCHORS = 32


def greedy(steps: np.ndarray) -> np.ndarray:
    """The best step at each position; ``steps`` [N, L, K, K] are q, choices [N, L]."""
    return _follow(steps.argmax(axis=-1))


def expected(steps: np.ndarray) -> np.ndarray:
    """The path with the highest expected number of accepted drafts; otherwise as :func:`greedy`."""
    value, best = np.zeros(steps.shape[::2][:2]), np.zeros(steps.shape[:3], int)
    for position in reversed(range(steps.shape[1])):
        values = steps[:, position] * (1 + value[:, None, :])
        best[:, position], value = values.argmax(axis=-1), values.max(axis=-1)
    return _follow(best)


def _follow(best: np.ndarray) -> np.ndarray:
    """Choices [N, L] from the best step [N, L, K] after each candidate, the first after any."""
    choices, chosen = [], np.zeros(len(best), int)
    for position in range(best.shape[1]):
        chosen = best[np.arange(len(best)), position, chosen]
        choices.append(chosen)
    return np.stack(choices, axis=1)


def steps_of(scores: np.ndarray) -> np.ndarray:
    """q(c | s) from pair scores."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def leading(drafter: Drafter, target: Target, corpus: Corpus, text: int) -> np.ndarray:
    """Leading right drafts at each anchor of an answer, by each rule: [anchors, 3]."""
    tokens, start, _ = corpus[text]
    taps = ComputedTaps(target, corpus, drafter.target_layer_ids, final=False)
    shown = taps.read([text], len(tokens)).taps
    padded = mx.array(padded_tokens(corpus, [text], len(tokens))).astype(mx.int32)
    return np.concatenate(list(_at_anchors(drafter, target, padded, shown, start)))


def _at_anchors(
    drafter: Drafter, target: Target, tokens: mx.array, taps: mx.array, start: int
) -> Iterator[np.ndarray]:
    args, length, size = drafter.args, drafter.block_size - 1, tokens.shape[1]
    for first in range(start, size - 1, ANCHORS):
        anchors = mx.arange(first, min(first + ANCHORS, size - 1))
        hidden = run_blocks(drafter, target, tokens, taps, anchors[None])[0]
        logits = drafter.head(target, hidden)
        unary, ids = best_tokens(logits, args.selector_top_k, args)
        scores = drafter.candidate_selector.pair_scores(tokens[0][anchors], hidden, ids, unary)
        # The share of the drafter's probability that its candidates have.
        share = unary.logsumexp(axis=-1) - transform(logits, args).logsumexp(axis=-1)
        at = anchors[:, None] + mx.arange(1, length + 1)
        truth = mx.where(at < size, tokens[0][mx.minimum(at, size - 1)], -1)
        steps = steps_of(np.array(scores))
        shared = steps * np.exp(np.array(share))[..., None, None]
        paths = greedy(steps), expected(steps), expected(shared)
        right = [np.take_along_axis(np.array(ids), p[..., None], -1)[..., 0] for p in paths]
        hits = [ids_of_path == np.array(truth) for ids_of_path in right]
        yield np.stack([np.cumprod(hit, axis=1).sum(axis=1) for hit in hits], axis=1)


def compare(drafter: Drafter, target: Target, corpus: Corpus) -> dict[str, Any]:
    """Count the rounds of all answers by each rule.

    Returns:
        dict: By rule the ``acceptance_length`` of the rounds and of all ``anchors``, and the
        ``gain`` over the greedy walk with ``gain_interval``, 90 %, paired over prompts.
    """
    texts = [t for t in range(len(corpus)) if len(corpus[t][0]) - corpus[t][1] > 1]
    counts = [leading(drafter, target, corpus, text) for text in texts]
    lengths = np.array([len(corpus[text][0]) - corpus[text][1] for text in texts])
    pairs = list(zip(counts, lengths, strict=True))
    rounds = np.array([[count_rounds(c, n) for c in count.T] for count, n in pairs])
    every = np.concatenate(counts)
    found = {}
    for rule, name in enumerate(("greedy", "expected", "expected, candidates' share")):
        found[name] = {
            "acceptance_length": float((lengths - 1).sum() / rounds[:, rule].sum()),
            "anchors": float(1 + every[:, rule].mean()),
            "gain": float(rounds[:, 0].sum() / rounds[:, rule].sum() - 1),
            "gain_interval": [x - 1 for x in interval(rounds[:, 0], rounds[:, rule])],
        }
    return {"prompts": len(texts), "num_anchors": len(every), "rules": found}


def main(folder: Path) -> None:
    """Write and print the comparison on the embedded pair."""
    model, tokenizer, *_ = mlx_lm.load(str(embedded.target_path()))
    drafter = load_drafter(embedded.drafter_path())
    prompts = encode(built_in("held_out", seed=0, count=110), tokenizer)
    options: dict[str, Any] = {"name": NAME, "max_tokens": 96, "batch_size": 55}
    corpus = write_answers(model, tokenizer, prompts, folder / "held_out", **options)
    found = compare(drafter, bind(model), corpus)
    text = json.dumps(found, indent=1) + "\n"
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/walks.py FOLDER")
    main(Path(sys.argv[1]))

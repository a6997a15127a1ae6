"""The golden cases: tiny drafters with what the published reference computes for them."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_dflash2.checkpoint.load import load_drafter

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.name.startswith("dflash"))


class HeadTarget:
    """Stands in for a target: only its embedding and its head."""

    def __init__(self, case: str):
        weights = mx.load(str(GOLDEN / "heads" / f"{case}.safetensors"))
        self.embedding, self.head_weight = weights["embed_tokens.weight"], weights["lm_head.weight"]
        self.vocab_size = self.head_weight.shape[0]

    def embed(self, tokens: mx.array) -> mx.array:
        return self.embedding[tokens]

    def head(self, hidden: mx.array) -> mx.array:
        return hidden @ self.head_weight.T


def rounds(case: str):
    """Each round's arrays: taps, anchor, block, hidden, logits, candidates, path."""
    data = np.load(GOLDEN / case / "expected.npz")
    for r in range(len(data["rounds"])):
        prefix = f"r{r}_"
        yield {k.removeprefix(prefix): data[k] for k in data.files if k.startswith(prefix)}


def drafted(drafter, target, golden):
    anchor, block = int(golden["anchor"]), int(golden["block"])
    ids = mx.array([[anchor] + [drafter.args.mask_token_id] * (block - 1)])
    return mx.array([anchor]), target.embed(ids), block


def check_rounds(case: str):
    """Compare a golden drafter's rounds with the reference's hidden rows, candidates and paths."""
    drafter, target = load_drafter(GOLDEN / case, bits=16), HeadTarget(case)
    context, position = drafter.make_context(), 0
    for golden in rounds(case):
        taps = mx.array(golden["taps"])
        drafter.extend(context, mx.zeros(taps.shape[1]), taps, position)
        position += taps.shape[1]
        anchor, embedded, block = drafted(drafter, target, golden)
        hidden = drafter(embedded, context)
        np.testing.assert_allclose(np.array(hidden), golden["hidden"], atol=2e-4)
        if drafter.args.has_selector:
            path = drafter.candidate_selector(anchor, hidden, target.head(hidden))
            np.testing.assert_array_equal(np.array(path.candidates), golden["candidates"])
        proposal = drafter.propose(target, anchor, context, block)
        np.testing.assert_array_equal(np.array(proposal.tokens)[None], golden["path"])
        assert proposal.finite.item()

"""The golden cases: tiny drafters with what the published reference computes for them."""

from pathlib import Path

import mlx.core as mx
import numpy as np

GOLDEN = Path(__file__).parent / "data" / "golden"
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

"""A drafter of one's own: it proposes what followed the anchor where it stood before."""

from typing import Any

import mlx.core as mx

from mlx_dflash2 import Proposal, Stats, embedded, generate, load


class PromptLookup:
    """Implements ``mlx_dflash2.Proposer``; its context is a list of token ids."""

    block_size, target_layer_ids, context_size = 4, (), None  # no hidden states, all tokens

    def make_context(self) -> list[int]:
        return []

    def extend(self, context: Any, tokens: mx.array, taps: Any, position: int) -> None:
        context.extend(tokens.tolist())

    def propose(
        self, target: Any, anchor: mx.array, context: Any, block_size: int,
        temperature: float = 0.0, key: Any = None,
    ) -> Proposal:  # fmt: skip
        token = anchor.item()
        at = max((i for i, seen in enumerate(context) if seen == token), default=len(context))
        # None at all where the anchor is new: that round is a plain step.
        drafts = context[at + 1 : at + block_size]
        return Proposal(mx.array(drafts, mx.uint32), finite=mx.array(True))


model, tokenizer = load(str(embedded.target_path()))
prompt = "row, row, row your boat, row, row,"
stats = Stats()
drafter = PromptLookup()
text = generate(
    model, tokenizer, prompt, draft_model=drafter, max_tokens=12, verify_width=4, stats=stats
)
print(prompt, text)
print(f"{stats.accepted} of {stats.drafted} drafts accepted in {stats.rounds} rounds")

"""A drafter of one's own: it proposes what followed the anchor where it stood before."""

import mlx.core as mx

from mlx_dflash2 import Stats, embedded, generate, load
from mlx_dflash2.drafter import Proposal


class PromptLookup:
    """Implements ``mlx_dflash2.drafter.Proposer``; its context is a list of token ids."""

    block_size = 4
    target_layer_ids = ()  # no hidden states of the target
    context_size = None  # all committed tokens

    def make_context(self):
        return []

    def extend(self, context, tokens, taps, position):
        context.extend(tokens.tolist())

    def propose(self, target, anchor, context, block_size, temperature=0.0, key=None):
        token = anchor.item()
        at = max((i for i, seen in enumerate(context) if seen == token), default=len(context))
        # None at all where the anchor is new: that round is a plain step.
        drafts = context[at + 1 : at + block_size]
        return Proposal(mx.array(drafts, mx.uint32), finite=mx.array(True))


model, tokenizer = load(str(embedded.target_path()))
prompt = "row, row, row your boat, row, row,"
stats = Stats()
drafter = PromptLookup()
options = {"max_tokens": 12, "verify_width": drafter.block_size, "stats": stats}
text = generate(model, tokenizer, prompt, draft_model=drafter, **options)
print(prompt, text)
print(f"{stats.accepted} of {stats.drafted} drafts accepted in {stats.rounds} rounds")

"""Proposers that replace only the proposal: what they draft is known, the loop is the real one."""

from dataclasses import dataclass, field

import mlx.core as mx

from mlx_dflash2.drafter.model import Proposal


@dataclass
class Seen:
    """The committed tokens that a proposer was shown, by position."""

    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        return max(self.tokens, default=-1) + 1


@dataclass
class Stub:
    """Drafts from a rule; ``rule(position, length)`` gives the tokens after an anchor."""

    rule: object
    block_size: int = 8
    target_layer_ids: tuple = ()
    context_size: int | None = None
    finite: bool = True
    calls: int = 0

    def make_context(self):
        return Seen()

    def extend(self, context, tokens, taps, position):
        assert position == context.offset or not context.tokens
        context.tokens |= {position + i: t for i, t in enumerate(tokens.tolist())}

    def propose(self, target, anchor, context, block_size, temperature=0.0, key=None):
        self.calls += 1
        tokens = self.rule(context.offset, block_size - 1)
        return Proposal(mx.array(tokens, dtype=mx.uint32), mx.array(self.finite))


def oracle(text, **kwargs):
    """Always right: ``text`` is the prompt and its plain continuation."""
    padded = list(text) + [0] * 64
    return Stub(lambda position, n: padded[position + 1 : position + 1 + n], **kwargs)


def liar(text, vocab, **kwargs):
    """Never right."""
    padded = [(t + 1) % vocab for t in text] + [0] * 64
    return Stub(lambda position, n: padded[position + 1 : position + 1 + n], **kwargs)


def half(text, vocab, k, **kwargs):
    """Right for ``k`` drafts, then wrong."""
    padded = list(text) + [0] * 64

    def rule(position, n):
        drafts = padded[position + 1 : position + 1 + n]
        return [t if i < k else (t + 1) % vocab for i, t in enumerate(drafts)]

    return Stub(rule, **kwargs)


def rand(seed, vocab, **kwargs):
    def rule(position, n):
        return mx.random.randint(0, vocab, (n,), key=mx.random.key(seed + position)).tolist()

    return Stub(rule, **kwargs)


class PerRow:
    """A stub for each prompt of a batch, in the order in which their contexts are made."""

    target_layer_ids, context_size = (), None

    def __init__(self, *stubs):
        self.stubs, self.block_size = list(stubs), stubs[0].block_size
        self.made = iter(self.stubs)

    def make_context(self):
        stub = next(self.made)
        return stub, stub.make_context()

    def extend(self, context, tokens, taps, position):
        stub, seen = context
        stub.extend(seen, tokens, taps, position)

    def propose(self, target, anchor, context, *args):
        stub, seen = context
        return stub.propose(target, anchor, seen, *args)

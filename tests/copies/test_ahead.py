"""Drafts that are begun while the caller works, beside copies."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from support.proposers import oracle
from support.runs import model_of, prompt_and_plain
from support.tiny import DENSE

from mlx_dflash2 import Stats
from mlx_dflash2.copies import CopyIndex, CopyProposer
from mlx_dflash2.decode.judge import Judge
from mlx_dflash2.decode.kv_quantization import KVQuantization
from mlx_dflash2.decode.loop import Loop


@pytest.mark.parametrize("repeats", [False, True], ids=["nothing to copy", "a copy"])
def test_the_drafter_begins_early_unless_there_is_a_copy(repeats):
    prompt, plain = prompt_and_plain(DENSE, 20, 34)
    text = prompt + plain
    drafter = oracle(text, block_size=4)
    drafted, propose = [], drafter.propose
    drafter.propose = lambda *args, **kwargs: drafted.append(1) or propose(*args, **kwargs)
    options = {"kv_quantization": KVQuantization(), "adaptive": False}
    loop = Loop(model_of(DENSE), CopyProposer(drafter), generation_stream, Stats(), **options)
    sequence = loop.open(Judge())
    if repeats:
        sequence.context.index, sequence.context.start = CopyIndex(text), -len(text)
    decision = loop.prefill(sequence, mx.array(prompt), 64)
    loop.draft_ahead([8])
    assert len(drafted) == (not repeats)
    decision.taken = 1
    decision = loop.next_round([sequence], sequence.caches, [8])[0]
    # The early draft is the one that is verified, and every token is in the index once.
    assert len(drafted) == (not repeats)
    assert decision.tokens == plain[1 : 1 + len(decision.tokens)]
    assert decision.num_accepted == (7 if repeats else 3)
    context = sequence.context
    assert context.index.tokens[-context.start :] == text[: len(prompt) + 1]
    decision.taken = len(decision.tokens)
    loop.close(sequence)

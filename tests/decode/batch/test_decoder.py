"""Answers come and go between the rounds of a batch, and none notices the others."""

from itertools import cycle, pairwise

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from support.proposers import PerRow, half
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_drafter, make_model, plain_tokens

from mlx_dflash2 import make_sampler
from mlx_dflash2.decode.batch.decoder import REMOVED, Answer, BatchDecoder
from mlx_dflash2.decode.controller import Controller
from mlx_dflash2.decode.judge import Judge
from mlx_dflash2.decode.kv_quantization import KVQuantization
from mlx_dflash2.decode.loop import Loop
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step

FIXTURES = (DENSE, HYBRID, SLIDING, "llama-sliding", "gemma4_text-shared")
PROMPTS = [[5, 9, 2, 7, 1] * 4, [8, 3, 3], [1, 2, 3, 4] * 8, [6] * 17]
COUNT = 30


def decoder_of(kind, keeps=False, batch_size=4, step_size=512, proposer=None, width=8):
    model = make_model(kind)
    plain = [plain_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    stubs = (half(text, VOCAB, k) for text, k in zip(texts, (1, 3, 2, 0), strict=True))
    loop = Loop(
        model,
        proposer or PerRow(*stubs),
        generation_stream,
        Stats(),
        kv_quantization=KVQuantization(),
        verify_width=width,
    )
    answers = [
        Answer(loop.open(Judge()), mx.array(prompt, mx.uint32), COUNT, keeps) for prompt in PROMPTS
    ]
    batch = BatchDecoder(loop, (), batch_size=batch_size, prefill_step_size=step_size)
    return batch, answers, plain


@pytest.mark.parametrize("kind", FIXTURES)
def test_answers_join_between_rounds(kind):
    batch, answers, plain = decoder_of(kind)
    batch.insert(answers[0])
    for _ in range(4):
        batch.step()
    batch.insert(answers[1])
    batch.insert(answers[2])
    batch.step()
    assert len(batch.active) == 3 and len(answers[0].tokens) < COUNT
    for _ in range(3):
        batch.step()
    batch.insert(answers[3])
    batch.run()
    assert [answer.tokens for answer in answers] == plain
    for answer in answers[:3]:
        assert answer.sequence.stats.accepted > 0
    stats = [answer.sequence.stats for answer in answers]
    total = batch.loop.stats
    assert [s.generation_tokens for s in stats] == [COUNT] * 4
    assert sum(s.drafted for s in stats) == total.drafted > total.accepted > 0
    assert sum(s.rounds for s in stats) == total.rounds > total.passes


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("kind", FIXTURES)
def test_answers_leave_between_rounds(kind, index):
    """Who is taken out keeps a cache of what it said; the others go on, alone in the end."""
    batch, answers, plain = decoder_of(kind, keeps=True)
    for answer in answers[:3]:
        batch.insert(answer)
    for _ in range(3):
        batch.step()
    others = [answer for answer in answers[:3] if answer is not answers[index]]
    batch.remove(answers[index])
    gone = answers[index]
    assert gone.finish_reason == REMOVED and 0 < len(gone.tokens) < COUNT
    batch.step()
    batch.remove(others[1])
    batch.run()
    assert others[0].tokens == plain[answers.index(others[0])]
    model = batch.loop.model
    for answer in answers[:3]:
        number = answers.index(answer)
        assert answer.tokens == plain[number][: len(answer.tokens)]
        fresh = make_prompt_cache(model)
        model(mx.array([PROMPTS[number] + answer.tokens]), cache=fresh)
        for step in ([3], [1, 2, 3], [4]):
            ours, theirs = (model(mx.array([step]), cache=c) for c in (answer.prompt_cache, fresh))
            assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()


def test_an_answer_that_is_alone_has_caches_of_its_own():
    batch, answers, _ = decoder_of(DENSE)
    kinds = []
    for answer in answers[:2]:
        batch.insert(answer)
        batch.step()
        kinds.append(type(batch.cache.layers[0]))
    batch.remove(answers[0])
    kinds.append(type(batch.cache.layers[0]))
    assert kinds == [KVCache, BatchKVCache, KVCache]
    batch.remove(answers[1])
    assert batch.cache.layers == [] and len(batch) == 0


def test_an_answer_is_removed_before_its_first_token():
    batch, answers, plain = decoder_of(DENSE, step_size=7)
    for answer in answers[:3]:
        batch.insert(answer)
    batch.step()
    batch.remove(answers[0])
    batch.remove(answers[2])
    assert 0 < answers[0].read < len(PROMPTS[0]) and answers[2].read == 0
    batch.run()
    assert [answer.tokens for answer in answers[:3]] == [[], plain[1], []]


def test_a_long_prompt_does_not_hold_up_the_others():
    """A chunk of it, then a round of theirs; the first token comes with the last chunk."""
    batch, answers, plain = decoder_of(DENSE, step_size=8)
    batch.insert(answers[1])
    batch.step()
    batch.step()
    batch.insert(answers[2])
    tokens, steps = [len(answers[1].tokens)], 0
    while not answers[2].tokens:
        batch.step()
        steps += 1
        tokens.append(len(answers[1].tokens))
    # 31 tokens in chunks of 8, and the last one in what the fourth leaves.
    assert steps == 4 and answers[2].read == 32
    assert all(later > earlier for earlier, later in pairwise(tokens))
    batch.run()
    assert [answer.tokens for answer in answers[1:3]] == plain[1:3]


def test_short_prompts_share_a_step():
    batch, answers, _ = decoder_of(DENSE, step_size=80)
    for answer in answers:
        batch.insert(answer)
    batch.step()
    assert all(answer.tokens for answer in answers) and not batch.waiting


def test_places_are_limited():
    batch, answers, plain = decoder_of(DENSE, batch_size=2)
    for answer in answers:
        batch.insert(answer)
    for _ in range(5):
        batch.step()
        assert len(batch.active) + len(batch.joining) <= 2
    batch.run()
    assert [answer.tokens for answer in answers] == plain


class Snapshots(Answer):
    """Copies what the caches and the context cover on the way."""

    def begin(self):
        self.seen = []

    def reached(self):
        contexts = [len(layer) for layer in self.sequence.context.layers]
        self.seen.append((self.read, self.sequence.position, contexts))


def test_places_on_the_way_through_a_prompt():
    """Chunks end there, and the drafter has what it can see from there."""
    batch, answers, plain = decoder_of(DENSE, step_size=5, proposer=make_drafter(window=8))
    window = batch.loop.draft_model.context_size
    sequence = answers[2].sequence
    answer = Snapshots(sequence, answers[2].prompt, COUNT, ends=[3, 12, 26])
    batch.insert(answer)
    batch.run()
    covered = [min(window, end) for end in (3, 12, 26)]
    assert answer.seen == [
        (end, end, [rows] * 2) for end, rows in zip((3, 12, 26), covered, strict=True)
    ]
    assert answer.tokens == plain[2]


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_each_has_its_own_verify_width(kind, monkeypatch):
    """A width of 1 does not draft, not even beside others that do."""
    batch, answers, plain = decoder_of(kind, proposer=make_drafter(), width=None)
    monkeypatch.setattr(Controller, "choose", lambda self, limit, n=1: min(limit, 2))
    loop, widths = batch.loop, [None, 1, 3, 1]
    for answer, width in zip(answers, widths, strict=True):
        answer.sequence = loop.open(Judge(), verify_width=width)
        batch.insert(answer)
    contexts = [answer.sequence.context for answer in answers]
    batch.run()
    assert [answer.tokens for answer in answers] == plain
    drafted = [len(answer.sequence.stats.drafted_at) for answer in answers]
    assert drafted == [1, 0, 2, 0]
    assert [context.offset > 0 for context in contexts] == [True, False, True, False]


@pytest.mark.parametrize("widths", [(2, 5, 1, 3), (1,)])
def test_draws_of_a_seed_do_not_depend_on_the_controller(widths, monkeypatch):
    """The same seed gives the same tokens whatever widths are chosen for the others."""
    choices = cycle(widths)
    monkeypatch.setattr(Controller, "choose", lambda self, limit, n=1: min(limit, next(choices)))
    batch, answers, plain = decoder_of(DENSE, proposer=make_drafter(), width=None)
    sampler = make_sampler(1.5)
    answers[2].sequence = batch.loop.open(Judge(sampler, seed=3))
    for answer in answers[1:3]:
        batch.insert(answer)
    batch.run()
    steps = dflash_generate_step(
        answers[2].prompt,
        batch.loop.model,
        batch.loop.draft_model,
        max_tokens=COUNT,
        sampler=sampler,
        seed=3,
    )
    assert answers[2].tokens == [token for token, *_ in steps] != plain[2]
    assert answers[1].tokens == plain[1]
    assert len(answers[2].sequence.stats.drafted_at) == 7
    assert len(answers[1].sequence.stats.drafted_at) == max(widths) - 1

"""Whatever is copied, the tokens are those that mlx-lm generates, and every one is counted."""

from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from support.copying import Planted, Watched
from support.proposers import half
from support.runs import check_counts, model_of, prompt_and_plain, run
from support.tiny import (
    DENSE,
    HYBRID,
    SLIDING,
    VOCAB,
    make_drafter,
    make_tokenizer,
    plain_tokens,
)

from mlx_dflash2 import (
    Stats,
    batch_generate,
    copies,
    make_logits_processors,
    make_sampler,
    stream_generate,
)
from mlx_dflash2.copies import CopyProposer
from mlx_dflash2.decode import judge, loop
from mlx_dflash2.decode.rollback import num_cached
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets.base import Target

KINDS = (DENSE, HYBRID, SLIDING, "llama-sliding", "gemma4_text-shared")
LENGTH = 20
# One copy of a whole round, its bonus, and one more of each.
BUDGETS = (0, 1, 2, 3, 15, 16, 17, 18, 31, 32, 33)


def text_of(kind, bits=None, length=LENGTH):
    prompt, plain = prompt_and_plain(kind, length, 34, bits)
    return prompt, plain, prompt + plain


def assert_covers(kind, caches, tokens):
    """The live cache goes on exactly as a fresh prefill of the same tokens would."""
    fresh = make_prompt_cache(model_of(kind))
    assert num_cached(caches) == len(tokens)
    model_of(kind)(mx.array([tokens]), cache=fresh)
    ours, theirs = (model_of(kind)(mx.array([[3, 4]]), cache=c) for c in (caches, fresh))
    assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()


@pytest.mark.parametrize("drafter", [False, True], ids=["only", "with"])
@pytest.mark.parametrize("wrong", [None, 11], ids=["right", "half"])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_plain_decoding(kind, bits, wrong, drafter):
    prompt, plain, text = text_of(kind, bits)
    proposer = Planted(text, drafter=make_drafter() if drafter else None, wrong=wrong)
    steps, stats = run(kind, prompt, proposer, 34, bits)
    assert [token for token, _ in steps] == plain
    check_counts(steps, stats, "", 16)
    assert stats.copies_accepted > 0 and stats.verify_width == 16
    assert stats.copied <= stats.drafted and stats.copies_accepted <= stats.accepted
    if wrong is None:
        # The first rounds learn how sure it is, then whole rounds are copied.
        assert stats.copies_accepted == stats.copied and stats.rounds <= 6
    else:
        assert stats.copies_accepted < stats.copied
    if not drafter:
        assert stats.copied == stats.drafted


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_every_budget(kind):
    prompt, plain, text = text_of(kind)
    for max_tokens in BUDGETS:
        for wrong in (None, 11):
            steps, stats = run(kind, prompt, Planted(text, wrong=wrong), max_tokens)
            assert [token for token, _ in steps] == plain[:max_tokens]
            assert stats.generation_tokens == len(steps) == max_tokens


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48])
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_every_length_of_a_prompt(kind, length):
    prompt, plain, text = text_of(kind, length=length)
    for step in (7, 2048):
        proposer = Planted(text, wrong=11)
        steps, stats = run(kind, prompt, proposer, 34, prefill_step_size=step)
        assert [token for token, _ in steps] == plain
        assert 0 < stats.copies_accepted < stats.copied


@pytest.mark.parametrize("kind", (DENSE, "llama-sliding", "gemma4_text-shared"))
def test_copies_of_the_text_itself(kind):
    """Nothing is planted: what these tiny models say repeats by itself."""
    prompt = list(range(40, 60)) * 3
    for drafter in (None, make_drafter()):
        steps, stats = run(kind, prompt, CopyProposer(drafter), 60)
        assert [token for token, _ in steps] == plain_tokens(model_of(kind), prompt, 60)
        assert stats.copies_accepted > 10 and stats.generation_tokens == 60


@pytest.mark.parametrize(
    "width, block, most, drafted", [(4, None, 3, 3), (12, None, 11, 7), (None, 4, 15, 3)]
)
def test_widths(width, block, most, drafted):
    """A verify width bounds both kinds of drafts; a block bounds the drafter's alone."""
    prompt, plain, text = text_of(DENSE)
    for proposer, positions in (
        (Planted(text, drafter=make_drafter()), most),
        (CopyProposer(half(text, VOCAB, 1)), drafted),
    ):
        steps, stats = run(DENSE, prompt, proposer, 34, verify_width=width, block_size=block)
        assert [token for token, _ in steps] == plain
        assert len(stats.drafted_at) == positions


def test_a_block_of_one_leaves_all_to_copies():
    prompt, plain, text = text_of(DENSE)
    steps, stats = run(DENSE, prompt, Planted(text, drafter=make_drafter()), 34, block_size=1)
    assert [token for token, _ in steps] == plain and stats.drafted == stats.copied > 0


@pytest.mark.parametrize(
    "proposer, width, message",
    [
        (CopyProposer(), 17, "`verify_width` is 17 but has to be from 1 to 16, as many as are cop"),
        (CopyProposer(), 0, "`verify_width` is 0 but has to be from 1 to 16"),
        (CopyProposer(max_drafts=3), 5, "from 1 to 4, as many as are copied"),
        (CopyProposer(make_drafter(), max_drafts=3), 9, "from 1 to the block of 8"),
    ],
)
def test_widths_that_nothing_can_fill_are_refused(proposer, width, message):
    with pytest.raises(ValueError, match=message):
        run(DENSE, [1, 2], proposer, 4, verify_width=width)


def test_more_copies_than_the_default():
    prompt, plain, text = text_of(DENSE)
    steps, stats = run(DENSE, prompt, Planted(text, max_drafts=30), 34)
    assert [token for token, _ in steps] == plain and len(stats.drafted_at) > 15


@pytest.mark.parametrize("drafter", [False, True], ids=["only", "with"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind, drafter):
    """Each sequence has its own copies, of other lengths, and some draft instead."""
    lengths = (20, 1, 33, 7)
    texts = [text_of(kind, length=n) for n in lengths]
    proposer = Planted(
        *(text for _, _, text in texts), drafter=make_drafter() if drafter else None, wrong=11
    )
    stats = Stats()
    response = batch_generate(
        model_of(kind), make_tokenizer(), [prompt for prompt, _, _ in texts],
        max_tokens=[34, 30, 11, 25], draft_model=proposer, return_token_ids=True, stats=stats,
        verify_width=16,
    )  # fmt: skip
    budgets = zip(texts, (34, 30, 11, 25), strict=True)
    assert response.token_ids == [plain[:n] for (_, plain, _), n in budgets]
    assert 0 < stats.copies_accepted < stats.copied and stats.fallback is None
    assert stats.passes < stats.rounds < 100


def test_a_batch_drafts_as_each_sequence_alone():
    """Which round is copied and which is drafted depends on nothing but the sequence."""
    texts = [text_of(DENSE, length=n) for n in (20, 33)]
    alone, together = Stats(), Stats()
    for prompt, _, text in texts:
        proposer = Planted(text, drafter=make_drafter(), wrong=11)
        steps = dflash_generate_step(
            mx.array(prompt),
            model_of(DENSE),
            proposer,
            max_tokens=30,
            stats=alone,
            verify_width=16,
        )
        assert len(list(steps)) == 30
    batch_generate(
        model_of(DENSE), make_tokenizer(), [prompt for prompt, _, _ in texts], max_tokens=30,
        draft_model=Planted(*(text for _, _, text in texts), drafter=make_drafter(), wrong=11),
        stats=together, verify_width=16,
    )  # fmt: skip
    counts = ("rounds", "drafted_at", "accepted_at", "copied_at", "copies_accepted_at")
    assert all(getattr(alone, name) == getattr(together, name) for name in counts)
    assert together.drafted > together.copied > 0


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_penalties_see_the_right_history(kind):
    options = dict(repetition_penalty=1.5, presence_penalty=0.5, logit_bias={7: 2.0})
    prompt, _, _ = text_of(kind)
    processors = make_logits_processors(**options)
    steps = generate_step(
        mx.array(prompt), model_of(kind), max_tokens=30, logits_processors=processors
    )
    plain = [token for token, _ in steps]
    opaque = [lambda tokens, logits: processors[0](tokens, logits), *processors[1:]]
    for given in (processors, opaque):
        steps, stats = run(
            kind, prompt, Planted(prompt + plain, wrong=11), 30, logits_processors=given
        )
        assert [token for token, _ in steps] == plain
        assert 0 < stats.copies_accepted < stats.copied


@pytest.mark.parametrize("size", [12, 30, 45])
def test_a_ring_that_keeps_its_first_rows(size, recwarn):
    """It takes copies until it is full."""
    prompt, _, _ = text_of(DENSE)
    steps = generate_step(mx.array(prompt), model_of(DENSE), max_tokens=34, max_kv_size=size)
    plain = [token for token, _ in steps]
    steps, stats = run(DENSE, prompt, Planted(prompt + plain), 34, max_kv_size=size)
    assert [token for token, _ in steps] == plain
    assert (stats.copied > 0) == (size > LENGTH) and "max_kv_size" in stats.fallback


@pytest.mark.parametrize("kind", (DENSE, HYBRID))
def test_quantized_keys_and_values(kind):
    prompt, _, _ = text_of(kind)
    options = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=26)
    steps = generate_step(mx.array(prompt), model_of(kind), max_tokens=34, **options)
    plain = [token for token, _ in steps]
    steps, stats = run(kind, prompt, Planted(prompt + plain), 34, **options)
    assert [token for token, _ in steps] == plain and stats.copies_accepted > 0


def test_one_host_read_a_round():
    prompt, _, text = text_of(DENSE)
    for proposer in (Planted(text, wrong=11), Planted(text, wrong=11, drafter=make_drafter())):
        _, stats = run(DENSE, prompt, proposer, 34)
        assert stats.host_reads == stats.rounds + 1


def test_the_round_reads_nothing_else(monkeypatch):
    """An array that is not computed yet is read once a round, where the decisions are."""
    prompt, _, text = text_of(DENSE)
    proposer = Planted(text, wrong=11)
    monkeypatch.setattr(proposer, "propose", None)
    reads = []

    def counted(read, x):
        reads.append(x)
        return read(x)

    for module in (loop, judge):
        for name in ("integer", "integers"):
            monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    _, stats = run(DENSE, prompt, proposer, 34)
    # The prompt's chunk and its last token, and then the decisions.
    assert len(reads) == 2 + stats.host_reads


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_seed_repeats_the_draws(temp):
    prompt, _, text = text_of(DENSE)
    drafter = make_drafter()
    runs = [
        run(
            DENSE, prompt, Planted(text, wrong=11, drafter=drafter), 30, seed=5,
            sampler=make_sampler(temp, top_k=3),
        )
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0][0] == runs[1][0] and runs[0][1].copied == runs[1][1].copied


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_a_very_cold_sampler_gives_the_greedy_tokens(kind):
    """Rejection sampling and a foreign sampler, whose law leaves one token."""
    prompt, plain, text = text_of(kind)
    for sampler in (make_sampler(1.0, top_k=1), lambda logprobs: mx.argmax(logprobs, axis=-1)):
        steps, stats = run(kind, prompt, Planted(text, wrong=11), 34, sampler=sampler)
        assert [token for token, _ in steps] == plain
        assert 0 < stats.copies_accepted < stats.copied


@pytest.mark.parametrize("step", [5, 16, 2048])
def test_the_index_has_all_tokens_and_the_drafter_its_window(step, monkeypatch):
    """Copies reach back beyond the drafter's window; its rows are no more than it can use."""
    drafter, prompt = make_drafter(), list(range(100, 170))
    rows, extend = [], drafter.extend

    def watched(context, tokens, taps, position):
        rows.append((position, tokens.size, taps.shape[1]))
        extend(context, tokens, taps, position)

    monkeypatch.setattr(drafter, "extend", watched)
    for inner in (drafter, None):
        proposer = Watched(inner)
        steps, _ = run(DENSE, prompt, proposer, 3, prefill_step_size=step)
        assert len(steps) == 3
        assert proposer.contexts[0].index.tokens[: len(prompt)] == prompt
    chunks = [(count, taps) for position, count, taps in rows if position < len(prompt)]
    assert sum(count for count, _ in chunks) == drafter.context_size < len(prompt)
    assert all(count == taps for count, taps in chunks)


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_nothing_is_tapped_without_a_drafter(kind, monkeypatch):
    forward, taps = Target.forward, []

    def watched(*args):
        out = forward(*args)
        taps.append(out.taps)
        return out

    monkeypatch.setattr(Target, "forward", watched)
    prompt, plain, text = text_of(kind)
    steps, _ = run(kind, prompt, Planted(text), 34, prefill_step_size=7)
    assert [token for token, _ in steps] == plain
    assert len(taps) > 4 and all(x is None for x in taps)


def test_every_target_copies_without_a_drafter():
    """A model that no drafter was made for."""
    prompt = list(range(30, 50)) * 2
    tokens = [
        response.token
        for response in stream_generate(
            model_of("phi3"), make_tokenizer(), prompt, 30, draft_model=CopyProposer()
        )
    ]
    assert tokens == plain_tokens(model_of("phi3"), prompt, 30)


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_closing_at_every_yield(kind):
    prompt, plain, text = text_of(kind)
    for stop in (1, 2, 5, 9, 16, 17, 20, 30):
        caches = make_prompt_cache(model_of(kind))
        steps = dflash_generate_step(
            mx.array(prompt), model_of(kind), Planted(text, wrong=11), prompt_cache=caches
        )
        tokens = [next(steps)[0] for _ in range(stop)]
        steps.close()
        assert tokens == plain[:stop]
        assert_covers(kind, caches, prompt + tokens)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_an_interruption_while_the_index_grows(kind, call, error, monkeypatch):
    prompt, plain, text = text_of(kind)
    caches, append, calls = make_prompt_cache(model_of(kind)), copies.CopyIndex.append, []

    def interrupted(index, token):
        calls.append(token)
        if len(calls) == call:
            raise error
        append(index, token)

    steps = dflash_generate_step(
        mx.array(prompt), model_of(kind), Planted(text), prompt_cache=caches, max_tokens=34
    )
    tokens = [next(steps)[0]]
    monkeypatch.setattr(copies.CopyIndex, "append", interrupted)
    with pytest.raises(error):
        for token, _, _ in steps:
            tokens.append(token)
    monkeypatch.setattr(copies.CopyIndex, "append", append)
    assert tokens == plain[: len(tokens)]
    assert_covers(kind, caches, prompt + tokens)


def test_a_copy_that_is_never_right_does_not_warn_about_the_drafter(recwarn):
    prompt, plain = prompt_and_plain(DENSE, LENGTH, 90)
    wrong = prompt + [t if i % 4 else (t + 1) % VOCAB for i, t in enumerate(plain)]
    stats = Stats()
    steps = dflash_generate_step(
        mx.array(prompt),
        model_of(DENSE),
        Planted(wrong),
        max_tokens=90,
        stats=stats,
        verify_width=16,
    )
    assert [token for token, _, _ in steps] == plain
    assert stats.copied > stats.copies_accepted and not recwarn.list
    assert stats.first_drafts == 0 and stats.low_acceptance is None
    assert f"Copies: {stats.copies_accepted} of {stats.copied} accepted" in stats.summary()

"""A context follows the committed tokens, learns how good its copies are, and offers them."""

import tracemalloc

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.proposers import Stub

from mlx_dflash2 import copies
from mlx_dflash2.copies import MAX_DRAFTS, Copy, CopyContext, CopyIndex, CopyProposer, CopyRates
from mlx_dflash2.drafter.model import Proposal

PHRASE = [10, 11, 12, 13, 14, 15, 16, 17]


def context_of(tokens, drafter=None):
    context = CopyContext(drafter)
    context.read(tokens, 0)
    return context


def test_what_followed_the_match_is_offered():
    context = context_of([*PHRASE, 1, 2, 10, 11])
    assert context.offer(12, 2).tokens == [13, 14]
    # Asking again adds nothing.
    assert context.offer(12, 2).tokens == [13, 14]
    assert context.index.tokens == [*PHRASE, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("last, anchor, count", [([11], 12, 0), ([10, 11], 12, 1), ([9], 9, 0)])
def test_three_tokens_have_to_match(last, anchor, count):
    offer = context_of([*PHRASE, 1, *last]).offer(anchor, 1)
    assert len(offer.tokens) == len(offer.chances) == count


def test_the_chances_fall_and_end_the_offer():
    short, longer, longest = (
        context_of([*range(100, 160), 1, *range(100, end)]).offer(end, 30)
        for end in (102, 106, 135)
    )
    for offer in (short, longer, longest):
        assert offer.chances == sorted(offer.chances, reverse=True)
        assert offer.chances[-1] >= copies.MIN_CHANCE
        assert offer.expected == sum(offer.chances) < len(offer.tokens)
    assert 1 <= len(short.tokens) < len(longer.tokens) < len(longest.tokens)
    assert longest.tokens == [*range(136, 160), 1, *range(100, 136)][: len(longest.tokens)]


def test_a_long_match_that_was_right_before_is_trusted_more():
    rates = CopyRates()
    before = rates.chance(5)
    for _ in range(20):
        rates.observe(5, False)
        rates.observe(9, True)
    assert rates.chance(5) < 0.2 < before < rates.chance(9)
    assert rates.chance(4) == rates.chance(7) == rates.chance(5)
    assert rates.chance(3) == CopyRates().chance(3)
    for _ in range(60):
        rates.observe(5, True)
    assert rates.chance(5) > 0.8


def test_every_token_of_the_answer_tells_whether_it_was_copied():
    """A prompt tells nothing; an answer does, in rounds without copies too."""
    text = list(range(50, 100))
    context = context_of([*text, 1, *text])
    fresh = CopyRates()
    assert context.rates.chance(40) == fresh.chance(40)
    context.read([1], len(text) * 2 + 1)
    context.offer(50, 15)
    context.read([50, 51, 52, 53, 99], len(text) * 2 + 2)
    # The anchor continued the match by a token, and so did three more; the last did not.
    assert context.rates.chance(40) < fresh.chance(40)
    assert context.rates.chance(3) == fresh.chance(3)


def test_it_goes_on_after_what_it_was_shown_last():
    context = context_of([1, 2, 3])
    context.offer(4, 15)
    context.read([4, 5], 3)
    assert context.index.tokens == [1, 2, 3, 4, 5] and context.position == 5
    # The anchor was another one in the end: a chat template dropped it.
    context.offer(6, 15)
    context.read([7, 8], 5)
    assert context.index.tokens == [1, 2, 3, 4, 5, 7, 8]
    # A gap: what stood there is not known.
    context.read([9, 9], 20)
    assert context.index.tokens == [9, 9] and context.start == 20
    # A whole text again, of which the first part was forgotten.
    context.read([0] * 20 + [9, 9, 4], 0)
    assert context.index.tokens == [9, 9, 4] and context.position == 23


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=8), st.booleans()),
        max_size=12,
    )
)
def test_the_index_is_that_of_the_text(steps):
    """Whatever is read and gone back over: the index is as if the text had been read at once."""
    context, text = CopyContext(), []
    for back, tokens, asks in steps:
        text = text[: max(0, len(text) - back)] + tokens
        position = len(text) - len(tokens)
        context.read(tokens, position)
        if asks:
            context.offer(1, 4)
        held = context.index.tokens[: len(text)]
        assert held == text and len(context.index) == len(text) + asks
        fresh = CopyIndex(context.index.tokens)
        assert context.index.match == fresh.match


def test_going_back():
    context = context_of([*PHRASE, 1, 2, 3], Stub(lambda *_: []))
    inner = context.inner
    context.trim_to(5)
    assert context.index.tokens == PHRASE[:5] and context.position == 5
    # The stub's context cannot be cut.
    assert context.inner is not inner and context.inner.tokens == {}


def test_an_interrupted_index_is_made_anew(monkeypatch):
    context = context_of([*PHRASE, 1, 2])
    step = CopyIndex._step

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(CopyIndex, "_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        context.read([10, 11], len(PHRASE) + 2)
    monkeypatch.setattr(CopyIndex, "_step", step)
    assert not context.index.whole
    context.read([10, 11], len(PHRASE) + 2)
    assert context.index.whole and context.index.tokens == [*PHRASE, 1, 2, 10, 11]
    assert context.offer(12, 2).tokens == [13, 14]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(copies, "MAX_TOKENS", 500)
    context, position = CopyContext(), 0
    tracemalloc.start()
    for chunk in range(60):
        tokens = [(i * i * 7 + chunk * i) % 97 for i in range(position, position + 100)]
        context.read(tokens, position)
        position += 100
        assert min(position, 500) <= len(context.index) <= 1000
        if chunk == 20:
            after_21 = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] / after_21
    tracemalloc.stop()
    assert grown < 2 and context.start + len(context.index) == position
    # One long prompt at once, and copies still work.
    context.read(list(range(5000)), position)
    assert len(context.index) <= 1000
    context.read([1, 4800, 4801], position + 5000)
    assert context.offer(4802, 2).tokens == [4803, 4804]


class Counted(Stub):
    """A drafter that drafts ones and is counted."""

    def __init__(self):
        super().__init__(lambda position, n: [1] * n)


def test_the_drafter_drafts_where_more_of_its_drafts_should_stay():
    drafter = Counted()
    proposer = CopyProposer(drafter)
    context = proposer.make_context()
    text = list(range(100, 130))
    context.read([*text, 1, 100, 101], 0)
    assert not propose(proposer, context, 102).copied and drafter.calls == 1
    assert context.offer(102, 15).expected < copies.DRAFTER_PRIOR
    # It disappoints: only the anchors stay.
    for position, token in enumerate(range(102, 110), start=33):
        context.read([token], position)
        found = propose(proposer, context, token + 1)
    assert context.drafter_yield < copies.DRAFTER_PRIOR and 1 < drafter.calls < 9
    assert found.copied and found.tokens.tolist()[:4] == list(range(111, 115))


def test_a_drafter_gives_no_more_than_its_block():
    context, copy = CopyProposer(Counted()).make_context(), Copy([1, 2], [0.9, 0.8])
    assert context.leaves_to_drafter(copy, 7) and not context.leaves_to_drafter(copy, 1)


def propose(proposer, context, anchor, block_size=8):
    return proposer.propose(None, mx.array([anchor]), context, block_size)


def test_without_a_drafter_there_are_only_copies():
    context = CopyProposer().make_context()
    context.read([1, 2, 3], 0)
    assert propose(CopyProposer(), context, 4).tokens.size == 0
    assert CopyProposer().block_size == 1 and CopyProposer().target_layer_ids == ()
    assert CopyProposer().context_size == 0


def test_it_is_a_proposer():
    """Whoever only knows the protocol gets the same drafts."""
    proposer = CopyProposer(Counted())
    context = proposer.make_context()
    context.read([*range(100, 140), 1, *range(100, 120)], 0)
    copied = propose(proposer, context, 120)
    assert copied.copied and copied.tokens.tolist() == list(range(121, 121 + MAX_DRAFTS))
    context.read([120, 7], 61)
    drafted = propose(proposer, context, 7)
    assert not drafted.copied and drafted.tokens.tolist() == [1] * 7
    proposer.extend(context, mx.array([120, 7]), None, 61)
    assert context.inner.tokens == {61: 120, 62: 7}


def test_parts_of_a_proposal_stay_copies():
    proposal = Proposal(mx.array([1, 2, 3]), mx.array(True), copied=True)
    assert proposal.first(2).copied and proposal.only(1).copied
    assert proposal.only(1).tokens.tolist() == [2] and not Proposal.none().copied


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="`max_drafts` is 0 but has to be 1 or more"):
        CopyProposer(max_drafts=0)

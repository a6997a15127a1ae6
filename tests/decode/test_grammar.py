"""Answers follow a grammar, and are those of plain decoding under the same masks."""

import json
import re
import warnings
from functools import cache

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from support.proposers import half, liar, oracle, rand
from support.saved_models import save_target
from support.tiny import DENSE, HYBRID, VOCAB, make_drafter, make_model, make_tokenizer

from mlx_dflash2 import batch_generate, make_logits_processors, make_sampler, stream_generate
from mlx_dflash2.decode.grammar import JSON_SCHEMA, LARK, REGEX, Grammar, GrammarVocabulary
from mlx_dflash2.decode.judge import Judge
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step

PROMPT = [5, 9, 2, 7, 1] * 3
# Every object of this schema is short, and has no room for spaces.
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bee", "hill"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = {
    "schema": (JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": (REGEX, r"(abc|bad){2,4}[0-9]{3}e*f"),
    "lark": (LARK, 'start: "a" (item ",")* "z"\nitem: /[a-f]{1,3}/'),
}
PATTERNS = {"regex": r"(abc|bad){2,4}[0-9]{3}e*f", "lark": r"a([a-f]{1,3},)*z"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("grammar") / "target")
    return mlx_lm.load(str(folder))[1]


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return GrammarVocabulary(tokenizer, VOCAB)


@pytest.fixture
def grammar_of(vocabulary):
    """Makes the grammar of a name, for one answer."""

    def make(name, after=()):
        return Grammar(vocabulary, vocabulary.compile(*GRAMMARS[name]), after)

    return make


@cache
def model_of(kind):
    return make_model(kind)


def plain(kind, grammar, count=40):
    """What mlx-lm itself says under the masks."""
    steps = generate_step(
        mx.array(PROMPT), model_of(kind), max_tokens=count, logits_processors=[grammar]
    )
    return [token for token, _ in steps]


def decode(kind, proposer, grammar, count=40, processors=(), **options):
    stats = Stats()
    steps = dflash_generate_step(
        mx.array(PROMPT),
        model_of(kind),
        proposer,
        max_tokens=count,
        logits_processors=[*processors, grammar],
        stats=stats,
        **options,
    )
    return [token for token, *_ in steps], stats


def text_of(tokens, tokenizer):
    end = next((i for i, t in enumerate(tokens) if t in tokenizer.eos_token_ids), len(tokens))
    return tokenizer.decode(tokens[:end])


def check_text(name, text):
    if name == "schema":
        found = json.loads(text)
        assert set(found) == {"kind", "sizes"} and found["kind"] in ("bee", "hill")
        assert 2 <= len(found["sizes"]) <= 3
    else:
        assert re.fullmatch(PATTERNS[name], text), text


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_tokens_are_those_of_plain_decoding(name, kind, grammar_of):
    expected = plain(kind, grammar_of(name))
    text = PROMPT + expected
    proposers = {
        "oracle": oracle(text),
        "liar": liar(text, VOCAB),
        "half": half(text, VOCAB, 2),
        "rand": rand(3, VOCAB),
        "drafter": make_drafter(),
    }
    for who, proposer in proposers.items():
        tokens, stats = decode(kind, proposer, grammar_of(name), verify_width=8)
        assert tokens == expected, who
        # All that the others draft may be forbidden.
        assert stats.fallback is None and (stats.drafted > 0 or who in ("liar", "rand"))
        assert stats.prefills + stats.accepted + stats.bonus == len(tokens)


def test_other_processors_go_along(grammar_of):
    """Penalties and biases act on what the grammar leaves, whoever comes first."""
    processors = make_logits_processors({300: 4.0}, repetition_penalty=1.5)
    steps = generate_step(
        mx.array(PROMPT),
        model_of(DENSE),
        max_tokens=30,
        logits_processors=[*processors, grammar_of("lark")],
    )
    expected = [token for token, _ in steps]
    drafts = half(PROMPT + expected, VOCAB, 2)
    tokens, _ = decode(DENSE, drafts, grammar_of("lark"), 30, processors, verify_width=8)
    assert tokens == expected != plain(DENSE, grammar_of("lark"))[:30]


def test_two_host_reads_a_round(grammar_of):
    """One for the drafts, one for what stays: no row has a read of its own."""
    drafts = half(PROMPT + plain(DENSE, grammar_of("lark")), VOCAB, 2)
    _, stats = decode(DENSE, drafts, grammar_of("lark"), verify_width=8)
    assert stats.row_by_row is None
    assert stats.host_reads <= 1 + 2 * stats.rounds


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("temp", [0.7, 3.0])
def test_draws_follow_the_grammar(name, temp, grammar_of, tokenizer):
    ended = 0
    for seed in range(6):
        tokens, stats = decode(
            DENSE, make_drafter(), grammar_of(name), 90, sampler=make_sampler(temp), seed=seed
        )
        text = text_of(tokens, tokenizer)
        if len(text) and set(tokens) & tokenizer.eos_token_ids:
            check_text(name, text)
            ended += 1
        assert stats.rule == "rejection"
    assert ended >= 3


def test_a_choice_is_drawn_by_the_target_s_chances(vocabulary):
    """The masked distribution, with drafts: conditional on what is allowed."""
    model, grammar = model_of(DENSE), vocabulary.compile(REGEX, "[ajx]")
    logits = model(mx.array([PROMPT]))[0, -1]
    allowed = [vocabulary.tokens.tokenize_str(letter)[0] for letter in "ajx"]
    chances = mx.softmax(logits[mx.array(allowed)], axis=-1).tolist()
    counts = dict.fromkeys(allowed, 0)
    for seed in range(600):
        judge = Judge(make_sampler(1.0), [Grammar(vocabulary, grammar)], seed)
        proposal = judge.cut(make_proposal([allowed[seed % 3], 4, 4]))
        rows = mx.broadcast_to(logits, (1 + proposal.tokens.size, VOCAB))
        host, _ = judge.at_once(proposal, rows, None)
        counts[host.tolist()[3]] += 1
    for token, chance in zip(allowed, chances, strict=True):
        sigma = (600 * chance * (1 - chance)) ** 0.5
        assert abs(counts[token] - 600 * chance) < 4 * sigma + 1


def make_proposal(tokens):
    from mlx_dflash2.drafter import Proposal

    return Proposal(mx.array(tokens, mx.uint32), mx.array(True))


def test_what_is_forced_needs_no_drafter(vocabulary, tokenizer):
    """Tokens without a choice are drafted for nothing, and all of them stay."""
    words = "abc hello world, said the bee on the hill"
    grammar = Grammar(vocabulary, vocabulary.compile(REGEX, f"(x|{words})"))
    bias = make_logits_processors({tokenizer.encode("a", add_special_tokens=False)[0]: 99.0})
    stub = liar(PROMPT, VOCAB)
    tokens, stats = decode(DENSE, stub, grammar, 60, verify_width=8, processors=bias)
    assert text_of(tokens, tokenizer) == words
    length = next(i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids)
    # What was accepted while the liar had no say, and the rounds that it took.
    assert stats.accepted >= length - length // 8 - 4


def test_forbidden_drafts_are_not_verified(grammar_of):
    """What cannot stay is cut off before the target's pass."""
    grammar = grammar_of("lark")
    first = plain(DENSE, grammar_of("lark"), 1)
    grammar.accept(first)
    judge = Judge(None, [grammar])
    wrong = judge.cut(make_proposal([0, 1, 2]))
    assert wrong.tokens.size == 0
    right = [*plain(DENSE, grammar_of("lark"), 4)[1:], 0, 0]
    assert judge.cut(make_proposal(right)).tokens.tolist() == right[:3]


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_of_a_block(name, grammar_of):
    """Each row is that of a grammar that has come so far, and nothing moves by asking."""
    tokens = plain(DENSE, grammar_of(name), 30)
    walker = grammar_of(name)
    for start in range(0, 24, 3):
        drafts = tokens[start : start + 5]
        drafts = drafts[: walker.allowed(drafts)]
        rows = walker.masks(drafts)
        assert np.array_equal(rows, walker.masks(drafts))
        for i in range(len(drafts) + 1):
            fresh = grammar_of(name)
            fresh.accept(tokens[: start + i])
            assert np.array_equal(rows[i], fresh.masks([])[0])
        walker.accept(tokens[start : start + 3])


def test_an_answer_ends_where_the_grammar_does(vocabulary, tokenizer):
    grammar = Grammar(vocabulary, vocabulary.compile(REGEX, "ab?"))
    eos = sorted(vocabulary.eos_token_ids)
    assert allowed_ids(grammar) == encode(tokenizer, "a") | encode(tokenizer, "ab")
    grammar.accept(encode_list(tokenizer, "a"))
    assert allowed_ids(grammar) == {*encode(tokenizer, "b"), *eos}
    assert grammar.allowed([eos[0], eos[0]]) == 1
    grammar.accept([eos[0]])
    assert allowed_ids(grammar) == set(eos) and grammar.forced(5) == []
    assert grammar.allowed([eos[0]]) == 0


def allowed_ids(grammar):
    bits = np.unpackbits(grammar.masks([])[0].view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def encode_list(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def encode(tokenizer, text):
    return set(encode_list(tokenizer, text))


@pytest.mark.parametrize("marker", [[7], [7, 8, 7]])
def test_a_grammar_that_holds_after_thoughts(marker, grammar_of, vocabulary):
    """Everything goes until the marker, also within one block."""
    grammar = grammar_of("regex", after=marker)
    free = VOCAB
    assert len(allowed_ids(grammar)) == free and grammar.forced(3) == []
    answer = plain(DENSE, grammar_of("regex"), 5)
    drafts = [3, 6, 8, 9, *marker, *answer, 0]
    assert grammar.allowed(drafts) == len(drafts) - 1
    rows = grammar.masks(drafts[:-1])
    held = 4 + len(marker)
    assert np.array_equal(rows[held], grammar_of("regex").masks([])[0])
    assert all((row == 2**32 - 1).all() for row in rows[:held])
    grammar.accept(drafts[: held - 1])
    assert len(allowed_ids(grammar)) == free
    grammar.accept(drafts[held - 1 : held])
    assert np.array_equal(grammar.masks([]), grammar_of("regex").masks([]))


def test_prompts_of_a_batch_have_their_own(grammar_of, tokenizer):
    prompts = [PROMPT, PROMPT[3:], [8, 8, 1]]
    names = list(GRAMMARS)
    response = batch_generate(
        model_of(DENSE),
        tokenizer,
        prompts,
        max_tokens=70,
        draft_model=make_drafter(),
        logits_processors=[[grammar_of(name)] for name in names],
        return_token_ids=True,
    )
    alone = [
        [token for token, *_ in generate_step(
            mx.array(prompt), model_of(DENSE), max_tokens=70, logits_processors=[grammar_of(name)]
        )]
        for prompt, name in zip(prompts, names, strict=True)
    ]  # fmt: skip
    for found, expected in zip(response.token_ids, alone, strict=True):
        assert found == expected[: len(found)] and len(found) > 3


def test_text_of_a_schema(grammar_of, tokenizer):
    responses = stream_generate(
        model_of(DENSE),
        tokenizer,
        PROMPT,
        90,
        make_drafter(),
        logits_processors=[grammar_of("schema")],
    )
    responses = list(responses)
    check_text("schema", "".join(response.text for response in responses))
    assert responses[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "kind, text",
    [(REGEX, "a("), (JSON_SCHEMA, '{"type": "nope"}'), (JSON_SCHEMA, "{"), (LARK, "start: foo")],
)
def test_grammars_that_do_not_compile(kind, text, vocabulary):
    with pytest.raises(ValueError, match=rf"^The {kind} does not compile: [^\n]+$"):
        vocabulary.compile(kind, text)


def test_vocabularies_that_do_not_fit(tokenizer, vocabulary, grammar_of):
    with pytest.raises(ValueError, match="tokenizer has 512 tokens but the target has 500"):
        GrammarVocabulary(tokenizer, 500)
    with pytest.raises(ValueError, match="has none"):
        GrammarVocabulary(make_tokenizer(), VOCAB)
    with pytest.raises(ValueError, match="constraint is for 512 tokens but the target has 32"):
        Judge(None, [grammar_of("regex")]).check_vocabulary(32)
    with pytest.raises(ValueError, match="more than one constraint"):
        Judge(None, [grammar_of("regex"), grammar_of("regex")])
    larger = GrammarVocabulary(tokenizer, 600)
    masks = Grammar(larger, larger.compile(REGEX, "[a-z]+")).masks([])
    assert masks.shape == (1, 19)


def test_a_grammar_that_gives_up_ends_the_answer(vocabulary, monkeypatch):
    """With a word, and with nothing else than an EOS token allowed."""
    grammar = Grammar(vocabulary, vocabulary.compile(REGEX, "[ab]+"))
    # A token that was never allowed puts the matcher into its state of error.
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        grammar.accept([0])
    assert "The grammar ends the answer" in str(seen[0].message) and grammar.problem
    assert allowed_ids(grammar) == vocabulary.eos_token_ids

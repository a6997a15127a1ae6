"""Stop strings wherever tokens and blocks begin and end, and text of every script."""

from functools import cache
from itertools import islice, zip_longest

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from support.proposers import half, oracle
from support.saved_models import embedded_target
from support.tiny import CONFIGS, plain_tokens

from mlx_dflash2 import DFlashPromptCache, Stats, generate, stream_generate
from mlx_dflash2.decode.rollback import num_cached
from mlx_dflash2.decode.sampling import PureProcessor
from mlx_dflash2.decode.text import StopStrings, responses, stop_strings

PROMPT = list(range(300, 320))
VOCAB, BLOCK = 49152, 16
TEXT = "The quick brown fox-trot, 12345 times:\n\n  jumps; naïve café über 🦊!! End."
NO_LIMIT = 10_000


@cache
def tokenizer():
    return load_tokenizer(embedded_target())


@cache
def model():
    mx.random.seed(0)
    config = CONFIGS["llama"] | {"vocab_size": VOCAB, "num_hidden_layers": 2}
    made = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama"} | config))
    mx.eval(made.parameters())
    return made


def ids(text):
    return tokenizer().encode(text, add_special_tokens=False)


def shown(tokens):
    """What mlx-lm's detokeniser shows of the tokens, at the end of a stream."""
    detokenizer = tokenizer().detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def expected(tokens, stops, max_tokens=NO_LIMIT):
    """How many tokens are generated, the text and the reason: from decoding every prefix."""
    for count in range(1, min(len(tokens), max_tokens) + 1):
        if tokens[count - 1] in tokenizer().eos_token_ids:
            return count, shown(tokens[: count - 1]), "stop"
        text = shown(tokens[:count])
        found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        if found:
            return count, text[: min(found)[1]], "stop"
    return count, text, "length"


def scripted(tokens, stop, max_tokens=NO_LIMIT):
    """The text of a stream of known tokens; the same triple."""
    max_tokens = min(max_tokens, len(tokens))
    steps = ((token, mx.zeros(1), True) for token in islice(tokens, max_tokens))
    out = list(responses(steps, tokenizer(), 1, max_tokens, StopStrings(stop_strings(stop))))
    assert [r.generation_tokens for r in out] == list(range(1, len(out) + 1))
    assert all(r.finish_reason is None for r in out[:-1])
    return out[-1].generation_tokens, "".join(r.text for r in out), out[-1].finish_reason


class Forced:
    """Makes the target say given tokens; a function of nothing but its arguments."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, tokens, logits):
        index = tokens.size - len(PROMPT)
        token = self.tokens[index] if index < len(self.tokens) else 0
        return logits.at[:, token].add(1e4)


def options(tokens, proposer=oracle, **more):
    draft_model = (
        proposer(PROMPT + tokens, block_size=BLOCK)
        if proposer is oracle
        else half(PROMPT + tokens, VOCAB, 5, block_size=BLOCK)
    )
    return {"draft_model": draft_model, "logits_processors": [PureProcessor(Forced(tokens))]} | more


def decoded(tokens, stop, max_tokens=NO_LIMIT, proposer=oracle):
    """The same through the whole loop, which has to leave counts and caches at the last token."""
    max_tokens = min(max_tokens, len(tokens))
    more = options(tokens, proposer, stop=stop)
    stats = Stats()
    session = DFlashPromptCache(model(), more["draft_model"])
    out = list(
        stream_generate(
            model(), tokenizer(), PROMPT, max_tokens, prompt_cache=session, stats=stats, **more
        )
    )
    count, text = out[-1].generation_tokens, "".join(response.text for response in out)
    assert count == len(out) == stats.generation_tokens
    assert stats.generation_tokens == stats.prefills + stats.accepted + stats.bonus
    assert session.tokens == PROMPT + tokens[:count] and len(session) == len(PROMPT) + count
    plain_caches = make_prompt_cache(model())
    more = options(tokens, proposer, stop=stop, prompt_cache=plain_caches)
    assert generate(model(), tokenizer(), PROMPT, max_tokens=max_tokens, **more) == text
    assert num_cached(plain_caches) == len(PROMPT) + count
    return count, text, out[-1].finish_reason


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_a_stop_at_every_offset_inside_tokens(length):
    """Wherever it begins and ends, the text, the count and the reason are right."""
    tokens = ids(TEXT)
    for start in range(len(TEXT) - length + 1):
        stop = TEXT[start : start + length]
        assert scripted(tokens, stop) == expected(tokens, [stop]), repr(stop)


def test_the_text_has_tokens_of_several_characters_and_characters_of_several_tokens():
    tokens = ids(TEXT)
    lengths = [len(tokenizer().decode([token])) for token in tokens]
    assert max(lengths) >= 4 and any("\ufffd" in tokenizer().decode([t]) for t in tokens)


@pytest.mark.parametrize("proposer", [oracle, half])
@pytest.mark.parametrize("place", [13, 14, 15, 16, 30, 32, 33])
def test_a_stop_over_two_blocks(place, proposer):
    """The first token is the prompt's, so blocks of right drafts begin at tokens 1, 17 and 33."""
    text = "One, two: seventy-three fours; ninety six times (seven) and then eleven by thirteen"
    tokens = ids(f"{text} is all that a hundred of us could ever count, said Ann to Bob.")
    before, after = shown(tokens[:place]), shown(tokens[: place + 4])
    stop = before[-2:] + after[len(before) :]
    result = decoded(tokens, stop, proposer=proposer)
    assert result == expected(tokens, [stop]) == (place + 4, before[:-2], "stop")


@pytest.mark.parametrize(
    "stops",
    [
        ["fox", "fox-trot"],
        ["fox-trot", "fox"],
        ["quick brown fox", "brown", "own f"],
        ["ick b", "quick brown"],
        ["brown fox", "own fox", "fox"],
        ["12345 times:\n\n  jumps;", "45 "],
        ["not there", "jumps"],
        ["\n\n", "\n"],
        [" ", "quick"],
    ],
    ids=str,
)
def test_the_stop_that_ends_first_wins(stops):
    tokens = ids(TEXT)
    assert decoded(tokens, stops) == expected(tokens, stops)


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 16, 17, 18])
def test_a_stop_on_the_last_allowed_token_is_a_stop(max_tokens):
    tokens = ids(TEXT)
    whole = shown(tokens[:max_tokens])
    for stop in (whole[-1:], whole[-4:], whole):
        count, text, reason = expected(tokens, [stop], max_tokens)
        assert reason == "stop"
        assert decoded(tokens, stop, max_tokens) == (count, text, reason)


@pytest.mark.parametrize("max_tokens", [4, 16, 17])
def test_what_looked_like_a_stop_is_shown_at_the_end(max_tokens):
    tokens = ids(TEXT)
    text = shown(tokens[:max_tokens])
    assert decoded(tokens, text[-3:] + "?", max_tokens) == (max_tokens, text, "length")


@pytest.mark.parametrize("cut", [4, 16, 17, 18])
def test_stops_beside_eos(cut):
    """EOS after a stop, after half of one, and after text that the detokeniser holds back."""
    eos = next(iter(tokenizer().eos_token_ids))
    tokens = [*ids(TEXT)[:cut], eos, *ids(TEXT)]
    text = shown(tokens[:cut])
    assert decoded(tokens, text[-3:]) == (cut, text[:-3], "stop")
    assert decoded(tokens, text[-3:] + "?") == (cut + 1, text, "stop")
    assert decoded([*tokens[:cut], ids(" ")[0], eos], "?") == (cut + 2, text + " ", "stop")
    assert decoded([eos, *tokens], "T") == (1, "", "stop")


def test_a_stop_that_ends_in_what_the_detokeniser_holds_back():
    """A lone space waits for the next token to be shown, but it completes a stop now."""
    space = ids(" ")
    tokens = [*ids("The end"), *space, *ids("of it")]
    assert len(space) == 1
    assert decoded(tokens, "end ") == expected(tokens, ["end "]) == (3, "The ", "stop")


def test_nothing_follows_a_stop_that_ends_inside_a_token():
    """Also where the rest of the token is a part of a character, which comes at the end."""
    token = tokenizer().convert_tokens_to_ids("ĠðŁ")
    tokens = [*ids("The fox"), token, *ids("of it")]
    naive = TokenizerWrapper(tokenizer(), NaiveStreamingDetokenizer)
    for used in (tokenizer(), naive):
        steps = ((t, mx.zeros(1), True) for t in tokens)
        out = list(responses(steps, used, 1, 9, StopStrings(("fox ",))))
        assert ("".join(r.text for r in out), len(out)) == ("The ", 3)


def test_one_stop_can_be_given_as_text():
    tokens = ids(TEXT)
    assert decoded(tokens, "brown") == decoded(tokens, ["brown"]) == decoded(tokens, ("brown",))
    assert decoded(tokens, [])[1] == decoded(tokens, None)[1]


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [3], [None], [["a"]], 3, 0, b"a"])
def test_bad_stops_are_refused(stop):
    with pytest.raises(ValueError, match=r"`stop` holds .* but has to hold non-empty strings"):
        next(stream_generate(model(), tokenizer(), PROMPT, stop=stop, **options(ids(TEXT))))


def test_a_stop_ends_a_turn_that_the_next_one_goes_on_from():
    more = options(ids(TEXT))
    session = DFlashPromptCache(model(), more["draft_model"])
    list(stream_generate(model(), tokenizer(), PROMPT, stop="fox", prompt_cache=session, **more))
    whole = [*session.tokens, 7, 8, 9]
    draft_model = oracle(whole + plain_tokens(model(), whole, 9), block_size=BLOCK)
    second = stream_generate(
        model(), tokenizer(), session.reuse(whole), 9, draft_model=draft_model,
        prompt_cache=session,
    )  # fmt: skip
    assert [response.token for response in second] == plain_tokens(model(), whole, 9)


SCRIPTS = {
    "emoji": "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin, 🇫🇷🇯🇵 and 🦊🦊🦊",
    "combining": "e\u0301a\u0308o\u0302\u0323 Zalgo: H\u0351\u036b\u0343e\u0334\u0330 नमस्ते क्षि",
    "cjk": "快速的棕色狐狸。日本語のテキスト、ひらがな カタカナ。 한국어 문장입니다.",
    "right to left": "שלום עולם! مرحبا بالعالم، \u200fكيف\u200e 123 \u202babc\u202c",
    "line ends": "one\r\ntwo\n\r\n\tthree\r four \r\n\r\n end  \n",
    "spaces": "  two  three   four \t  \u00a0 \u3000 end ",
    "beyond": "𝕬𝖇𝖈 𓀀𓁐 𠜎𠜱 \U0010fffd",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_joined_stream_is_the_decoded_text(name):
    text = SCRIPTS[name]
    tokens = ids(text)
    whole = tokenizer().decode(tokens)
    assert whole == text
    # mlx-lm's detokeniser drops a space at the very beginning.
    whole = whole.removeprefix(" ")
    for stop in (None, ["never there"], [text + "?"]):
        assert scripted(tokens, stop) == (len(tokens), whole, "length")
    assert decoded(tokens, None, len(tokens))[1] == whole
    forced = [Forced(tokens)]
    theirs = mlx_lm.stream_generate(
        model(), tokenizer(), PROMPT, max_tokens=len(tokens), logits_processors=forced
    )
    assert whole == "".join(response.text for response in theirs)


@pytest.mark.parametrize("name", SCRIPTS)
def test_stops_of_every_script(name):
    tokens, text = ids(SCRIPTS[name]), SCRIPTS[name]
    for start in range(0, len(text) - 2):
        stop = text[start : start + 2]
        result = scripted(tokens, stop)
        assert result == expected(tokens, [stop])
        assert stop not in result[1]


def test_a_text_that_ends_in_half_a_character():
    tokens = ids("A fox 🦊")[:-1]
    assert scripted(tokens, None)[1] == tokenizer().decode(tokens)
    assert "\ufffd" in scripted(tokens, "?")[1]


def test_two_generators_on_one_tokenizer_do_not_share_a_detokeniser():
    texts = (SCRIPTS["emoji"], SCRIPTS["cjk"])
    streams = [
        stream_generate(
            model(), tokenizer(), PROMPT, len(ids(text)), stop=["never"], **options(ids(text))
        )
        for text in texts
    ]
    joined = ["", ""]
    for turn in zip_longest(*streams):
        joined = [text + (r.text if r else "") for text, r in zip(joined, turn, strict=True)]
    assert tuple(joined) == texts

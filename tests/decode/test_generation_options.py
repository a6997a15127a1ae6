"""One object of options for commands and functions, with defaults that are written once."""

import dataclasses
import inspect

import mlx.core as mx
import pytest
from support.commands import options_of
from support.proposers import half
from support.tiny import DENSE, VOCAB, make_model, make_tokenizer, plain_tokens

from mlx_dflash2 import batch_generate, make_sampler, stream_generate
from mlx_dflash2.benchmark.arms import BenchSettings
from mlx_dflash2.decode import defaults
from mlx_dflash2.decode import generate as generating
from mlx_dflash2.decode.batch.generate import decode_batch
from mlx_dflash2.decode.generate import dflash_generate_step, generate_tokens, stream_text
from mlx_dflash2.decode.kv_quantization import KVQuantization
from mlx_dflash2.decode.options import GenerationOptions

PROMPT = list(range(5, 25))
FIELDS = {field.name: field for field in dataclasses.fields(GenerationOptions) if field.init}


def defaults_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.fixture(scope="module")
def model():
    return make_model(DENSE)


@pytest.fixture(scope="module")
def plain(model):
    return plain_tokens(model, PROMPT, 20)


def test_functions_have_the_defaults_of_the_object():
    steps = defaults_of(dflash_generate_step)
    # Ranks are compared by the commands alone.
    assert FIELDS.keys() - {"stop", "check_ranks"} <= steps.keys()
    for function in (dflash_generate_step, stream_generate):
        shared = FIELDS.keys() & defaults_of(function).keys() - {"stop"}
        assert shared
        for name in shared:
            assert defaults_of(function)[name] == FIELDS[name].default, name
    for function in (batch_generate, decode_batch):
        assert defaults_of(function)["max_tokens"] == defaults.BATCH_MAX_TOKENS
    batch = defaults_of(decode_batch)
    sizes = {
        batch["prefill_step_size"],
        steps["prefill_step_size"],
        BenchSettings.prefill_step_size,
    }
    assert len(sizes) == 1
    assert batch["completion_batch_size"] == defaults.COMPLETION_BATCH_SIZE


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_flags_have_the_defaults_of_the_object(name):
    args = vars(options_of(name).parse([]))
    assert args.pop("prefill_step_size") is None
    for option in FIELDS.keys() & args.keys() - {"max_tokens", "seed", "stop"}:
        assert args[option] == FIELDS[option].default, option
    assert args["max_tokens"] == getattr(defaults, f"{name.upper()}_MAX_TOKENS")


def test_options_are_frozen_and_copies_are_checked():
    options = GenerationOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=7)
    assert options.kv_quantization == KVQuantization(4, 32, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_tokens = 5
    other = dataclasses.replace(options, kv_bits=8)
    assert other.kv_quantization == KVQuantization(8, 32, 7) and options.kv_bits == 4
    with pytest.raises(ValueError, match="`kv_bits` is 7 but has to be one of"):
        dataclasses.replace(options, kv_bits=7)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_tokens": -2}, r"`max_tokens` is -2 but has to be -1 \(no limit\) or more"),
        ({"prefill_step_size": 0}, "`prefill_step_size` is 0 but has to be 1 or more"),
        ({"seed": -1}, "`seed` is -1 but has to be from 0"),
        ({"kv_bits": 7}, "`kv_bits` is 7 but has to be one of 2, 3, 4, 5, 6, 8"),
        ({"kv_bits": 4, "kv_group_size": 48}, "`kv_group_size` is 48 but has to be one of 32"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_wherever_it_is_given(options, message, model):
    drafter = half(PROMPT, VOCAB, 2)
    for call in (
        lambda: GenerationOptions(**options),
        lambda: GenerationOptions.for_text(**options),
        lambda: next(dflash_generate_step(mx.array(PROMPT), model, drafter, **options)),
        lambda: next(
            stream_generate(model, make_tokenizer(), PROMPT, draft_model=drafter, **options)
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["max_tokens", "prefill_step_size", "seed"])
def test_a_batch_refuses_the_same(name, model):
    # With the highest number for the first prompt the second one's is too high.
    value = 2**64 - 1 if name == "seed" else -2
    with pytest.raises(ValueError, match=f"`{name}` is .* but has to be"):
        batch_generate(
            model, make_tokenizer(), [PROMPT] * 2, draft_model=half(PROMPT, VOCAB, 2),
            **{name: value},
        )  # fmt: skip


def test_text_has_at_least_one_token():
    assert GenerationOptions(max_tokens=0).token_limit == 0
    assert GenerationOptions(max_tokens=-1).token_limit == float("inf")
    with pytest.raises(ValueError, match="`max_tokens` is 0 but has to be non-zero"):
        GenerationOptions.for_text(max_tokens=0)
    assert GenerationOptions.for_text(stop="a").stop == ("a",)
    assert GenerationOptions.for_text(stop=["a", "b"]).stop == ("a", "b")
    assert GenerationOptions.for_text().stop == ()


def test_an_unknown_option_is_an_error(model):
    drafter = half(PROMPT, VOCAB, 2)
    with pytest.raises(TypeError, match="tempo"):
        next(stream_generate(model, make_tokenizer(), PROMPT, draft_model=drafter, tempo=1))
    with pytest.raises(TypeError, match="tempo"):
        dflash_generate_step(mx.array(PROMPT), model, drafter, tempo=1)


def test_arguments_and_an_object_are_the_same(model, plain, monkeypatch):
    given = {
        "max_tokens": 12,
        "sampler": make_sampler(temp=1.0, top_k=20),
        "logits_processors": [lambda tokens, logits: logits],
        "seed": 3,
        "block_size": 4,
        "verify_width": 3,
        "max_kv_size": 64,
        "prefill_step_size": 7,
        "kv_bits": None,
        "kv_group_size": 32,
        "quantized_kv_start": 9,
    }
    assert given.keys() == FIELDS.keys() - {"stop", "check_ranks"}
    options, drafter, seen = GenerationOptions(**given), half(PROMPT + plain, VOCAB, 2), []

    def record(prompt, model, draft_model, options, *args, **kwargs):
        seen.append(options)
        return generate_tokens(prompt, model, draft_model, options, *args, **kwargs)

    monkeypatch.setattr(generating, "generate_tokens", record)
    tokens = [
        [token for token, *_ in dflash_generate_step(mx.array(PROMPT), model, drafter, **given)],
        [token for token, *_ in generate_tokens(mx.array(PROMPT), model, drafter, options)],
    ]
    texts = [
        stream_generate(model, make_tokenizer(), PROMPT, draft_model=drafter, **given),
        stream_text(model, make_tokenizer(), PROMPT, drafter, options),
    ]
    tokens += [[response.token for response in text] for text in texts]
    assert seen == [options] * 3
    assert tokens == [tokens[0]] * 4 and len(tokens[0]) == 12

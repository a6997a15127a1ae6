"""Arguments of the wrong kind: TypeError or ValueError in one line, before anything is decoded."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from support.tiny import make_drafter, make_model, make_tokenizer

import mlx_dflash2

MODEL, TOKENIZER, DRAFTER = make_model("qwen3"), make_tokenizer(), make_drafter()


def stream(prompt="w1 w2", model=MODEL, tokenizer=TOKENIZER, draft_model=DRAFTER, **kwargs):
    return list(
        mlx_dflash2.stream_generate(
            model, tokenizer, prompt, draft_model=draft_model, **{"max_tokens": 4} | kwargs
        )
    )


def batch(prompts=((1,), (2,)), draft_model=DRAFTER, **kwargs):
    return mlx_dflash2.batch_generate(
        MODEL, TOKENIZER, prompts, draft_model=draft_model, **{"max_tokens": 4} | kwargs
    )


def steps(prompt):
    return list(mlx_dflash2.dflash_generate_step(prompt, MODEL, DRAFTER, max_tokens=2))


# A call, its arguments, and what its error says.
WRONG = [
    (stream, {"draft_model": "some/path"}, r"`draft_model` is the path 'some/path'.*load_drafter"),
    (stream, {"draft_model": Path("x")}, "`draft_model` is the path 'x'"),
    (stream, {"draft_model": make_model("llama")}, "`draft_model` is a Model.*has no block_size"),
    (stream, {"model": DRAFTER}, "No target for model type 'Drafter'"),
    (stream, {"model": "m"}, "No target for model type 'str'"),
    (stream, {"tokenizer": "t"}, "`tokenizer` is a str"),
    (stream, {"model": TOKENIZER, "tokenizer": MODEL}, "`tokenizer` is a Model"),
    (stream, {"prompt": ""}, "`prompt` is empty"),
    (stream, {"prompt": []}, "`prompt` is empty"),
    (stream, {"prompt": mx.array([], mx.uint32)}, "`prompt` is empty"),
    (stream, {"prompt": [[1, 2]]}, r"`prompt` is of shape \(1, 2\)"),
    (stream, {"prompt": mx.array([[1, 2]])}, r"`prompt` is of shape \(1, 2\)"),
    (stream, {"prompt": mx.array(3)}, r"`prompt` is of shape \(\)"),
    (stream, {"prompt": ["a", "b"]}, "`prompt` holds 'a' at place 0"),
    (stream, {"prompt": [1, 1.5]}, "`prompt` holds 1.5 at place 1"),
    (stream, {"prompt": [True]}, "`prompt` holds True at place 0"),
    (stream, {"prompt": [1, -1]}, "`prompt` holds -1 at place 1"),
    (stream, {"prompt": [2**40]}, "`prompt` holds 1099511627776"),
    (stream, {"prompt": None}, "`prompt` is None"),
    (stream, {"prompt": b"abc"}, "`prompt` is b'abc'"),
    (stream, {"max_tokens": 2.5}, "`max_tokens` is 2.5"),
    (stream, {"max_tokens": "5"}, "`max_tokens` is '5'"),
    (stream, {"max_tokens": None}, "`max_tokens` is None"),
    (stream, {"max_tokens": True}, "`max_tokens` is True"),
    (stream, {"temp": 0.5}, r"`temp` is not an option.*sampler=make_sampler\(temp"),
    (stream, {"repetition_penalty": 2}, "logits_processors=make_logits_processors"),
    (stream, {"num_draft_tokens": 3}, "`num_draft_tokens` is not an option.*`block_size`"),
    (stream, {"foo": 3}, "`foo` is not an option"),
    (stream, {"sampler": 0.5}, "`sampler` is 0.5"),
    (stream, {"logits_processors": abs}, "`logits_processors` has to be a list"),
    (stream, {"logits_processors": [1]}, "`logits_processors` has to be a list"),
    (stream, {"prompt_cache": 5}, "`prompt_cache` is a int"),
    (stream, {"prompt_cache": [None] * 4}, "NoneType cannot be rolled back"),
    *((stream, {name: "x"}, f"`{name}` is 'x'") for name in (
        "seed", "block_size", "verify_width", "max_kv_size", "prefill_step_size", "kv_bits",
        "kv_group_size", "quantized_kv_start",
    )),
    (stream, {"verify_width": 2.5}, "`verify_width` is 2.5"),
    (batch, {"prompts": "w1 w2"}, "`prompts` has to be a list of prompts"),
    (batch, {"prompts": [1, 2, 3]}, "`prompts` has to be a list of prompts"),
    (batch, {"prompts": mx.array([1, 2])}, "`prompts` has to be a list of prompts"),
    (batch, {"prompts": None}, "`prompts` has to be a list of prompts"),
    (batch, {"prompts": [[1], []]}, "`prompt` is empty"),
    (batch, {"max_tokens": [3]}, "`max_tokens` has 1 entries"),
    (batch, {"max_tokens": 2.5}, "`max_tokens` is 2.5"),
    (batch, {"max_tokens": [2.5, 1]}, "`max_tokens` is 2.5"),
    (batch, {"prompt_caches": [[]]}, "`prompt_caches` has 1 entries"),
    (batch, {"draft_model": "x"}, "`draft_model` is the path 'x'"),
    (batch, {"temp": 0.5}, r"sampler=make_sampler\(temp"),
    (batch, {"num_draft_tokens": 3}, "`block_size`"),
    (steps, {"prompt": mx.array([[1]])}, r"`prompt` is of shape \(1, 1\)"),
    (steps, {"prompt": [1, 2]}, "`prompt` is a list"),
    (steps, {"prompt": "ab"}, "`prompt` is a str"),
    (mlx_dflash2.load_drafter, {"path_or_hf_repo": None}, "not a NoneType"),
    (mlx_dflash2.load, {"path_or_hf_repo": DRAFTER}, "not a Drafter"),
    (mlx_dflash2.DFlashPromptCache, {"model": MODEL, "draft_model": "x"}, "the path 'x'"),
    (mlx_dflash2.DFlashPromptCache, {"model": "m", "draft_model": DRAFTER}, "`model` is 'm'"),
]  # fmt: skip


@pytest.mark.parametrize("call, arguments, words", WRONG, ids=map(str, range(len(WRONG))))
def test_one_line(call, arguments, words):
    with pytest.raises((TypeError, ValueError)) as error:
        call(**arguments)
    assert "\n" not in str(error.value) and re.search(words, str(error.value)), error.value


@pytest.mark.parametrize("prompt", [mx.array([[1, 2]]), [mx.array([1, 2])], [(1, 2)]], ids=str)
def test_batches_of_any_sequences(prompt):
    assert batch(prompt).texts == batch([[1, 2]]).texts

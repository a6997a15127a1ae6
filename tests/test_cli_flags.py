"""Every flag of the command arrives where it has its effect, or is refused by name."""

import importlib

import mlx_lm
import pytest

from mlx_dflash2 import arguments
from mlx_dflash2.load_pair import Pair

command = importlib.import_module("mlx_dflash2.generate.command")
mlx_lm_command = importlib.import_module("mlx_lm.generate")
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"

# What each flag changes in loading, the prompt, the options or the output.
FLAGS = {
    "--model": (["other"], {"model": "other"}),
    "--draft-model": (["other"], {"draft_model": "other"}),
    "--draft-bits": (["4"], {"draft_bits": 4}),
    "--adapter-path": (["a"], {"adapter_path": "a"}),
    "--trust-remote-code": (
        [],
        {"tokenizer_config": {"trust_remote_code": True}, "trust_remote_code": True},
    ),
    "--quantize-activations": ([], {"model_config": {"quantize_activations": True}}),
    "--extra-eos-token": (["<|im_end|>", "7"], {"eos": {7, 509, 511}}),
    "--prompt": (["bye"], {"prompt": f"<s>{USER}bye<|im_end|>\n{ASSISTANT}"}),
    "--system-prompt": (
        ["Be kind."],
        {
            "prompt": f"<s><|im_start|>system\nBe kind.<|im_end|>\n{USER}hello<|im_end|>\n"
            f"{ASSISTANT}"
        },
    ),
    "--prefill-response": (
        ["Well,"],
        {"prompt": f"<s>{USER}hello<|im_end|>\n{ASSISTANT}Well,"},
    ),
    "--ignore-chat-template": ([], {"prompt": "<s>hello"}),
    "--chat-template-config": (
        ['{"effort": "low"}'],
        {"prompt": f"<s>{USER}hello<|im_end|>\n{ASSISTANT}[low]"},
    ),
    "--block-size": (["3"], {"block_size": 3}),
    "--verify-width": (["2"], {"verify_width": 2}),
    "--max-tokens": (["5"], {"max_tokens": 5}),
    "--stop": (["a", "b"], {"stop": ["a", "b"]}),
    "--temp": (["0.5"], {"temp": 0.5}),
    "--top-p": (["0.5"], {"top_p": 0.5}),
    "--min-p": (["0.5"], {"min_p": 0.5}),
    "--top-k": (["5"], {"top_k": 5}),
    "--xtc-probability": (["0.5"], {"xtc_probability": 0.5}),
    "--xtc-threshold": (["0.2"], {"xtc_threshold": 0.2}),
    "--min-tokens-to-keep": (["2"], {"min_tokens_to_keep": 2}),
    "--seed": (["7"], {"seed": 7}),
    "--repetition-penalty": (["1.5"], {"repetition_penalty": 1.5}),
    "--repetition-context-size": (["9"], {"repetition_context_size": 9}),
    "--presence-penalty": (["1.5"], {"presence_penalty": 1.5}),
    "--presence-context-size": (["9"], {"presence_context_size": 9}),
    "--frequency-penalty": (["1.5"], {"frequency_penalty": 1.5}),
    "--frequency-context-size": (["9"], {"frequency_context_size": 9}),
    "--logit-bias": (['{"3": -1}'], {"logit_bias": {3: -1.0}}),
    "--max-kv-size": (["64"], {"max_kv_size": 64}),
    "--prefill-step-size": (["16"], {"prefill_step_size": 16}),
    "--kv-bits": (["8"], {"kv_bits": 8}),
    "--kv-group-size": (["32"], {"kv_group_size": 32}),
    "--quantized-kv-start": (["9"], {"quantized_kv_start": 9}),
    "--verbose": (["False"], {"summary": False}),
}
# Tested below with real files.
FILES = {"--prompt-cache-file", "--save-prompt-cache"}
REFUSED = {"--image": ["a.png"], "--num-draft-tokens": ["3"], "--use-default-chat-template": []}


@pytest.fixture
def record(monkeypatch, invoke, saved_pair):
    """Runs the command without its models: everything that it passes on, by name."""

    def record(*args):
        seen = {}
        # Each run has its own wrapper: the command adds EOS tokens to it.
        tokenizer = mlx_lm.tokenizer_utils.TokenizerWrapper(
            saved_pair.tokenizer._tokenizer, eos_token_ids=[509]
        )

        def load_pair(model, draft_model, **kwargs):
            seen.update(model=model, draft_model=draft_model, **kwargs)
            return Pair("name", saved_pair.model, tokenizer, saved_pair.drafter)

        def make_sampler(xtc_special_tokens, **kwargs):
            assert set(xtc_special_tokens) >= set(tokenizer.eos_token_ids)
            seen.update(kwargs)
            return "the sampler"

        def make_logits_processors(**kwargs):
            seen.update(kwargs)
            return "the processors"

        def stream_generate(model, tokenizer, prompt, max_tokens, **kwargs):
            assert kwargs["sampler"] == "the sampler"
            assert kwargs["logits_processors"] == "the processors"
            seen.update(prompt=tokenizer.decode(prompt), max_tokens=max_tokens)
            seen.update({k: v for k, v in kwargs.items() if v is None or isinstance(v, int | list)})
            seen["eos"] = set(tokenizer.eos_token_ids)
            return iter(())

        monkeypatch.setattr(command, "load_pair", load_pair)
        monkeypatch.setattr(command, "stream_generate", stream_generate)
        monkeypatch.setattr(arguments, "make_sampler", make_sampler)
        monkeypatch.setattr(arguments, "make_logits_processors", make_logits_processors)
        status, _, err = invoke(*args)
        assert status == 0, err
        return seen | {"summary": "Drafting:" in err}

    return record


def test_every_flag_is_in_a_table():
    actions = command.setup_arg_parser()._actions
    flags = {next(o for o in a.option_strings if o.startswith("--")) for a in actions}
    assert flags - {"--help"} == set(FLAGS) | FILES | set(REFUSED)


def test_every_flag_of_mlx_lm_is_known():
    theirs = {o for a in mlx_lm_command.setup_arg_parser()._actions for o in a.option_strings}
    ours = {o for a in command.setup_arg_parser()._actions for o in a.option_strings}
    assert theirs <= ours


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_has_an_effect(record, flag):
    values, effect = FLAGS[flag]
    before, after = record(), record(flag, *values)
    assert before.keys() == after.keys() >= effect.keys()
    assert {name: value for name, value in after.items() if before[name] != value} == effect


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_without_a_meaning_here_are_refused(invoke, flag):
    status, out, err = invoke(flag, *REFUSED[flag])
    assert status == 2 and not out
    assert f"{flag} is not supported: " in err.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--temperature", "--draft-blocks", "--no-such-flag"])
def test_unknown_flags_are_errors(invoke, flag):
    status, out, err = invoke(flag, "1")
    assert status == 2 and not out
    assert f"unrecognized arguments: {flag} 1" in err


def test_a_saved_prompt_cache_goes_on_as_in_mlx_lm(invoke, model_folders, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    status, _, err = invoke("-p", "first", "-m", "6", "--save-prompt-cache", file)
    assert status == 0, err
    args = ("-p", "second", "-m", "7", "--prompt-cache-file", file)
    status, ours, err = invoke(*args)
    assert status == 0, err
    model = ("--model", f"{model_folders / 'target'}", "--verbose", "F")
    _, theirs, _ = invoke(*model, *args, main=mlx_lm_command.main)
    assert ours == theirs != invoke("-p", "second", "-m", "7")[1]


def test_a_prompt_cache_of_another_model_is_refused(invoke, model_folders, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    assert invoke("-m", "2", "--save-prompt-cache", file)[0] == 0
    other = ("--model", f"{model_folders / 'raw'}")
    status, out, err = invoke(*other, "--prompt-cache-file", file)
    assert status == 1 and not out
    assert err.startswith("error: `--model` is ") and err.count("\n") == 1

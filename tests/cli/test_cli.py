"""The command in-process: prompts are mlx-lm's, stdout is the text, errors take one line."""

import importlib
import io
import sys
from contextlib import nullcontext

import mlx_lm
import pytest
from support.commands import main_of
from support.folders import no_weights_read
from support.saved_models import embedded_target

from mlx_dflash2 import __main__ as cli
from mlx_dflash2 import __version__

command = importlib.import_module("mlx_dflash2.generate.command")
mlx_lm_command = importlib.import_module("mlx_lm.generate")


PROMPTS = {
    "plain": ["-p", "Hello there"],
    "escapes": ["-p", r"a\nb\tc"],
    "stdin": ["-p", "-"],
    "empty": ["-p", ""],
    "starts with bos": ["-p", "<s>Hello"],
    "ignored template": ["--ignore-chat-template", "-p", "Hello"],
    "ignored template, bos": ["--ignore-chat-template", "-p", "<s>Hello"],
}
TEMPLATED = {
    "system": ["--system-prompt", "Be kind."],
    "empty system": ["--system-prompt", ""],
    "prefill": ["--prefill-response", "Sure, "],
    "thinking": ["--chat-template-config", '{"enable_thinking": true}'],
    "no thinking": ["--chat-template-config", '{"enable_thinking": false, "effort": "high"}'],
    "all": ["-p", "-", "--system-prompt=S", "--prefill-response=P"],
}
CASES = [(t, name) for t in ("target", "raw") for name in PROMPTS] + [
    (t, name) for t in ("target", "embedded") for name in TEMPLATED
]


@pytest.mark.parametrize("target, case", CASES)
def test_prompt_ids_are_those_of_mlx_lm(monkeypatch, invoke, model_folders, target, case):
    args = (PROMPTS | TEMPLATED)[case]
    path = embedded_target() if target == "embedded" else model_folders / target
    seen = []

    def capture(model, tokenizer, prompt, *_, **__):
        seen.append(list(prompt))
        return ""

    monkeypatch.setattr(command, "stream_text", capture)
    monkeypatch.setattr(mlx_lm_command, "generate", capture)
    for main in (mlx_lm_command.main, main_of("generate")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("line one\nline \\n two\n"))
        # The embedded target has a drafter of its own.
        named = main is main_of("generate") and target != "embedded"
        extra = ["--draft-model", f"{model_folders / 'drafter'}"] if named else []
        status, _, err = invoke("--model", f"{path}", *extra, *args, main=main)
        assert status == 0, err
    theirs, ours = seen
    assert ours == theirs
    assert ours


def test_stdout_is_the_text_alone(invoke, saved_pair):
    prompt = [*saved_pair.tokenizer.encode("hello")]
    expected = mlx_lm.generate(saved_pair.model, saved_pair.tokenizer, prompt, max_tokens=9)
    args = ("--ignore-chat-template", "-p", "hello", "-m", "9")
    status, out, err = invoke(*args)
    assert (status, out) == (0, expected + "\n")
    lines = err.splitlines()
    assert any(line.startswith("Generation: 9 tokens") for line in lines)
    assert any("block 4, verify width 16" in line for line in lines)
    assert invoke(*args, "--verbose", "F") == (0, expected + "\n", "")
    _, out, err = invoke(*args, "--block-size", "3", "--verify-width", "2")
    assert out == expected + "\n" and "block 3, verify width 2" in err


def test_extra_eos_token_ends_the_text(invoke, saved_pair):
    prompt = saved_pair.tokenizer.encode("hello")
    tokens = [
        r.token for r in mlx_lm.stream_generate(saved_pair.model, saved_pair.tokenizer, prompt, 9)
    ]
    stop = tokens[4]
    args = ("--ignore-chat-template", "-p", "hello", "-m", "9", "--extra-eos-token", f"{stop}")
    _, out, err = invoke(*args)
    assert out == saved_pair.tokenizer.decode(tokens[: tokens.index(stop)]) + "\n"
    assert f"Generation: {tokens.index(stop) + 1} tokens" in err


ERRORS = {
    "drafter as target": (["--model", "{drafter}"], "drafter, given as the model, is a drafter"),
    "target as drafter": (
        ["--draft-model", "{target}"],
        "target, given as the draft model, is not a DFlash",
    ),
    "empty folder": (["--draft-model", "{empty}"], "has no config.json"),
    "empty target": (["--model", "{empty}"], "has no config.json"),
    "file": (["--draft-model", "{target}/config.json"], "is a file"),
    "file as target": (["--model", "{target}/config.json"], "is a file"),
    "only a config": (["--model", "{config-only}"], "has a config.json but no model*.safetensors"),
    "not there": (["--draft-model", "no/such/folder"], "neither a local folder nor"),
    "block size": (["--block-size", "5"], "--block-size is 5 but has to be from 1 to 4"),
    "verify width": (["--verify-width", "0"], "--verify-width is 0 but has to be from 1"),
    "max tokens": (["-m", "0"], "--max-tokens is 0 but has to be non-zero"),
    "step size": (["--prefill-step-size", "0"], "--prefill-step-size is 0 but has to be 1"),
    "adapter": (["--adapter-path", "{empty}/none"], "adapter"),
    "system prompt without template": (
        ["--ignore-chat-template", "--system-prompt", "x"],
        "--system-prompt is given but no chat template is used",
    ),
    "template argument": (
        ["--chat-template-config", '{"messages": 1}'],
        "The chat template does not take this prompt: ",
    ),
    "template refuses": (
        ["--system-prompt", "forbidden"],
        "The chat template does not take this prompt: Not this.",
    ),
}


# What mlx-lm or the tokenizer refuses is known once the models are loaded.
AFTER_LOADING = (
    "adapter",
    "system prompt without template",
    "template argument",
    "template refuses",
)


@pytest.mark.parametrize("case", ERRORS)
def test_errors_take_one_line(invoke, model_folders, case):
    args, message = ERRORS[case]
    args = [arg if "{" not in arg or '"' in arg else _fill(arg, model_folders) for arg in args]
    with nullcontext() if case in AFTER_LOADING else no_weights_read():
        status, out, err = invoke(*args)
    assert status == 1 and not out.strip()
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def _fill(argument, folders):
    for path in folders.iterdir():
        argument = argument.replace("{" + path.name + "}", str(path))
    return argument


@pytest.mark.parametrize("value", ["[1]", "{", "1", '"a"'])
def test_template_config_has_to_be_an_object(invoke, value):
    status, _, err = invoke("--chat-template-config", value)
    assert status == 2 and "--chat-template-config" in err.splitlines()[-1]


def test_dispatcher(invoke):
    assert invoke("--version", main=cli.main) == (0, f"{__version__}\n", "")
    for args in (["-h"], ["--help"]):
        status, out, _ = invoke(*args, main=cli.main)
        assert status == 0 and all(name in out for name in cli.COMMANDS)
    for args in ([], ["nonsense"]):
        status, out, err = invoke(*args, main=cli.main)
        assert status == 2 and not out and "usage: mlx_dflash2" in err
    status, out, _ = invoke("generate", "--help", main=cli.main)
    assert status == 0 and "--draft-model" in out

"""The command in-process: every flag has an effect, errors take one line, stdout is the text."""

import importlib
import io
import sys
import time

import mlx.core as mx
import mlx_lm
import pytest
from saved_models import embedded_target, save_drafter, save_target

from mlx_dflash2 import __version__, cli, load_drafter
from mlx_dflash2.load_pair import Pair

command = importlib.import_module("mlx_dflash2.generate.command")
mlx_lm_command = importlib.import_module("mlx_lm.generate")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_target(path / "target")
    save_target(path / "raw", chat_template=None)
    save_drafter(path / "drafter")
    (path / "empty").mkdir()
    (path / "config-only").mkdir()
    (path / "config-only" / "config.json").write_text('{"model_type": "qwen3"}')
    return path


@pytest.fixture(scope="module")
def pair(folders):
    target = mlx_lm.load(str(folders / "target"))
    return Pair(*target, load_drafter(folders / "drafter"))


@pytest.fixture
def invoke(monkeypatch, capsys, folders):
    """Runs a command's main with arguments; its exit status, stdout and stderr."""

    def invoke(*args, main=command.main, target="target"):
        if main is command.main and target:
            args = (
                "--model",
                f"{folders / target}",
                "--draft-model",
                f"{folders / 'drafter'}",
                *args,
            )
        monkeypatch.setattr(sys, "argv", ["mlx_dflash2", *args])
        status = 0
        try:
            main()
        except SystemExit as error:
            # What the interpreter does with a message.
            status = error.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        return status or 0, *capsys.readouterr()

    return invoke


# What each flag adds to the prompt, to loading or to decoding, beside a run without it.
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
    "--prompt": (
        ["bye"],
        {"prompt": "<s><|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"},
    ),
    "--system-prompt": (
        ["Be kind."],
        {
            "prompt": "<s><|im_start|>system\nBe kind.<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        },
    ),
    "--prefill-response": (
        ["Well,"],
        {"prompt": "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nWell,"},
    ),
    "--ignore-chat-template": ([], {"prompt": "<s>hello"}),
    "--chat-template-config": (
        ['{"effort": "low"}'],
        {"prompt": "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[low]"},
    ),
    "--block-size": (["3"], {"block_size": 3}),
    "--verify-width": (["2"], {"verify_width": 2}),
    "--max-tokens": (["5"], {"max_tokens": 5}),
    "--prefill-step-size": (["16"], {"prefill_step_size": 16}),
    "--seed": (["7"], {"seed": 7}),
    "--verbose": (["False"], {"summary": False}),
}


@pytest.fixture
def record(monkeypatch, invoke, pair):
    """Runs the command without its models; everything that it passes on."""

    def record(*args):
        seen = {}
        # Each run has its own wrapper: the command adds EOS tokens to it.
        tokenizer = mlx_lm.tokenizer_utils.TokenizerWrapper(
            pair.tokenizer._tokenizer, eos_token_ids=[511]
        )

        def load_pair(model, draft_model, **kwargs):
            seen.update(model=model, draft_model=draft_model, **kwargs)
            return Pair(pair.model, tokenizer, pair.drafter)

        def stream_generate(model, tokenizer, prompt, max_tokens, **kwargs):
            seen["prompt"], seen["max_tokens"] = tokenizer.decode(prompt), max_tokens
            seen["eos"] = set(tokenizer.eos_token_ids)
            passed = ("block_size", "verify_width", "prefill_step_size")
            seen.update({name: kwargs[name] for name in passed})
            return iter(())

        monkeypatch.setattr(command, "load_pair", load_pair)
        monkeypatch.setattr(command, "stream_generate", stream_generate)
        monkeypatch.setattr(mx.random, "seed", lambda value: seen.update(seed=value))
        status, _, err = invoke(*args)
        assert status == 0, err
        return seen | {"summary": "Drafting:" in err}

    return record


def test_every_flag_is_in_the_table():
    actions = command.setup_arg_parser()._actions
    flags = {next(o for o in a.option_strings if o.startswith("--")) for a in actions}
    assert flags - {"--help"} == set(FLAGS)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_has_an_effect(record, flag):
    values, effect = FLAGS[flag]
    before, after = record(), record(flag, *values)
    assert {name: value for name, value in after.items() if before.get(name) != value} == effect


@pytest.mark.parametrize(
    "flag", ["--temp", "--top-p", "--kv-bits", "--num-draft-tokens", "--image"]
)
def test_unknown_flags_are_errors(invoke, flag):
    status, out, err = invoke(flag, "1")
    assert status == 2 and not out
    assert f"unrecognized arguments: {flag} 1" in err


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
def test_prompt_ids_are_those_of_mlx_lm(monkeypatch, invoke, folders, target, case):
    args = (PROMPTS | TEMPLATED)[case]
    path = embedded_target() if target == "embedded" else folders / target
    seen = []

    def capture(model, tokenizer, prompt, *_, **__):
        seen.append(list(prompt))
        return ""

    monkeypatch.setattr(command, "stream_generate", capture)
    monkeypatch.setattr(mlx_lm_command, "generate", capture)
    for main in (mlx_lm_command.main, command.main):
        monkeypatch.setattr(sys, "stdin", io.StringIO("line one\nline \\n two\n"))
        extra = ["--draft-model", f"{folders / 'drafter'}"] if main is command.main else []
        status, _, err = invoke("--model", f"{path}", *extra, *args, main=main, target=None)
        assert status == 0, err
    theirs, ours = seen
    assert ours == theirs
    assert ours


def test_stdout_is_the_text_alone(invoke, pair):
    prompt = [*pair.tokenizer.encode("hello")]
    expected = mlx_lm.generate(pair.model, pair.tokenizer, prompt, max_tokens=9)
    args = ("--ignore-chat-template", "-p", "hello", "-m", "9")
    status, out, err = invoke(*args)
    assert (status, out) == (0, expected + "\n")
    lines = err.splitlines()
    assert any(line.startswith("Generation: 9 tokens") for line in lines)
    assert any("block 4, verify width 4" in line for line in lines)
    assert invoke(*args, "--verbose", "F") == (0, expected + "\n", "")
    _, out, err = invoke(*args, "--block-size", "3", "--verify-width", "2")
    assert out == expected + "\n" and "block 3, verify width 2" in err


def test_extra_eos_token_ends_the_text(invoke, pair):
    prompt = pair.tokenizer.encode("hello")
    tokens = [r.token for r in mlx_lm.stream_generate(pair.model, pair.tokenizer, prompt, 9)]
    stop = tokens[4]
    args = ("--ignore-chat-template", "-p", "hello", "-m", "9", "--extra-eos-token", f"{stop}")
    _, out, err = invoke(*args)
    assert out == pair.tokenizer.decode(tokens[: tokens.index(stop)]) + "\n"
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
    "block size": (["--block-size", "5"], "`block_size` is 5 but has to be from 1 to 4"),
    "verify width": (["--verify-width", "1"], "`verify_width` is 1 but has to be from 2"),
    "max tokens": (["-m", "0"], "`max_tokens` has to be"),
    "step size": (["--prefill-step-size", "0"], "`prefill_step_size` has to be 1 or more"),
    "adapter": (["--adapter-path", "{empty}/none"], "adapter"),
    "system prompt without template": (
        ["--ignore-chat-template", "--system-prompt", "x"],
        "`system_prompt` is given but no chat template is used",
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


@pytest.mark.parametrize("case", ERRORS)
def test_errors_take_one_line(invoke, folders, case):
    args, message = ERRORS[case]
    args = [arg if "{" not in arg or '"' in arg else _fill(arg, folders) for arg in args]
    start = time.perf_counter()
    status, out, err = invoke(*args)
    assert time.perf_counter() - start < 2
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
        assert status == 1 and not out and "usage: mlx_dflash2" in err
    status, out, _ = invoke("generate", "--help", main=cli.main)
    assert status == 0 and "--draft-model" in out

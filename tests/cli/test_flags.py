"""Every flag of mlx_lm.generate and mlx_lm.chat works here as there, or is refused by name."""

import importlib
import io
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.commands import main_of, options_of

from mlx_dflash2 import DFlashPromptCache
from mlx_dflash2.cli import build
from mlx_dflash2.pairs.find import PairSources
from mlx_dflash2.pairs.load import Pair

generate = importlib.import_module("mlx_dflash2.generate.command")
chat = importlib.import_module("mlx_dflash2.chat.command")
conversation = importlib.import_module("mlx_dflash2.chat.conversation")
their_generate = importlib.import_module("mlx_lm.generate")
their_chat = importlib.import_module("mlx_lm.chat")

HELLO = "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
KIND = "<s><|im_start|>system\nBe kind.<|im_end|>\n" + HELLO.removeprefix("<s>")

# What each flag changes of what is loaded, prompted and decoded, beside a run without it.
COMMON = {
    "--model": (["other"], {"model": "other"}),
    "--draft-model": (["other"], {"draft_model": "other"}),
    "--draft-bits": (["4"], {"draft_bits": 4}),
    "--revision": (["abc"], {"revision": "abc"}),
    "--adapter-path": (["a"], {"adapter_path": "a"}),
    "--trust-remote-code": (
        [],
        {"tokenizer_config": {"trust_remote_code": True}, "trust_remote_code": True},
    ),
    "--quantize-activations": ([], {"model_config": {"quantize_activations": True}}),
    # With two EOS tokens.
    "--draft-vocab": (["9"], {"drafted": 11}),
    "--dense": ([], {"lazy": True, "unpacked": 2}),
    "--no-kernels": ([], {"kernels": "off"}),
    "--check-ranks": ([], {"check_ranks": True}),
    "--extra-eos-token": (["<|im_end|>", "7"], {"eos": {7, 509, 511}}),
    "--system-prompt": (["Be kind."], {"prompt": KIND}),
    "--chat-template-config": (['{"effort": "low"}'], {"prompt": HELLO + "[low]"}),
    "--copy-drafts": (["only"], {"copy_drafts": "only"}),
    "--block-size": (["3"], {"block_size": 3}),
    "--verify-width": (["2"], {"verify_width": 2}),
    "--max-tokens": (["5"], {"max_tokens": 5}),
    "--temp": (["0.7"], {"temp": 0.7}),
    "--top-p": (["0.9"], {"top_p": 0.9}),
    "--min-p": (["0.1"], {"min_p": 0.1}),
    "--top-k": (["9"], {"top_k": 9}),
    "--xtc-probability": (["0.5"], {"xtc_probability": 0.5}),
    "--xtc-threshold": (["0.2"], {"xtc_threshold": 0.2}),
    "--min-tokens-to-keep": (["3"], {"min_tokens_to_keep": 3}),
    "--logit-bias": (['{"7": 3.5, "9": -1}'], {"logit_bias": {7: 3.5, 9: -1.0}}),
    "--repetition-penalty": (["1.1"], {"repetition_penalty": 1.1}),
    "--repetition-context-size": (["5"], {"repetition_context_size": 5}),
    "--presence-penalty": (["0.3"], {"presence_penalty": 0.3}),
    "--presence-context-size": (["6"], {"presence_context_size": 6}),
    "--frequency-penalty": (["0.4"], {"frequency_penalty": 0.4}),
    "--frequency-context-size": (["7"], {"frequency_context_size": 7}),
    "--max-kv-size": (["64"], {"max_kv_size": 64}),
    "--prefill-step-size": (["16"], {"prefill_step_size": 16}),
    "--kv-bits": (["4"], {"kv_bits": 4}),
    "--kv-group-size": (["32"], {"kv_group_size": 32}),
    "--quantized-kv-start": (["9"], {"quantized_kv_start": 9}),
    "--stop": (["a", "b"], {"stop": ("a", "b")}),
}
GENERATE = COMMON | {
    "--prompt": (["bye"], {"prompt": HELLO.replace("hello", "bye")}),
    "--prefill-response": (["Well,"], {"prompt": HELLO + "Well,"}),
    "--ignore-chat-template": ([], {"prompt": "<s>hello"}),
    "--seed": (["7"], {"seed": 7}),
    "--verbose": (["False"], {"summary": False}),
}
# The draws go on from turn to turn, so the seed is set once, and a fixed width repeats them.
CHAT = COMMON | {"--seed": (["7"], {"global seed": 7, "verify_width": 4})}
FILES = {"--prompt-cache-file", "--save-prompt-cache"}
# tests/cli/test_grammar_flags.py has their tests.
GRAMMARS = {"--json-schema", "--regex", "--grammar"}
# It acts before there is a parser; tests/blas has its tests.
AT_START = {"--no-fast-blas"}

# Defaults that are not mlx-lm's, and why.
OTHER_DEFAULTS = {
    (their_chat, "--model"): "without a model both commands use the embedded pair",
    (their_chat, "--seed"): "without a seed draws differ from run to run, as in mlx_lm.generate",
    (their_chat, "--prefill-step-size"): "on the CPU backend steps are smaller",
    (their_generate, "--prefill-step-size"): "on the CPU backend steps are smaller",
}
REFUSED = {
    (generate, "--image"): "images are not drafted for",
    (generate, "--num-draft-tokens"): "a DFlash drafter drafts a block",
    (generate, "--use-default-chat-template"): "it has no effect in mlx-lm either",
    (chat, "--pipeline"): "distributed decoding does not draft",
}
# Options that are objects; their settings are compared instead.
OBJECTS = {"logits_processors", "sampler", "kv_quantization"}
PARSERS = {generate: their_generate, chat: their_chat}


def parser_of(module):
    """The parser of one of our commands, or of mlx-lm's."""
    if module in PARSERS:
        module = options_of(name_of(module))
    return module.setup_arg_parser()


def name_of(module):
    return module.__name__.split(".")[1]


def flags_of(module):
    actions = parser_of(module)._actions
    return {
        a.option_strings[0]: a for a in actions if not {"--help", "--version"} & {*a.option_strings}
    }


def ids(value):
    return value.__name__.split(".")[-2] if hasattr(value, "__name__") else None


@pytest.fixture
def invoke(monkeypatch, invoke):
    """Runs a command's main with a message on stdin; its exit status, stdout and stderr."""

    def run(module, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nq\n"))
        return invoke(*map(str, args), main=main_of(name_of(module)))

    return run


@pytest.fixture
def given_pair(monkeypatch, saved_pair):
    """Lets commands use the saved pair, whatever their arguments name."""
    sources = PairSources(None, SimpleNamespace(name="drafter"))
    for module in PARSERS:
        monkeypatch.setattr(module, "find_pair", lambda *_, **__: sources)
    monkeypatch.setattr(build, "load_pair", lambda *_, **__: saved_pair)
    monkeypatch.setattr(build, "pending_downloads", lambda _: [])
    return saved_pair


@pytest.fixture
def record(monkeypatch, invoke, saved_pair):
    """Runs a command without its models; everything that it passes on."""

    def record(module, *args):
        seen = {"unpacked": 0, "global seed": None, "kernels": "on"}
        # Each run has its own wrapper: the command adds EOS tokens to it.
        tokenizer = TokenizerWrapper(saved_pair.tokenizer._tokenizer, eos_token_ids=[511])

        def find(model, draft_model, **kwargs):
            seen.update(kwargs, model=model, draft_model=draft_model)
            return PairSources(None, SimpleNamespace(name="drafter"))

        def load(_, **kwargs):
            seen.update(kwargs)
            saved_pair.drafter.frequent_tokens = None
            return Pair("tiny", saved_pair.model, tokenizer, saved_pair.drafter)

        def stream_text(model, tokenizer, prompt, draft_model, options, **_):
            prompt = prompt.tolist() if isinstance(prompt, mx.array) else prompt
            seen.update(prompt=tokenizer.decode(prompt), eos=set(tokenizer.eos_token_ids))
            frequent = saved_pair.drafter.frequent_tokens
            seen.update(drafted=None if frequent is None else len(frequent.ids))
            seen.update(vars(options.sampler))
            del seen["xtc_special_tokens"]
            options = {name: value for name, value in vars(options).items() if name not in OBJECTS}
            # In a chat the conversation's caches have taken it.
            if "max_kv_size" in seen:
                del options["max_kv_size"]
            seen.update(options)
            yield from ()

        def make_session(model, draft_model, max_kv_size):
            seen["max_kv_size"] = max_kv_size
            return DFlashPromptCache(model, draft_model, max_kv_size)

        place = generate if module is generate else conversation
        monkeypatch.setattr(module, "find_pair", find)
        monkeypatch.setattr(build, "load_pair", load)
        monkeypatch.setattr(build, "pending_downloads", lambda _: [])
        monkeypatch.setattr(build, "unpack", lambda *models: seen.update(unpacked=len(models)))
        monkeypatch.setattr(build, "switch_off", lambda: seen.update(kernels="off"))
        monkeypatch.setattr(place, "stream_text", stream_text)
        monkeypatch.setattr(place, "DFlashPromptCache", make_session)
        monkeypatch.setattr(build, "make_logits_processors", lambda **kw: seen.update(kw))
        monkeypatch.setattr(mx.random, "seed", lambda value: seen.update({"global seed": value}))
        status, _, err = invoke(module, *args)
        assert status == 0, err
        return seen | {"summary": "Drafting:" in err}

    return record


@pytest.mark.parametrize("module", PARSERS, ids=ids)
def test_every_flag_of_mlx_lm_is_here(module):
    """In every spelling, with the same default; or it is refused."""
    ours, theirs = flags_of(module), flags_of(PARSERS[module])
    assert len(theirs) > 10
    for flag, action in theirs.items():
        if (module, flag) in REFUSED:
            continue
        assert set(action.option_strings) <= set(ours[flag].option_strings), flag
        assert ours[flag].dest == action.dest
        if (PARSERS[module], flag) in OTHER_DEFAULTS:
            assert ours[flag].default != action.default
        else:
            assert ours[flag].default == action.default, flag


@pytest.mark.parametrize("module, table", [(generate, GENERATE), (chat, CHAT)], ids=ids)
def test_every_flag_is_in_a_table(module, table):
    refused = {flag for owner, flag in REFUSED if owner is module}
    files = FILES | GRAMMARS if module is generate else set()
    assert set(flags_of(module)) == set(table) | refused | files | AT_START


@pytest.mark.parametrize(
    "module, flag",
    [(generate, flag) for flag in GENERATE] + [(chat, flag) for flag in CHAT],
    ids=ids,
)
def test_every_flag_reaches_what_it_is_for(record, module, flag):
    values, effect = (GENERATE if module is generate else CHAT)[flag]
    before, after = record(module), record(module, flag, *values)
    assert {name: value for name, value in after.items() if before[name] != value} == effect


@pytest.mark.parametrize("module, table", [(generate, GENERATE), (chat, CHAT)], ids=ids)
def test_values_are_read_as_mlx_lm_reads_them(module, table):
    theirs = flags_of(PARSERS[module])
    for flag in theirs.keys() & table.keys():
        if flag == "--chat-template-config":
            # mlx-lm reads the JSON only once the models are loaded.
            continue
        args, dest = [flag, *table[flag][0]], theirs[flag].dest
        ours = getattr(parser_of(module).parse_args(args), dest)
        assert ours == getattr(PARSERS[module].setup_arg_parser().parse_args(args), dest)


@pytest.mark.parametrize("module, flag", REFUSED, ids=ids)
def test_what_has_no_meaning_here_is_refused_by_name(invoke, module, flag):
    for values in ([], ["3"]):
        status, out, err = invoke(module, flag, *values)
        assert status == 2 and not out
        assert f"error: {flag} is not supported: {REFUSED[module, flag]}" in err


@pytest.mark.parametrize("module", PARSERS, ids=ids)
def test_other_flags_are_errors(invoke, module):
    status, out, err = invoke(module, "--no-such-flag", "1")
    assert status == 2 and not out and "unrecognized arguments: --no-such-flag 1" in err


BAD = {
    "--logit-bias": ["x", "[1]", '{"a": 1}', '{"7": "b"}', '{"7": null}'],
    "--chat-template-config": ["x", "[1]", "3"],
    "--draft-bits": ["5", "x"],
    "--max-tokens": ["x"],
    "--kv-bits": ["4.5"],
}


@pytest.mark.parametrize("module", PARSERS, ids=ids)
@pytest.mark.parametrize("flag, value", [(flag, v) for flag in BAD for v in BAD[flag]])
def test_values_that_cannot_be_read_are_errors(invoke, module, flag, value):
    status, out, err = invoke(module, flag, value)
    assert status == 2 and not out and f"error: argument {flag}" in err


LATE = {
    "--top-p": ("1.5", "--top-p is 1.5 but has to be from 0.0 to 1.0"),
    "--temp": ("-1", "--temp is -1.0 but has to be from 0.0"),
    "--xtc-threshold": ("0.6", "--xtc-threshold is 0.6 but has to be"),
    "--logit-bias": ('{"512": 1}', "--logit-bias names token 512 but has to name tokens from 0"),
    "--kv-bits": ("7", "--kv-bits is 7 but has to be one of 2, 3"),
    "--block-size": ("9", "--block-size is 9"),
    "--stop": ("", "--stop holds '' but has to hold non-empty strings"),
}


@pytest.mark.parametrize("module", PARSERS, ids=ids)
@pytest.mark.parametrize("flag", LATE)
def test_values_out_of_range_take_one_line(invoke, given_pair, module, flag):
    value, message = LATE[flag]
    status, out, err = invoke(module, flag, value)
    assert status == 1 and not out
    assert err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1]


@pytest.mark.parametrize("module", PARSERS, ids=ids)
def test_xtc_spares_newlines_and_eos_tokens_as_in_mlx_lm(module, saved_pair):
    args = parser_of(module).parse_args(["--temp", "1", "--xtc-probability", "0.5"])
    options, tokenizer = build.generation_options(args), saved_pair.tokenizer
    assert options.sampler.xtc_special_tokens == ()
    sampler = build.fit_to_tokenizer(options, tokenizer).sampler
    assert set(sampler.xtc_special_tokens) == {*tokenizer.encode("\n"), *tokenizer.eos_token_ids}
    assert len(sampler.xtc_special_tokens) >= 2 and sampler.xtc_probability == 0.5


def test_bias_and_penalties_change_the_text_as_in_mlx_lm(invoke, given_pair):
    """The processors of the flags are those of mlx-lm's function."""
    prompt = given_pair.tokenizer.encode(HELLO, add_special_tokens=False)
    _, without, _ = invoke(generate, "-m", "12")
    values = {"logit_bias": {7: 9.0}, "repetition_penalty": 9.0}
    values |= {"presence_penalty": 6.0, "frequency_penalty": 2.5}
    for name, value in values.items():
        processors = mlx_lm.sample_utils.make_logits_processors(**{name: value})
        expected = mlx_lm.generate(
            given_pair.model,
            given_pair.tokenizer,
            prompt,
            max_tokens=12,
            logits_processors=processors,
        )
        argument = '{"7": 9.0}' if name == "logit_bias" else value
        flag = f"--{name.replace('_', '-')}"
        assert invoke(generate, "-m", "12", flag, argument)[1] == expected + "\n" != without

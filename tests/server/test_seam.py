"""What this server takes from mlx_lm.server is as it was when it was written."""

import inspect
from importlib import import_module

from mlx_lm.generate import TextStateMachine
from mlx_lm.models.cache import LRUPromptCache
from support.serving import chat

theirs = import_module("mlx_lm.server")


def names(function):
    return list(inspect.signature(function).parameters)


def test_signatures():
    provider, generator, handler = (
        theirs.ModelProvider,
        theirs.ResponseGenerator,
        theirs.APIHandler,
    )
    assert names(provider.__init__) == ["self", "cli_args"]
    for method in (provider._load, provider.load):
        assert names(method) == ["self", "model_path", "adapter_path", "draft_model_path"]
    assert names(provider.reset) == names(provider.load_default) == ["self"]
    assert names(generator.__init__) == ["self", "model_provider", "prompt_cache"]
    assert names(generator._generate) == names(generator.stop_and_join) == ["self"]
    assert names(generator._tokenize) == ["self", "tokenizer", "request", "args"]
    machine = ["self", "model_key", "tokenizer", "stop_words"]
    assert names(generator._make_state_machine) == machine
    assert isinstance(generator.is_healthy, property)
    assert names(handler.__init__)[:2] == ["self", "response_generator"]
    assert "system_fingerprint" in names(handler.__init__)
    assert names(theirs.get_system_fingerprint) == []


def test_the_prompt_cache():
    assert names(LRUPromptCache.__init__) == ["self", "max_size", "max_bytes"]
    assert names(LRUPromptCache.fetch_nearest_cache) == ["self", "model", "tokens"]
    keeps = ["self", "model", "tokens", "prompt_cache", "cache_type"]
    assert names(LRUPromptCache.insert_cache) == keeps
    assert "n_bytes" in names(LRUPromptCache.trim_to)
    assert list(LRUPromptCache().stats_by_type()) == ["assistant", "user", "system"]


def test_the_text_state_machine():
    machine = TextStateMachine({"normal": [("<a>", "tool")], "tool": [("</a>", "normal")]})
    state, segments = TextStateMachine.split(machine.make_state("normal"), "x<a>y</a>z<")
    assert segments == [("normal", "x"), ("tool", "y"), ("normal", "z")]
    state, rest, name = TextStateMachine.flush(state)
    assert (rest, name) == ("<", "normal")


def test_nothing_is_patched(serve):
    """Classes and functions of mlx-lm are the same objects while a server runs and afterwards."""
    modules = [theirs, import_module("mlx_lm.generate"), import_module("mlx_lm.models.cache")]

    def everything():
        found = {}
        for module in modules:
            for name, value in vars(module).items():
                found[module.__name__, name] = value
                if inspect.isclass(value):
                    found |= {(value, key): item for key, item in vars(value).items()}
        return found

    before = everything()
    server = serve()
    server.ask(chat("hello", max_tokens=2))
    server.close()
    after = everything()
    assert set(before) == set(after)
    changed = [key for key in before if before[key] is not after[key]]
    # The registry that abc keeps is made anew for every look.
    assert not [key for key in changed if key[1] != "_abc_impl"]

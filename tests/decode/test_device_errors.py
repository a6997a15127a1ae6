"""An error of the device ends in one line, and leaves caches right or empty."""

import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.tiny import make_drafter, make_model, make_tokenizer

import mlx_dflash2
from mlx_dflash2.cli.console import device_problem
from mlx_dflash2.targets.base import Target

MEMORY = "[METAL] Command buffer execution failed: Insufficient Memory (00000008)"
LOST = "[METAL] Command buffer execution failed: Caused GPU Hang Error"
ERRORS = {
    MEMORY: "out of memory",
    "[metal::malloc] Attempting to allocate 10 bytes": "out of memory",
    "std::bad_alloc": "out of memory",
    LOST: "the GPU failed",
}
PROMPT = [5, 6, 7, 8]


def fail_at(monkeypatch, places, message):
    """Let some of the target's passes fail."""
    calls, original = [], Target.forward

    def forward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) in places:
            raise RuntimeError(message)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Target, "forward", forward)


@pytest.mark.parametrize("message", ERRORS)
def test_one_line_says_what_to_try(monkeypatch, invoke, message):
    # The first pass is made while the config is checked.
    fail_at(monkeypatch, (4,), message)
    status, _, err = invoke("-p", "x", "-m", "20")
    last = err.splitlines()[-1]
    assert status == 1 and last.startswith(f"error: {ERRORS[message]} (") and message in last
    assert "Traceback" not in err


def test_other_errors_are_not_the_device_s():
    assert device_problem(RuntimeError("dictionary changed size during iteration")) is None
    assert "out of memory (MemoryError)" in device_problem(MemoryError())


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("place", range(1, 7))
def test_caches_are_right_or_empty(monkeypatch, kind, place, lasting):
    model, tokenizer, drafter = make_model(kind), make_tokenizer(), make_drafter()
    for cache in (make_prompt_cache(model), mlx_dflash2.DFlashPromptCache(model, drafter)):
        with monkeypatch.context() as patch:
            fail_at(patch, range(place, 99 if lasting else place + 1), MEMORY)
            seen = []
            with pytest.raises(RuntimeError, match="Insufficient"):
                for response in mlx_dflash2.stream_generate(
                    model, tokenizer, PROMPT, 99, drafter, prompt_cache=cache, seed=1
                ):
                    seen.append(response.token)
        caches = cache if isinstance(cache, list) else cache.caches
        if not caches:
            continue
        known = {c.offset for c in caches if hasattr(c, "offset")}
        # Before the first token only some of the prompt may be there, as in mlx-lm.
        allowed = {len(PROMPT) + len(seen)} if seen else set(range(len(PROMPT)))
        assert known <= allowed

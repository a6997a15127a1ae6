"""Nothing of mlx or mlx-lm is patched, and generators do not disturb each other."""

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from support import runs
from support.golden import CASES, GOLDEN
from support.proposers import half, oracle
from support.runs import model_of
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_drafter, make_model, plain_tokens

from mlx_dflash2 import DFlashPromptCache, make_sampler
from mlx_dflash2.checkpoint.load import load_drafter
from mlx_dflash2.generate import dflash_generate_step

PROMPT = list(range(5, 25))


def plain_of(kind, seed=0):
    return runs.plain_of(kind, tuple(PROMPT), 30, seed=seed)


def steps_of(kind, proposer, **kwargs):
    return runs.steps_of(kind, PROMPT, proposer, **{"max_tokens": 30} | kwargs)


def snapshot():
    """Identity of every attribute of every class and module of mlx and mlx_lm."""
    found = {}
    modules = [
        module
        for name, module in sys.modules.items()
        if name.split(".")[0] in ("mlx", "mlx_lm") and isinstance(module, types.ModuleType)
    ]
    for module in modules:
        for name, value in vars(module).items():
            found[module.__name__, name] = id(value)
            if isinstance(value, type) and value.__module__.startswith(("mlx.", "mlx_lm.")):
                for attribute, inner in vars(value).items():
                    found[value.__module__, value.__qualname__, attribute] = id(inner)
    return found


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_nothing_is_patched(kind, tmp_path):
    plain_of(kind)
    before = snapshot()
    load_drafter(GOLDEN / CASES[0])
    with pytest.raises(FileNotFoundError):
        load_drafter(tmp_path)
    assert list(token for token, _, _ in steps_of(kind, make_drafter())) == plain_of(kind)
    steps = steps_of(kind, oracle(PROMPT + plain_of(kind)))
    next(steps), next(steps)
    during = snapshot()
    steps.close()
    broken = oracle(PROMPT)
    broken.propose = None
    with pytest.warns(UserWarning, match="TypeError"):
        list(steps_of(kind, broken))
    after = snapshot()
    changed = {k for k in before if during.get(k) != before[k] or after.get(k) != before[k]}
    assert changed == set()


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_a_second_model_of_the_class_is_untouched_in_mid_generation(kind):
    steps = steps_of(kind, make_drafter())
    next(steps), next(steps), next(steps)
    assert plain_tokens(model_of(kind, seed=1), PROMPT, 20) == plain_of(kind, 1)[:20]
    assert plain_tokens(model_of(kind), PROMPT, 20) == plain_of(kind)[:20]
    assert [token for token, _, _ in steps] == plain_of(kind)[3:]


@pytest.mark.parametrize("kinds", [(DENSE, DENSE), (HYBRID, HYBRID), (SLIDING, HYBRID)], ids=str)
def test_two_generators_interleave(kinds):
    one = steps_of(kinds[0], half(PROMPT + plain_of(kinds[0]), VOCAB, 3))
    other = steps_of(kinds[1], make_drafter())
    tokens = [(a[0], b[0]) for a, b in zip(one, other, strict=True)]
    assert [a for a, _ in tokens] == plain_of(kinds[0])
    assert [b for _, b in tokens] == plain_of(kinds[1])


def test_two_drafters_share_a_target_with_different_taps():
    drafters = [make_drafter(), make_drafter(target_layer_ids=[0, 1, 2], block_size=5)]
    alone = [list(t for t, _, _ in steps_of(HYBRID, drafter)) for drafter in drafters]
    together = zip(*(steps_of(HYBRID, drafter) for drafter in drafters), strict=True)
    pairs = [(a[0], b[0]) for a, b in together]
    assert [[a for a, _ in pairs], [b for _, b in pairs]] == alone


def test_the_consumers_default_stream_is_its_own():
    """Between two tokens, and after closing in another order, the default stream is unchanged."""
    before = mx.default_stream(mx.default_device())
    one, other = (steps_of(DENSE, make_drafter()) for _ in range(2))
    next(one), next(other)
    assert mx.default_stream(mx.default_device()) == before
    one.close()
    assert mx.default_stream(mx.default_device()) == before
    other.close()
    assert mx.default_stream(mx.default_device()) == before


def in_thread(work):
    """What ``work`` returns when another thread runs it."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result(timeout=120)


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_loading_here_and_generating_elsewhere(kind):
    drafter, model = load_drafter(GOLDEN / "dflash2_sliding_block8"), make_model(kind)
    drafter.args.target_layer_ids[:] = [0, 1, 3]
    drafter.args.num_target_layers_declared = False

    def work():
        steps = dflash_generate_step(mx.array(PROMPT), model, drafter, max_tokens=30)
        return [token for token, _, _ in steps]

    for _ in range(2):
        assert in_thread(work) == plain_of(kind)


def test_a_generator_made_here_and_iterated_elsewhere():
    steps = steps_of(HYBRID, make_drafter())
    assert in_thread(lambda: [token for token, _, _ in steps]) == plain_of(HYBRID)


@pytest.mark.parametrize("kind", [DENSE, SLIDING])
def test_every_token_in_another_thread(kind):
    """As a server's thread pool may do it; mlx-lm allows it on targets that are not recurrent."""
    drafter, options = make_drafter(), dict(sampler=make_sampler(temp=0.7), seed=1)
    steps = dflash_generate_step(mx.array(PROMPT), model_of(kind), drafter, **options)
    again = dflash_generate_step(mx.array(PROMPT), model_of(kind), drafter, **options)
    alone = [next(again)[0] for _ in range(20)]
    assert [in_thread(lambda: next(steps)[0]) for _ in range(20)] == alone
    in_thread(steps.close)


def test_log_probabilities_can_be_read_in_another_thread():
    for rule in (None, lambda logprobs: mx.argmax(logprobs, axis=-1)):
        for token, row, _ in steps_of(HYBRID, make_drafter(), sampler=rule, max_tokens=9):
            assert in_thread(lambda row=row: mx.argmax(row).item()) == token


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_a_session_saved_here_and_gone_on_with_elsewhere(kind, tmp_path):
    drafter, model = make_drafter(), model_of(kind)
    session = DFlashPromptCache(model, drafter)
    tokens = [t for t, _, _ in steps_of(kind, drafter, prompt_cache=session, max_tokens=9)]
    session.save(tmp_path / "s.safetensors")
    loaded, _ = DFlashPromptCache.load(tmp_path / "s.safetensors", model, drafter)
    whole = PROMPT + tokens + [7]

    def work(session):
        rest = session.reuse(whole)
        steps = dflash_generate_step(rest, model, drafter, prompt_cache=session, max_tokens=9)
        return [token for token, _, _ in steps]

    expected = plain_tokens(model, whole, 9)
    assert in_thread(lambda: work(loaded)) == in_thread(lambda: work(session)) == expected
    # Back to the end of the first prompt, a checkpoint that this thread made.
    branch = [*PROMPT, 3, 4]
    steps = in_thread(lambda: session.reuse(branch))
    assert steps.size == 2


def test_generators_in_parallel_threads():
    results, drafter = {}, make_drafter()

    def work(kind):
        results[kind] = [token for token, _, _ in steps_of(kind, drafter)]

    expected = {kind: plain_of(kind) for kind in (DENSE, HYBRID, SLIDING)}
    threads = [threading.Thread(target=work, args=(kind,)) for kind in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == expected


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_memory_is_flat_over_runs(kind):
    drafter, model = make_drafter(), model_of(kind)
    seen = []
    for _ in range(6):
        list(dflash_generate_step(mx.array(PROMPT), model, drafter, max_tokens=30))
        seen.append(mx.get_active_memory())
    assert seen[-1] <= seen[1]

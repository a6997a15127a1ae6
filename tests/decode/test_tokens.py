"""Whatever is drafted, the tokens are those that mlx-lm generates, and every one is counted."""

import mlx.core as mx
import pytest
from support.proposers import half, oracle
from support.runs import check_counts, model_of, prompt_and_plain, proposers, run
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_drafter

from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets import bind

FIXTURES = (DENSE, HYBRID, SLIDING, "llama-sliding", "gemma4_text-shared")
WINDOW = 16
BLOCKS = (1, 2, 3, 5, 8, 16)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", FIXTURES)
def test_tokens_for_every_prompt_length(kind, block):
    lengths = {1, 2, block - 1, block, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW} - {0}
    for length in sorted(lengths):
        prompt, plain = prompt_and_plain(kind, length)
        for name, proposer in proposers(prompt, plain, block).items():
            count = 2 * block + 1
            if name in ("liar", "rand"):
                # A token a round: a run meets the lengths after its own, and every place of
                # the window after so many.
                if length not in (1, WINDOW - 1, 3 * WINDOW):
                    continue
                count = min(count, WINDOW + 2)
            steps, stats = run(kind, prompt, proposer, count)
            assert [token for token, _ in steps] == plain[:count], (length, name)
            check_counts(steps, stats, name, block)
            assert stats.prompt_tokens == length


@pytest.mark.parametrize("block", [3, 8])
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_tokens_for_every_budget(kind, block):
    prompt, plain = prompt_and_plain(kind, 17)
    for max_tokens in range(2 * block + 2):
        for name, proposer in proposers(prompt, plain, block).items():
            if name == "rand" and max_tokens > 3:
                continue
            steps, stats = run(kind, prompt, proposer, max_tokens)
            assert [token for token, _ in steps] == plain[:max_tokens], (max_tokens, name)
            check_counts(steps, stats, name, block)


@pytest.mark.parametrize("kind", FIXTURES)
def test_tokens_of_four_bit_targets(kind):
    prompt, plain = prompt_and_plain(kind, 20, bits=4)
    for block in (3, 8):
        for name, proposer in proposers(prompt, plain, block).items():
            steps, stats = run(kind, prompt, proposer, len(plain), bits=4)
            assert [token for token, _ in steps] == plain, name
            check_counts(steps, stats, name, block)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", FIXTURES)
def test_tokens_for_every_budget_and_prompt_length(kind, block, bits):
    for length in {1, 2, block, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW}:
        prompt, plain = prompt_and_plain(kind, length, bits=bits)
        for max_tokens in range(2 * block + 2):
            for name, proposer in proposers(prompt, plain, block).items():
                steps, stats = run(kind, prompt, proposer, max_tokens, bits=bits)
                assert [token for token, _ in steps] == plain[:max_tokens], (length, name)
                check_counts(steps, stats, name, block)


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_verify_width_limits_the_rows_and_not_the_tokens(kind, width):
    prompt, plain = prompt_and_plain(kind, 20)
    for name, proposer in proposers(prompt, plain, 8).items():
        steps, stats = run(kind, prompt, proposer, 20, verify_width=width)
        assert [token for token, _ in steps] == plain[:20], name
        assert len(stats.drafted_at) == width - 1 and stats.verify_width == width


@pytest.mark.parametrize("kind", FIXTURES)
@pytest.mark.parametrize("window", [16, None])
def test_tokens_with_a_real_drafter(kind, window):
    """A random drafter is hardly ever right, and never matters."""
    drafter = make_drafter(window)
    for length in (1, 5, 40):
        prompt, plain = prompt_and_plain(kind, length)
        for block in (None, 4):
            steps, stats = run(kind, prompt, drafter, 20, block_size=block)
            assert [token for token, _ in steps] == plain[:20]
            assert stats.drafted > 0 and stats.draft_failures == 0


@pytest.mark.parametrize("kind", FIXTURES)
def test_every_token_is_the_argmax_of_a_teacher_forced_pass(kind):
    model = model_of(kind)
    prompt, plain = prompt_and_plain(kind, 33)
    steps, _ = run(kind, prompt, half(prompt + plain, VOCAB, 2), 30)
    tokens = [token for token, _ in steps]
    logits = model(mx.array([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
    assert mx.argmax(logits, axis=-1).tolist() == tokens


@pytest.mark.parametrize("step", [1, 7, 512])
@pytest.mark.parametrize("kind", FIXTURES)
def test_prefill_is_mlx_lms_own(kind, step):
    """Chunks, first logits and caches equal those of mlx-lm, capture or not."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from support.tiny import cache_arrays

    model = model_of(kind)
    for length in sorted({1, 2, step - 1, step, step + 1, 2 * step + 1, 20} & set(range(1, 60))):
        prompt, _ = prompt_and_plain(kind, length)
        ours, theirs = make_prompt_cache(model), make_prompt_cache(model)
        options = {"max_tokens": 0, "prefill_step_size": step}
        list(generate_step(mx.array(prompt), model, prompt_cache=theirs, **options))
        drafter = make_drafter()
        run(kind, prompt, drafter, 0, prompt_cache=ours, prefill_step_size=step)
        pairs = zip(cache_arrays(ours), cache_arrays(theirs), strict=True)
        assert all(mx.array_equal(a, b).item() for a, b in pairs)


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_logprobs_are_the_targets(kind):
    from mlx_lm.generate import generate_step

    model = model_of(kind)
    prompt, plain = prompt_and_plain(kind, 12)
    theirs = [row for _, row in generate_step(mx.array(prompt), model, max_tokens=15)]
    proposer = half(prompt + plain, VOCAB, 3)
    ours = [
        row for _, row, _ in dflash_generate_step(mx.array(prompt), model, proposer, max_tokens=15)
    ]
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and mx.allclose(a, b, atol=1e-5).item()


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
@pytest.mark.parametrize("bits", [None, 4])
def test_calibration_rows_do_not_change_the_rounding(kind, bits):
    """On this backend several rows and one row are bit-equal, so a difference is a fault here."""
    if mx.metal.is_available():
        pytest.skip("Metal chooses its kernels by the number of rows")
    target = bind(model_of(kind, bits))
    one, many = target.make_cache(), target.make_cache()
    tokens = mx.random.randint(0, VOCAB, (1, 12))
    rows = [target.logits(target.forward(tokens[:, i : i + 1], one).hidden) for i in range(12)]
    block = target.logits(target.forward(tokens, many).hidden)
    assert mx.array_equal(mx.concatenate(rows, axis=1), block).item()


def test_integer_prompts_of_any_dtype():
    prompt, plain = prompt_and_plain(DENSE, 9)
    for dtype in (mx.int32, mx.int64, mx.uint16):
        proposer = oracle(prompt + plain)
        steps = dflash_generate_step(
            mx.array(prompt, dtype=dtype), model_of(DENSE), proposer, max_tokens=8
        )
        assert [token for token, _, _ in steps] == plain[:8]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            dict(prompt=mx.array([], mx.int32)),
            r"`prompt` is empty but has to have at least one token",
        ),
        (dict(prompt=mx.zeros((1, 4), mx.int32)), r"`prompt`.*\(1, 4\)"),
        (dict(prompt=mx.zeros((4,))), "`prompt`.*float32"),
        (dict(max_tokens=-2), "`max_tokens`.*-2"),
        (dict(prefill_step_size=0), "`prefill_step_size`.*0"),
        (dict(block_size=9), "`block_size` is 9.*1 to 8"),
        (dict(block_size=0), "`block_size` is 0"),
        (dict(verify_width=0), "`verify_width` is 0.*1 to"),
        (dict(verify_width=9), "`verify_width` is 9"),
        (dict(block_size=4, verify_width=5), "`verify_width` is 5.*1 to the block of 4"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_in_one_line(kwargs, message):
    arguments = {"prompt": mx.array([1, 2])} | kwargs
    prompt = arguments.pop("prompt")
    proposer = oracle([1, 2])
    with pytest.raises(ValueError, match=message) as error:
        next(dflash_generate_step(prompt, model_of(DENSE), proposer, **arguments))
    assert "\n" not in str(error.value)

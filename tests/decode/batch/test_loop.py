"""What a batch shares with one sequence because there is one loop."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from support.proposers import PerRow, half
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_model, plain_tokens

from mlx_dflash2.decode.batch.decoder import Answer, BatchDecoder
from mlx_dflash2.decode.judge import Judge
from mlx_dflash2.decode.kv_quantization import KVQuantization
from mlx_dflash2.decode.loop import ROUNDS_PER_CLEAR, Loop
from mlx_dflash2.decode.stats import Stats

PROMPTS = [[5, 9, 2, 7, 1] * 4, [8, 3, 3], [1, 2, 3, 4] * 8]


class Flaky:
    """A logits processor that raises once, at the n-th call, and changes nothing."""

    def __init__(self, at: int):
        self.calls, self.at = 0, at

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("not now")
        return logits


def decoder_of(kind, count, processors=None):
    model = make_model(kind)
    plain = [plain_tokens(model, prompt, count) for prompt in PROMPTS]
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    proposer = PerRow(*(half(text, VOCAB, k) for text, k in zip(texts, (1, 3, 2), strict=True)))
    loop = Loop(
        model,
        proposer,
        generation_stream,
        Stats(),
        kv_quantization=KVQuantization(),
        verify_width=8,
    )
    answers = [
        Answer(loop.open(Judge(logits_processors=processors)), mx.array(prompt, mx.uint32), count)
        for prompt in PROMPTS
    ]
    batch = BatchDecoder(loop, (), batch_size=3, prefill_step_size=7)
    for answer in answers:
        batch.insert(answer)
    return batch, answers, plain


@pytest.mark.parametrize("at", [6, 11, 20])
@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING, "llama-sliding"])
def test_a_batch_goes_on_after_an_error(kind, at):
    """A pass that fails leaves no rows behind, so that the next one continues exactly."""
    flaky = Flaky(at)
    batch, answers, plain = decoder_of(kind, 30, [flaky])
    with pytest.raises(RuntimeError, match="not now"):
        batch.run()
    assert batch.active and batch.loop.round is None
    batch.run()
    assert [answer.tokens for answer in answers] == plain
    assert batch.loop.stats.accepted > 0


@pytest.mark.parametrize(
    "kind, name", [(HYBRID, "run_layer"), (HYBRID, "run_recorded"), (SLIDING, "run_layer")]
)
def test_a_batch_goes_on_after_an_error_inside_the_pass(kind, name, monkeypatch):
    """Some layers have appended their rows, the others have not."""
    batch, answers, plain = decoder_of(kind, 30)
    target, calls = batch.loop.target, []
    original = getattr(target, name)

    def run(*args):
        calls.append(bool(batch.active))
        if batch.active and sum(calls) == 6:
            raise RuntimeError("lost in mid-pass")
        return original(*args)

    monkeypatch.setattr(target, name, run)
    with pytest.raises(RuntimeError, match="mid-pass"):
        batch.run()
    assert batch.active
    batch.run()
    assert [answer.tokens for answer in answers] == plain


def test_a_batch_frees_buffers_every_few_rounds(monkeypatch):
    batch, answers, plain = decoder_of(DENSE, 90)
    clear, calls = mx.clear_cache, []
    monkeypatch.setattr(mx, "clear_cache", lambda: (calls.append(batch.loop.stats.passes), clear()))
    while len(batch.active) < len(answers):
        batch.step()
    calls.clear()
    passes = batch.loop.stats.passes
    batch.run()
    assert [answer.tokens for answer in answers] == plain
    assert batch.loop.stats.passes > ROUNDS_PER_CLEAR
    assert passes < ROUNDS_PER_CLEAR
    assert len(calls) == batch.loop.stats.passes // ROUNDS_PER_CLEAR >= 1

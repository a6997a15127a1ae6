"""The controller against the best fixed width in hindsight, on injected times and acceptance."""

import random
from collections import Counter
from functools import cache
from itertools import pairwise

import mlx.core as mx
import pytest
from support.proposers import PerRow, half, liar, oracle
from support.runs import model_of, prompt_and_plain
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_tokenizer

from mlx_dflash2 import batch_generate, make_sampler
from mlx_dflash2.decode import loop as loop_module
from mlx_dflash2.decode.controller import MOST_TRIES, Controller, start_width
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets import Target

TOKENS, WARM_UP, WIDTH = 1200, 16, 8
# Seconds of a round by width, in plain steps, the draft included.
COSTS = {
    "flat": lambda width: 1 + 0.15 * (width > 1) + 0.02 * width,
    "rising": lambda width: 1 + 0.2 * (width > 1) + 0.25 * (width - 1),
    "cliff at 5": lambda width: 1.0 if width == 1 else 1.25 + 0.03 * width + 1.1 * (width > 5),
    "cliff at 9": lambda width: 1.0 if width == 1 else 1.25 + 0.03 * width + 1.1 * (width > 8),
    "experts": lambda width: 1 + 0.15 * (width > 1) + 0.55 * (width - 1) ** 0.8,
    "every row costs a step": lambda width: 1 + 0.5 * (width > 1) + 0.9 * (width - 1),
}
# The chance that a draft stays, by the tokens so far.
RATES = {
    "good": lambda tokens: 0.86,
    "fair": lambda tokens: 0.6,
    "poor": lambda tokens: 0.25,
    "never": lambda tokens: 0.0,
    "collapse": lambda tokens: 0.86 if tokens < 500 else 0.02,
    "recovery": lambda tokens: 0.02 if 300 < tokens < 600 else 0.86,
}


@cache
def drawn(seed):
    """What decides on a draft, by the tokens before the block and the position in it."""
    draw = random.Random(seed)
    return [[draw.random() for _ in range(WIDTH)] for _ in range(TOKENS)]


def decode(choose, observe, cost, rate, seed=0):
    """Tokens a second after the warm-up, and the widths, of a drawn trace."""
    noise, draws = random.Random(seed), drawn(seed)
    seconds, tokens, warm, first = 0.0, 0, 0.0, 0
    widths = []
    while tokens < TOKENS:
        width, accepted = choose(WIDTH), 0
        while accepted < width - 1 and draws[tokens][accepted] < rate(tokens):
            accepted += 1
        taken = cost(width) * (1 + 0.02 * noise.gauss(0, 1)) + 3 * (not widths)
        observe(width, [(width - 1, accepted)], taken)
        seconds, tokens, widths = seconds + taken, tokens + 1 + accepted, [*widths, width]
        if len(widths) == WARM_UP:
            warm, first = seconds, tokens
    return (tokens - first) / (seconds - warm), widths


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("cost", COSTS)
def test_the_best_fixed_width_in_hindsight(cost, rate):
    cost, rate, seeds = COSTS[cost], RATES[rate], range(4)
    fixed = {
        width: sum(
            decode(lambda _, w=width: w, lambda *_: None, cost, rate, seed)[0] for seed in seeds
        )
        for width in range(1, WIDTH + 1)
    }
    found = 0.0
    for seed in seeds:
        controller = Controller(WIDTH)
        speed, widths = decode(controller.choose, controller.observe, cost, rate, seed)
        found += speed
        drafted = [width > 1 for width in widths[WARM_UP:]]
        switches = sum(a != b for a, b in pairwise(drafted))
        assert switches <= len(drafted) / 16
    assert found >= 0.97 * max(fixed.values())


def test_a_drafter_that_is_never_right_costs_little():
    for cost in COSTS.values():
        controller = Controller(WIDTH)
        speed, widths = decode(controller.choose, controller.observe, cost, lambda _: 0.0)
        assert controller.parked and speed >= 0.97
        # The tries come less and less often.
        tries = [index for index, width in enumerate(widths) if width > 1 and index > WARM_UP]
        assert len(tries) < len(widths) / 24 * MOST_TRIES


def test_a_chip_without_gain_starts_parked():
    controller = Controller(WIDTH, start_width=1)
    assert controller.parked and controller.reason
    speed, widths = decode(controller.choose, controller.observe, COSTS["flat"], RATES["good"])
    assert widths[:10] == [1] * 10 and speed > 3


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_widths_stay_within_the_budget(limit):
    controller = Controller(WIDTH)
    for _ in range(40):
        width = controller.choose(limit)
        assert 1 <= width <= limit
        controller.observe(width, [(width - 1, width - 1)], COSTS["flat"](width))


def test_a_batch_is_judged_by_all_its_rows():
    """Two sequences of four rows cost what one of eight costs."""
    alone, batch = Controller(WIDTH), Controller(WIDTH)
    widths = [], []

    def cost(rows):
        return 1.25 + 0.03 * rows + 3 * (rows > 5)

    for _ in range(90):
        for controller, count, chosen in ((alone, 1, widths[0]), (batch, 2, widths[1])):
            width = controller.choose(WIDTH, count)
            chosen.append(width)
            drafts = [(width - 1, (width - 1) // 2 + (width > 1))] * count
            controller.observe(width, drafts, cost(count * width) if width > 1 else 1.0)
    usual = [Counter(chosen[-30:]).most_common(1)[0][0] for chosen in widths]
    assert usual == [5, 2]


@pytest.mark.parametrize(
    "device, architecture, width",
    [("gpu", "applegpu_g13s", 1), ("gpu", "applegpu_g14p", 1), ("gpu", "applegpu_g16s", 4),
     ("cpu", "applegpu_g13s", 4)],
)  # fmt: skip
def test_the_first_generations_start_parked(device, architecture, width, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: getattr(mx, device))
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    assert start_width() == width


class Watch:
    """A clock that a loop reads: every pass takes as long as its rows say."""

    def __init__(self, monkeypatch, cost):
        self.now, forward = 0.0, Target.forward

        def timed(target, tokens, *args, **kwargs):
            self.now += cost(tokens.size)
            return forward(target, tokens, *args, **kwargs)

        monkeypatch.setattr(Target, "forward", timed)
        monkeypatch.setattr(loop_module, "time", self)

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_tokens_do_not_depend_on_the_widths(kind, monkeypatch):
    prompt, plain = prompt_and_plain(kind, 20)
    # Drafting ahead asks, too.
    widths = iter([8, 8, 1, 1, 3, 3, 1, 1, 5, 5, 2, 2, 8, 8] * 20)
    monkeypatch.setattr(Controller, "choose", lambda self, limit, n=1: min(limit, next(widths)))
    stats = Stats()
    steps = dflash_generate_step(
        mx.array(prompt), model_of(kind), oracle(prompt + plain), max_tokens=34, stats=stats
    )
    assert [token for token, _, _ in steps] == plain
    assert len(stats.widths) >= 4 and sum(stats.widths.values()) == stats.rounds == stats.passes


def test_the_loop_parks_and_says_so(monkeypatch):
    prompt, plain = prompt_and_plain(DENSE, 20, 120)
    Watch(monkeypatch, COSTS["flat"])
    stats = Stats()
    proposer = liar(prompt + plain, VOCAB)
    steps = dflash_generate_step(
        mx.array(prompt), model_of(DENSE), proposer, max_tokens=120, stats=stats
    )
    assert [token for token, _, _ in steps] == plain
    assert stats.parked_rounds > 80 and stats.widths[1] > 100 and "times the speed" in stats.parked
    assert "Without drafts in" in stats.summary() and "Verify widths" in stats.summary()


def test_a_width_that_is_given_stays(monkeypatch):
    prompt, plain = prompt_and_plain(DENSE, 20)
    Watch(monkeypatch, COSTS["every row costs a step"])
    stats = Stats()
    options = {"max_tokens": 30, "stats": stats, "verify_width": 3}
    proposer = liar(prompt + plain, VOCAB)
    list(dflash_generate_step(mx.array(prompt), model_of(DENSE), proposer, **options))
    assert set(stats.widths) <= {1, 2, 3} and stats.widths[3] >= 26 and not stats.parked_rounds


def test_a_seed_gives_the_same_draws_whatever_the_times(monkeypatch):
    prompt, plain = prompt_and_plain(DENSE, 20)
    found = []
    for cost in (COSTS["flat"], COSTS["every row costs a step"]):
        Watch(monkeypatch, cost)
        options = {"max_tokens": 30, "sampler": make_sampler(1.0), "seed": 5}
        proposer = liar(prompt + plain, VOCAB)
        steps = dflash_generate_step(mx.array(prompt), model_of(DENSE), proposer, **options)
        found.append([token for token, _, _ in steps])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING, "llama-sliding"])
def test_a_batch_takes_its_widths_from_the_controller(kind, monkeypatch):
    prompts, plain = zip(*(prompt_and_plain(kind, n) for n in (9, 20, 33)), strict=True)
    widths, asked = iter([4, 1, 2, 8, 1, 1, 3] * 40), []

    def choose(self, limit, sequences=1):
        asked.append(sequences)
        return min(limit, next(widths))

    monkeypatch.setattr(Controller, "choose", choose)
    stats = Stats()
    texts = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    proposer = PerRow(*(half(text, VOCAB, k) for text, k in zip(texts, (1, 2, 4), strict=True)))
    found = batch_generate(
        model_of(kind), make_tokenizer(), list(prompts), max_tokens=34, draft_model=proposer,
        return_token_ids=True, stats=stats,
    )  # fmt: skip
    assert found.token_ids == [tokens[:34] for tokens in plain]
    assert 3 in asked and {1, 2, 4} <= set(stats.widths) and stats.accepted > 0

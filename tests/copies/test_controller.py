"""The controller weighs copies, whose chances it is told, by what rounds of copies took."""

import random

import mlx.core as mx
import pytest
from support.copying import Planted
from support.runs import model_of, prompt_and_plain
from support.tiny import DENSE, HYBRID, SLIDING, make_drafter, make_tokenizer

from mlx_dflash2 import batch_generate
from mlx_dflash2.copies import CopyContext
from mlx_dflash2.decode import loop as loop_module
from mlx_dflash2.decode.controller import START_WIDTH, Controller
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets import Target

# Seconds of a pass by its rows, in plain steps.
FLAT = lambda rows: 1 + 0.03 * (rows - 1)  # noqa: E731
CLIFF = lambda rows: FLAT(rows) + 1.5 * (rows > 8)  # noqa: E731
STEEP = lambda rows: 1 + 0.8 * (rows - 1)  # noqa: E731


def chances(rate, count=15):
    return [rate**n for n in range(1, count + 1)]


def taught(cost, widths=(), plain=True, draft=None):
    """A controller that knows what some rounds took."""
    controller = Controller(8)
    for _ in range(3 if plain else 0):
        controller.observe(1, [(0, 0)], cost(1))
    for width in draft or ():
        for _ in range(3):
            controller.observe(width, [(width - 1, width // 2)], cost(width) + 0.4)
    for width in widths:
        controller.observe_copies(width, cost(width))
    return controller


@pytest.mark.parametrize(
    "cost, rate, width", [(FLAT, 0.97, 16), (CLIFF, 0.97, 8), (STEEP, 0.5, 1), (FLAT, 0.02, 1)]
)
def test_the_width_with_the_most_tokens_a_second(cost, rate, width):
    controller = taught(cost, widths=range(2, 17))
    assert controller.choose_copies([chances(rate)], 16, 1) == width


def test_it_stays_within_the_budget_and_the_copy():
    controller = taught(FLAT, widths=(2, 4, 8, 16))
    assert controller.choose_copies([chances(0.99)], 5, 1) == 5
    assert controller.choose_copies([chances(0.99, 6)], 16, 1) == 7
    assert controller.choose_copies([chances(0.99)], 1, 1) == 1
    assert controller.choose_copies([[]], 16, 4) == controller.choose_copies([], 16, 4) == 1


def test_the_first_copy_is_short():
    """What a wide pass costs is found out from narrower ones."""
    for plain in (False, True):
        assert taught(FLAT, plain=plain).choose_copies([chances(0.97)], 16, 1) == START_WIDTH
    controller = taught(STEEP, widths=(4,))
    assert controller.choose_copies([chances(0.6)], 16, 1) == 1


def test_copies_against_the_drafter():
    controller = taught(FLAT, widths=range(2, 17), draft=range(2, 9))
    drafted = controller.choose(8)
    assert drafted > 1
    assert controller.choose_copies([chances(0.97)], 16, drafted) == 16
    assert controller.choose_copies([chances(0.4)], 16, drafted) == 1
    # Before anything was measured the better hope wins.
    fresh = Controller(8)
    assert fresh.choose_copies([chances(0.97)], 16, 4) == START_WIDTH
    assert fresh.choose_copies([chances(0.6)], 16, 4) == 1


def test_copies_pay_while_the_drafter_is_parked():
    controller = taught(FLAT, widths=(4, 8, 16), draft=(2, 4))
    controller.parked, controller.reason = True, "it does not pay"
    assert controller.choose(8) == 1 and controller.choose_copies([chances(0.9)], 16, 1) > 8
    # They say nothing of the drafter and do not end the parking.
    judged = list(controller.acceptance.judged)
    for _ in range(20):
        controller.observe_copies(16, FLAT(16))
    assert controller.parked and controller.acceptance.judged == judged


def test_a_batch_counts_the_rows_of_all():
    """A copy of one widens the pass of all four."""
    controller, good = Controller(8), chances(0.95)
    for _ in range(3):
        controller.observe(1, [(0, 0)] * 4, 1.0)
    for width in range(2, 17):
        controller.observe_copies(4 * width, 1 + 0.05 * 4 * (width - 1))
    for copies in ([good, [], [], []], [good, good[:3], good[:9], []], [good] * 4):
        speeds = {
            width: sum(1 + sum(copy[: width - 1]) for copy in copies) / (1 + 0.2 * (width - 1))
            for width in range(1, 17)
        }
        best = max(speeds, key=speeds.get)
        assert controller.choose_copies(copies, 16, 1) == best
    assert best > 8


def decode(text, prompt, cost, controller=None, tokens=600):
    """Plain steps that an answer takes, with copies or without."""
    context, seconds, position = CopyContext(), 0.0, len(prompt)
    context.read(text[:position], 0)
    draw = random.Random(0)
    while position < len(prompt) + tokens:
        copy = context.offer(text[position], 15)
        width = controller.choose_copies([copy.chances], 16, 1) if controller else 1
        kept = 1
        while kept < width and copy.tokens[kept - 1] == text[position + kept]:
            kept += 1
        taken = cost(width) * (1 + 0.02 * draw.gauss(0, 1))
        if width > 1:
            controller.observe_copies(width, taken)
        elif controller:
            controller.observe(1, [(0, 0)], taken)
        context.read(text[position : position + kept], position)
        seconds, position = seconds + taken, position + kept
    return seconds


def texts():
    draw = random.Random(1)
    source = [draw.randrange(5000) for _ in range(700)]
    edited = [draw.randrange(5000) if draw.random() < 0.04 else token for token in source]
    misleading = []
    while len(misleading) < 700:
        # Three tokens that were there, then others.
        start = draw.randrange(600)
        misleading += [*source[start : start + 3], draw.randrange(5000, 9000)]
    return source, edited + source[:40], misleading + source[:40]


@pytest.mark.parametrize("cost", [FLAT, CLIFF, STEEP], ids=["flat", "cliff", "steep"])
def test_copies_of_an_edited_text_pay_and_wrong_ones_cost_little(cost):
    source, edited, misleading = texts()
    plain = decode(source + edited, source, cost)
    speed = plain / decode(source + edited, source, cost, Controller(1))
    assert speed > (3.5 if cost is FLAT else 2.5 if cost is CLIFF else 1)
    plain = decode(source + misleading, source, cost)
    assert decode(source + misleading, source, cost, Controller(1)) < 1.05 * plain


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


@pytest.mark.parametrize("drafter", [False, True], ids=["only", "with"])
@pytest.mark.parametrize("cost", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_the_loop_takes_its_widths(kind, cost, drafter, monkeypatch):
    prompt, plain = prompt_and_plain(kind, 20, 120)
    Watch(monkeypatch, cost)
    stats = Stats()
    proposer = Planted(prompt + plain, drafter=make_drafter() if drafter else None, wrong=40)
    steps = dflash_generate_step(
        mx.array(prompt), model_of(kind), proposer, max_tokens=120, stats=stats
    )
    assert [token for token, _, _ in steps] == plain
    assert 0 < stats.copies_accepted and sum(stats.widths.values()) == stats.rounds
    # Where every row costs nearly a step, only tries are wide.
    wide = sum(count for width, count in stats.widths.items() if width > 8) / stats.rounds
    assert wide > 0.3 if cost is FLAT else wide < 0.2
    # Plain decoding takes 119; tries may cost a twentieth.
    assert stats.generation_time < (40 if cost is FLAT else 1.05 * 119)
    assert stats.copied == stats.drafted or drafter


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_a_batch_takes_its_widths(kind, monkeypatch):
    texts = [prompt_and_plain(kind, n, 60) for n in (9, 20, 33)]
    Watch(monkeypatch, FLAT)
    stats = Stats()
    proposer = Planted(*(prompt + plain for prompt, plain in texts), drafter=make_drafter())
    found = batch_generate(
        model_of(kind), make_tokenizer(), [prompt for prompt, _ in texts], max_tokens=60,
        draft_model=proposer, return_token_ids=True, stats=stats,
    )  # fmt: skip
    assert found.token_ids == [plain for _, plain in texts]
    assert stats.copies_accepted > 60 and max(stats.widths) > 8


@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_copies_go_on_without_a_drafter_that_failed(kind):
    prompt, plain = prompt_and_plain(kind, 20, 60)
    drafter, stats = make_drafter(), Stats()

    def fail(*args):
        raise RuntimeError("lost")

    object.__setattr__(drafter, "propose", fail)
    proposer = Planted(prompt + plain, drafter=drafter, wrong=20)
    steps = dflash_generate_step(
        mx.array(prompt), model_of(kind), proposer, max_tokens=60, stats=stats, verify_width=16
    )
    with pytest.warns(UserWarning, match="goes on without the drafter: the drafter raised Runtime"):
        assert [token for token, _, _ in steps] == plain
    assert stats.draft_failures == 1 and stats.drafted == stats.copied > 20

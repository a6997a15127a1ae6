"""How often a round hands work to the device: each time costs a GPU a command buffer."""

import threading

import mlx.core as mx
import pytest
from support.runs import prompt_and_plain, steps_of
from support.tiny import DENSE, make_drafter

from mlx_dflash2 import make_sampler


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_round_hands_over_the_pass_the_draft_and_the_context(temperature, monkeypatch):
    calls = []

    def count(name):
        real = getattr(mx, name)
        monkeypatch.setattr(mx, name, lambda *args: calls.append(name) or real(*args))

    count("async_eval"), count("eval")
    prompt, _ = prompt_and_plain(DENSE, 11)
    steps = steps_of(
        DENSE, prompt, make_drafter(), max_tokens=12, sampler=make_sampler(temperature)
    )
    rounds = []
    for _ in steps:
        if calls:
            rounds.append(calls[:])
            calls.clear()
    # The first is the prompt's.
    assert len(rounds) > 3
    handed = ["async_eval", "eval", "async_eval", "async_eval"]
    # The last but one has nothing left to draft for.
    assert rounds[1:-2] == [handed] * (len(rounds) - 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_round_may_run_on_another_thread(temperature):
    """Nothing that is drafted or drawn ahead waits for the thread that began it."""
    prompt, _ = prompt_and_plain(DENSE, 11)
    steps = steps_of(
        DENSE, prompt, make_drafter(), max_tokens=12, sampler=make_sampler(temperature)
    )
    tokens = []
    for _ in range(12):
        thread = threading.Thread(target=lambda: tokens.append(next(steps)[0]))
        thread.start()
        thread.join()
    assert len(tokens) == 12

"""How often a round hands work to the device: each time costs a GPU a command buffer."""

import mlx.core as mx
import pytest
from support.runs import prompt_and_plain, steps_of
from support.tiny import DENSE, make_drafter

from mlx_dflash2 import make_sampler


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_round_hands_over_the_draft_and_the_pass(temperature, monkeypatch):
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
    assert len(rounds) > 2
    assert rounds[1:-1] == [["async_eval", "async_eval", "eval"]] * (len(rounds) - 2)

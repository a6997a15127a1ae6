"""Whatever is timed or takes long has the model's memory wired, as mlx-lm's own generation."""

import importlib

import pytest
from support.tiny import DENSE, make_drafter, make_model

from mlx_dflash2.benchmark.arms import Arm, BenchSettings
from mlx_dflash2.benchmark.phases import time_phases
from mlx_dflash2.demo.command import verify_cost
from mlx_dflash2.doctor.trace import bisect
from mlx_dflash2.evaluation.recall import recall_table

TEXTS = [(list(range(1, 6)), list(range(20, 40)))]


def phases(model, drafter):
    settings = BenchSettings(max_tokens=4)
    time_phases(model, Arm("drafts", drafter=drafter, verify_width=4), drafter, [1, 2], settings)


@pytest.mark.parametrize(
    "work",
    [
        phases,
        lambda model, drafter: verify_cost(model, 4, repeats=1),
        lambda model, drafter: recall_table(model, drafter, TEXTS),
        lambda model, drafter: bisect(model, drafter, TEXTS, num_anchors=4),
    ],
    ids=["phases", "demo", "recall", "trace"],
)
def test_the_memory_is_wired(work, monkeypatch):
    calls = []
    module = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(module, "maybe_set_recommended_wired_limit", lambda: calls.append(1))
    work(make_model(DENSE), make_drafter())
    assert calls

"""The demo says what it measured, and fails if a token differs."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from support.saved_models import embedded_target
from support.tiny import DENSE, make_model

from mlx_dflash2.cli.start import start
from mlx_dflash2.demo import command as demo
from mlx_dflash2.evaluation.parity import Parity
from mlx_dflash2.pairs.find import PairSources


@pytest.fixture
def pair(monkeypatch, saved_pair):
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "find_pair", lambda: PairSources(None, None))
    monkeypatch.setattr(demo, "load_pair", lambda _: saved_pair)
    monkeypatch.setattr(demo, "MAX_TOKENS", {mx.cpu: 9, mx.gpu: 9})
    return saved_pair


def test_report(pair, capsys):
    start("mlx_dflash2.demo")
    out, err = capsys.readouterr()
    assert "Timing a verify pass" in err
    for question in demo.PROMPTS:
        assert f"> {question}" in out
    assert out.count("9 tokens; acceptance length 1.00; with drafts ") == 2
    assert "Both answers have exactly the tokens of plain mlx-lm." in out
    assert "A verify pass of 4 rows costs" in out and "and gave 1.00 tokens" in out


def test_a_differing_token_is_an_error(pair, monkeypatch, capsys):
    other = make_model(DENSE, seed=1)
    plain = mlx_lm.stream_generate
    monkeypatch.setattr(mlx_lm, "stream_generate", lambda model, *a, **k: plain(other, *a, **k))
    with pytest.raises(SystemExit) as error:
        start("mlx_dflash2.demo")
    assert str(error.value).startswith("error: the tokens are not those of plain mlx-lm: token 0")
    assert "Both answers" not in capsys.readouterr().out


def test_a_tie_is_told_and_no_error(pair, monkeypatch, capsys):
    other = make_model(DENSE, seed=1)
    plain = mlx_lm.stream_generate
    monkeypatch.setattr(mlx_lm, "stream_generate", lambda model, *a, **k: plain(other, *a, **k))
    monkeypatch.setattr(demo, "compare_tokens", lambda *_: Parity("tie", 0, 1, 2, 0.1, 0.125))
    start("mlx_dflash2.demo")
    out = capsys.readouterr().out
    assert out.count("A tie: token 0 is ") == 2 and "moves by 0.12." in out
    assert "Both answers" not in out and "A verify pass of" in out


def test_drafting_that_stops_is_an_error(pair, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(type(pair.drafter), "propose", fail)
    with pytest.raises(SystemExit, match=r"drafting stopped: .*broken"):
        demo.main(None)


def test_difference():
    def decoded(*tokens):
        return demo.Answer(list(tokens), [mx.arange(8) / 4] * len(tokens))

    assert demo.difference(decoded(1, 2), decoded(1, 2)) is None
    assert demo.difference(decoded(1, 2), decoded(1)) == "2 tokens with drafts but 1 plainly"
    line = demo.difference(decoded(1, 2, 3), decoded(1, 4, 3))
    assert line.startswith("token 1 is 2 with drafts but 4 plainly") and "0.5 apart" in line


@pytest.mark.parametrize(
    "cost, cpu, pays, mentions_cpu",
    [(7.0, True, False, True), (1.4, False, True, False), (1.4, True, True, True)],
)
def test_the_verdict_follows_the_figures(cost, cpu, pays, mentions_cpu):
    text = demo.speed_report(10.0, 4.0, 2.5, 8, cost, cpu)
    assert "4.00 tokens/s, plain mlx-lm 10.00 tokens/s: 0.40 times" in text
    assert f"8 rows costs {cost} plain steps here, and gave 2.50 tokens" in text
    assert ("cannot pay" not in text) == pays
    assert ("CPU backend" in text) == mentions_cpu


@pytest.mark.slow
def test_the_embedded_pair():
    """As it is called, so on Linux with a fast BLAS, where two tokens may tie."""
    embedded_target()
    command = [sys.executable, "-m", "mlx_dflash2.demo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "Both answers have exactly the tokens" in done.stdout or "A tie: " in done.stdout
    assert "times the speed." in done.stdout

"""``doctor --kernels``: the same cases with whatever runs kernels, and a clear word without."""

from dataclasses import replace

import mlx.core as mx
import pytest
from support.commands import main_of

from mlx_dflash2.doctor import kernels as doctor_kernels
from mlx_dflash2.kernels._common import load_source
from mlx_dflash2.kernels.cases import all_cases

from .mutate import mutants


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["doctor", "--kernels", "--repeats", "1"])


def few():
    """One small case of each kernel, of more than one row."""
    small = {}
    for case in all_cases():
        if not case.real and "1x1 " not in case.shape and "L1 " not in case.shape:
            small.setdefault(case.kernel, case)
    return list(small.values())


def test_the_table(kernels, arguments, monkeypatch, capsys):
    monkeypatch.setattr(doctor_kernels, "all_cases", few)
    with pytest.raises(SystemExit) as left:
        main_of("doctor")()
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert out.count(" ok\n") == sum(len(case.dtypes) for case in few())
    assert "all kernels are right" in out


def test_a_wrong_kernel(kernels, arguments, monkeypatch, capsys):
    cases = [case for case in few() if case.kernel in ("grouped_conv", "top_k")]
    source = load_source("grouped_conv.metal")
    (mutant,) = (m for m in mutants(source) if m.label.startswith("loop halved"))
    kernels.edit = lambda text: replace(text, source=text.source.replace(source, mutant.text))
    monkeypatch.setattr(doctor_kernels, "all_cases", lambda: cases)
    with pytest.raises(SystemExit) as left:
        main_of("doctor")()
    assert left.value.code == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    verdicts = {(row[0], row[-1]) for row in rows if row[0] in ("grouped_conv", "top_k")}
    assert verdicts == {("grouped_conv", "WRONG"), ("top_k", "ok")}


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main_of("doctor")()
    assert left.value.code == 1
    out = capsys.readouterr().out
    assert out.startswith("No Metal kernel runs on this machine: ") and out.count("\n") == 1


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Mac")
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_kernel_on_metal(case):
    """The real thing, for those who have it."""
    for dtype in case.dtypes:
        result = doctor_kernels.check(case, dtype, repeats=1)
        assert result.failure is None and result.error <= 1

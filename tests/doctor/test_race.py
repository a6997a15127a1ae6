"""`doctor --race`: the table of who wins, and a clear word without a GPU."""

import mlx.core as mx
import pytest
from support.commands import main_of

from mlx_dflash2.doctor import command, race
from mlx_dflash2.kernels.race import STALLS, Kind, Race, Result

KIND = Kind(5120, 17408, 4, 64, "bfloat16", False, 8)


def lines_of(*results):
    kinds = (KIND._replace(rows=rows) for rows in range(2, 2 + len(results)))
    return list(race.table(Race(dict(zip(kinds, results, strict=True)))))


def test_the_table():
    head, two, three, four, last = lines_of(
        Result(3e-4, 2e-4), Result(2e-4, 3e-4), Result(float("inf"), 0.0, "it does not run")
    )
    assert head.split()[:2] == ["rows", "K"]
    assert two.split() == "2 5120 x 17408 4 64 bfloat16 300 200 0.67 MLX".split()
    assert three.split()[-4:] == ["200", "300", "1.50", "kernel"]
    assert four.endswith("0.00  it does not run")
    assert last == "the kernel is used for 1 of 3"


def test_a_stall_shows_and_drops_the_kernel():
    lines = lines_of(Result(2e-4, 3e-4), Result(100.0, 3e-4, STALLS))
    assert lines[-2].endswith(STALLS) and lines[-1] == "the kernel is used for 0 of 2"


def test_the_command_races_until_all_is_known(saved_pair, monkeypatch, capsys):
    results = [{}, {KIND: Result(1.0, 2.0)}, {KIND: Result(1.0, 2.0)}]
    calls = []

    def race_here(models, rows):
        calls.append(rows)
        return Race(results[min(len(calls), 2)])

    monkeypatch.setattr(race, "race_here", race_here)
    monkeypatch.setattr(command, "why_no_kernels", lambda: None)
    monkeypatch.setattr(command, "load_pair", lambda _: saved_pair)
    monkeypatch.setattr(command, "find_pair", lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", ["doctor", "--race"])
    main_of("doctor")()
    assert calls == [saved_pair.drafter.block_size] * 2
    assert "used for 1 of 1" in capsys.readouterr().out


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_a_gpu(saved_pair, monkeypatch):
    monkeypatch.setattr("sys.argv", ["doctor", "--race"])
    with pytest.raises(SystemExit, match="No Metal kernel runs on this machine"):
        main_of("doctor")()
    with pytest.raises(ValueError, match="No Metal kernel"):
        race.race_pair(saved_pair)

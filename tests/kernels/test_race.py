"""The race between the kernel and MLX's own product, on a clock that the test turns."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_dflash2.kernels import PlainFormWarning, _common
from mlx_dflash2.kernels import race as module
from mlx_dflash2.kernels.race import Kind, Race, Result, device_key, read_race, write_race


class Device:
    """Two forms that take a time of their own for each call, and a clock that knows it."""

    def __init__(self, monkeypatch, kernel, stock=1e-4):
        self.now, self.calls, self.runs = 0.0, [], True
        times = {"kernel": kernel, "stock": stock}

        def form(name):
            def call(x, matrix):
                time = times[name]
                self.now += time(x.shape[0]) if callable(time) else time
                self.calls.append((name, x.shape[0]))
                return real(x, matrix)

            return call

        real = module.qmm_rows.ops
        monkeypatch.setattr(module.qmm_rows, "kernel", form("kernel"))
        monkeypatch.setattr(module.qmm_rows, "ops", form("stock"))
        monkeypatch.setattr(module.qmm_rows, "runs_kernel", lambda *_: self.runs)

    def race(self):
        return Race(clock=lambda: self.now)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.QuantizedLinear(64, 32)
        self.layers = [nn.QuantizedLinear(64, 128) for _ in range(2)]
        self.plain = nn.Linear(64, 64)


@pytest.fixture
def model():
    return Model()


def raced(device, model, most_rows=8):
    race = device.race()
    race.run([model], most_rows)
    return race


def test_the_faster_one_is_used(monkeypatch, model):
    """The kernel's time grows more slowly with rows, and passes MLX's between 3 and 4."""
    device = Device(monkeypatch, 1.1e-4, lambda rows: 1e-4 if rows < 4 else 2e-4)
    race = raced(device, model)
    assert race.rows_of(model.small) == race.rows_of(model.layers[0]) == {4, 5, 6, 7, 8}
    assert race.rows_of(model.plain) == frozenset()
    assert {kind.rows for kind in race.results} == {2, 3, 4, 6, 8}


@pytest.mark.parametrize("kernel, wins", [(0.96e-4, True), (0.98e-4, False), (1.5e-4, False)])
def test_it_has_to_win_by_a_margin(kernel, wins, monkeypatch, model):
    race = raced(Device(monkeypatch, kernel), model)
    assert bool(race.rows_of(model.small)) == wins


def test_one_slow_chain_decides_nothing(monkeypatch, model):
    """Medians: a hiccup of the machine costs no race."""
    hiccups = iter([0.0] * 9 + [0.02])
    device = Device(monkeypatch, lambda _: 0.8e-4 + next(hiccups, 0.0))
    assert raced(device, model).rows_of(model.layers[0]) >= {8}


def test_the_forms_take_turns(monkeypatch, model):
    device = Device(monkeypatch, 1e-4)
    raced(device, model, most_rows=2)
    names = [name for name, _ in device.calls]
    turns = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert turns.count("kernel") >= 2 * module.RUNS


def test_time_is_limited_and_large_matrices_come_first(monkeypatch, model):
    device = Device(monkeypatch, 0.5e-1, 1e-1)
    race = raced(device, model)
    assert device.now < module.BUDGET + 1.5
    assert race.results and all(kind.N == 128 for kind in race.results)
    assert race.rows_of(model.small) == frozenset()
    # What is left is raced the next time.
    before = len(race.results)
    race.run([model], 8)
    assert len(race.results) > before


def test_a_kernel_that_stalls_is_dropped_for_good(monkeypatch, model):
    device = Device(monkeypatch, 105.0)
    race = device.race()
    with pytest.warns(PlainFormWarning, match="10 times as long"):
        race.run([model], 8)
    assert [name for name, _ in device.calls].count("kernel") == 2
    assert race.rows_of(model.layers[0]) == frozenset()
    device.calls.clear()
    race.run([model], 8)
    assert device.calls == []


def test_a_kernel_that_stalls_at_some_rows_is_not_used_at_others(monkeypatch, model):
    device = Device(monkeypatch, lambda rows: 5.0 if rows == 6 else 0.5e-4)
    race = device.race()
    with pytest.warns(PlainFormWarning):
        race.run([model], 8)
    assert any(result.wins for result in race.results.values())
    assert race.rows_of(model.layers[0]) == frozenset()


@pytest.mark.filterwarnings("ignore::mlx_dflash2.kernels.PlainFormWarning")
def test_a_kernel_that_is_wrong_or_does_not_run_is_not_used(monkeypatch, model):
    device = Device(monkeypatch, 0.5e-4)
    monkeypatch.setattr(
        module.qmm_rows, "kernel", lambda x, matrix: mx.zeros((x.shape[0], matrix.weight.shape[0]))
    )
    race = raced(device, model)
    assert not any(race.rows_of(m) for m in (model.small, *model.layers))
    assert "differs" in next(iter(race.results.values())).fault
    device.runs = False
    race = raced(device, model)
    assert {result.fault for result in race.results.values()} == {"it does not run"}


def test_a_line_is_said_once(monkeypatch, model):
    device, lines = Device(monkeypatch, 1e-4), []
    race = device.race()
    race.run([model], 8, lines.append)
    race.run([model], 8, lines.append)
    assert len(lines) == 1 and "1.5 s" in lines[0]


def test_results_are_kept_by_device_and_versions(tmp_path):
    kind = Kind(64, 128, 4, 64, "float32", False, 8)
    race = Race({kind: Result(1.0, 2.0), kind._replace(rows=6): Result(3.0, 2.0, "slow")})
    lost = kind._replace(rows=2)
    race.results[lost] = Result(float("inf"), 0.0, "it does not run")
    file = tmp_path / "new" / "race.json"
    write_race(race, file, "M4")
    write_race(Race({kind: Result(5.0, 1.0)}), file, "M5")
    del race.results[lost]
    assert read_race(file, "M4").results == race.results
    assert read_race(file, "M5").results == {kind: Result(5.0, 1.0)}
    assert read_race(file, "M6").results == {}
    file.write_text("[broken")
    assert read_race(file, "M4").results == {}
    assert "MLX" in device_key()


def test_without_kernels_models_stay_themselves(model):
    assert module.faster([model], 8) == [model] and module.faster([model], 8)[0] is model


def test_a_pair_is_raced_once_and_remembered(monkeypatch, model, tmp_path):
    device = Device(monkeypatch, 0.5e-4)
    monkeypatch.setattr(module, "race_file", lambda: tmp_path / "race.json")
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    real = module.read_race
    monkeypatch.setattr(
        module, "read_race", lambda *where: replace(real(*where), clock=lambda: device.now)
    )
    library = _common.KernelLibrary()
    monkeypatch.setattr(module, "LIBRARY", library)
    library.on(str(mx.gpu)).unavailable = None
    (copied,) = module.faster([model], 8)
    assert copied is not model and copied.layers[0].kernel_rows >= {8}
    device.calls.clear()
    module.faster([model], 8)
    library.clear()
    library.on(str(mx.gpu)).unavailable = None
    (copied,) = module.faster([model], 8)
    assert device.calls == [] and copied.layers[0].kernel_rows >= {8}
    library.on(str(mx.gpu)).switch_off()
    assert module.faster([model], 8) == [model]

"""What the doctor says of the BLAS."""

import sys
from pathlib import Path

from mlx_dflash2.blas import measure
from mlx_dflash2.doctor import environment


def test_the_tests_run_on_the_stock_blas():
    """Exactness needs it: its rows do not depend on how many there are."""
    if sys.platform == "darwin":
        assert measure.blas_file() == "Accelerate"
    else:
        file = Path(measure.blas_file())
        assert file.is_file() and file.parent.name == "mlx_cpu.libs"
    assert measure.has_slow_blas() == (sys.platform != "darwin")
    assert measure.blas_threads() is None


def test_the_speed_is_that_of_the_products(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 1e-3 * next(clock))
    assert measure.gflops() == 2 * measure.SIZE**3 / 1e-3 / 1e9
    assert next(clock) == 2 * (measure.REPEATS + 1)


def test_the_doctor_s_line(monkeypatch):
    monkeypatch.setattr(environment, "blas_file", lambda: "/a/libopenblas.so")
    monkeypatch.setattr(environment, "gflops", lambda: 123.456)
    for threads, text in ((None, ""), (1, ", 1 thread"), (4, ", 4 threads")):
        monkeypatch.setattr(environment, "blas_threads", lambda n=threads: n)
        assert environment._blas() == (
            f"BLAS of MLX's CPU backend: /a/libopenblas.so{text}, 123 GFLOP/s in float32"
        )

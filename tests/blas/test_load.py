"""Which library MLX's products are bound to, as the dynamic linker tells it."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.commands import options_of

from mlx_dflash2.blas import library
from mlx_dflash2.blas import load as load_module
from mlx_dflash2.cli import start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")
ROOT = Path(__file__).parents[2]
COMPUTING = ("benchmark", "chat", "demo", "doctor", "generate", "train")
BOUND = re.compile(r"binding file \S+/libmlx\.so \[0\] to (\S+) \[0\]: normal symbol `(cblas_\w+)'")
STOCK = "mlx_cpu.libs/libblas-"


@pytest.fixture
def bound(tmp_path):
    """Runs a Python process: the files that MLX's products are bound to, stdout and stderr."""

    def run(*arguments, **environment):
        log = tmp_path / "log"
        debug = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(log), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | debug | environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        files = [file for path in tmp_path.glob("log.*") for file in _bound_to(path)]
        assert len(files) == len(library.FUNCTIONS)
        (file,) = set(files)
        return file, done.stdout, done.stderr

    return run


def _bound_to(log: Path) -> list[str]:
    return [match[1] for match in BOUND.finditer(log.read_text(errors="replace"))]


def test_a_command_multiplies_with_the_fast_blas(bound):
    file, out, err = bound("-m", "mlx_dflash2.doctor")
    assert file == str(library.library()) and "GFLOP/s" in out and not err


def test_the_dispatcher_s_command_too(bound):
    file, *_ = bound("-m", "mlx_dflash2", "doctor")
    assert file == str(library.library())


def test_the_flag_switches_it_off(bound):
    file, _, err = bound("-m", "mlx_dflash2.doctor", "--no-fast-blas")
    assert STOCK in file and not err


def test_the_user_s_own_blas_is_left_alone(bound, tmp_path):
    own = tmp_path / "own.so"
    shutil.copy(library.library(), own)
    code = (
        "from mlx_dflash2.cli.start import load_fast_blas; print(load_fast_blas());"
        f"import mlx.core; print({str(library.library())!r} in open('/proc/self/maps').read())"
    )
    file, out, err = bound("-c", code, LD_PRELOAD=str(own))
    assert file == str(own) and out == "None\nFalse\n" and not err


def test_importing_the_package_changes_nothing(bound):
    code = (
        "import os, ctypes; before = dict(os.environ); import mlx_dflash2;"
        "from mlx_dflash2 import generate, load, batch_generate, embedded;"
        "assert dict(os.environ) == before; print(callable(generate));"
        "print('openblas' in open('/proc/self/maps').read().replace('scipy_openblas', ''))"
    )
    file, out, err = bound("-c", code)
    assert STOCK in file and out == "True\nFalse\n" and not err


BROKEN = {
    "absent": "library.OPENBLAS = 'no-such-wheel'",
    "no library": "library.library = load.library = lambda: __file__",
    "no function": "load.library = lambda: __import__('_heapq').__file__",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_without_a_library_there_is_one_line_and_the_stock_blas(bound, fault):
    code = (
        f"__file__ = {__file__!r}\n"
        "from mlx_dflash2.blas import library, load\n"
        f"{BROKEN[fault]}\n"
        "print(load.load_fast_blas())\n"
        "import mlx.core as mx\n"
        "print((mx.ones((2, 3)) @ mx.ones((3, 2))).tolist())"
    )
    file, out, err = bound("-c", code)
    line, product = out.splitlines()
    assert line.startswith("MLX multiplies with its slow BLAS: ")
    assert STOCK in file and product == "[[3.0, 3.0], [3.0, 3.0]]" and not err


def test_the_threads_are_ours_unless_the_user_chose():
    code = (
        "from mlx_dflash2.blas import load; print(load.load_fast_blas());"
        "from mlx_dflash2.blas.measure import blas_threads; print(blas_threads())"
    )
    load = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    environment = {k: v for k, v in os.environ.items() if k not in load_module.THREADS}
    environment["PYTHONPATH"] = str(ROOT)
    expected = load_module.num_threads()
    assert load(env=environment).stdout == f"None\n{expected}\n"
    chosen = 1 if expected > 1 else min(2, os.cpu_count())
    own = environment | {"OPENBLAS_NUM_THREADS": str(chosen)}
    assert load(env=own).stdout == f"None\n{chosen}\n"


@pytest.mark.parametrize("name", COMPUTING)
def test_every_command_that_computes_loads_it_before_mlx(name):
    code = (
        "import importlib, sys\n"
        "from mlx_dflash2.cli import start\n"
        "start.load_fast_blas = lambda: print('mlx.core' in sys.modules) or sys.exit()\n"
        "sys.argv = ['command']\n"
        f"importlib.import_module('mlx_dflash2.{name}.__main__').main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("name", COMPUTING)
def test_every_command_that_computes_has_the_flag(name):
    parse = options_of(name).parse
    assert parse(["--no-fast-blas"]).no_fast_blas and not parse([]).no_fast_blas


@pytest.fixture
def started(monkeypatch):
    """Starts a command with arguments; tells whether the BLAS and the command came, in turn."""
    calls = []
    monkeypatch.setattr(start, "load_fast_blas", lambda: calls.append("BLAS") or "a problem")
    monkeypatch.setattr(
        importlib.import_module("mlx_dflash2.generate.command"),
        "main",
        lambda args: calls.append("command"),
    )

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        start.start("mlx_dflash2.generate")
        return calls

    return run


def test_start_says_a_problem_in_one_line(started, capsys):
    assert started("--prompt", "a") == ["BLAS", "command"]
    assert capsys.readouterr().err == "warning: a problem\n"


@pytest.mark.parametrize("flag", ["--no-fast-blas", "--no-fast"])
def test_start_heeds_the_flag_and_its_abbreviations(started, capsys, flag):
    assert started("--prompt", "a", flag) == ["command"]
    assert not capsys.readouterr().err


def test_commands_without_products_load_nothing(monkeypatch, capsys):
    monkeypatch.setattr(start, "load_fast_blas", lambda: pytest.fail("the BLAS was asked for"))
    monkeypatch.setattr(sys, "argv", ["convert", "--model", "no/such/drafter/here"])
    with pytest.raises(SystemExit, match="error: "):
        start.start("mlx_dflash2.convert")


def test_nothing_is_loaded_on_a_mac_or_without_the_wheel(monkeypatch):
    monkeypatch.setattr(load_module, "library", lambda: pytest.fail("the library was asked for"))
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(load_module, "WHEEL", "no-such-wheel")
    assert load_module.load_fast_blas() is None
    monkeypatch.undo()
    monkeypatch.setattr(load_module, "library", lambda: pytest.fail("the library was asked for"))
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert load_module.load_fast_blas() is None


def test_nothing_is_loaded_behind_mlx(monkeypatch):
    assert "mlx.core" in sys.modules
    monkeypatch.setattr(load_module, "library", lambda: pytest.fail("the library was asked for"))
    assert load_module.load_fast_blas() is None

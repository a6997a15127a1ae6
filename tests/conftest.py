import os
import shutil
import sys

# On an M5 MLX multiplies float32 in TF32 unless it finds this when it is loaded.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

# Tests of exact tokens rely on the order in which the CPU backend adds up, which is the same for
# one row and for many; a GPU's kernels for one row and for several add up in orders of their own.
# mlx-lm makes its stream when it is imported.
mx.set_default_device(mx.cpu)

import mlx_lm
import pytest
from support import NO_CLANG, WHAT_THE_BENCH_NEEDS
from support.commands import main_of
from support.saved_models import save_drafter, save_target
from support.tiny import drafter_config

from mlx_dflash2 import load_drafter
from mlx_dflash2.pairs.load import Pair


def pytest_collection_modifyitems(items):
    """Give slow tests a timeout of their own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def pytest_terminal_summary(terminalreporter):
    """Say once what the tests of the Metal kernels would have needed."""
    skipped = terminalreporter.stats.get("skipped", ())
    if count := sum(NO_CLANG in report.longrepr[2] for report in skipped):
        terminalreporter.section("Metal kernels were not tested", yellow=True)
        terminalreporter.line(f"{count} tests were skipped: {WHAT_THE_BENCH_NEEDS}.")


@pytest.fixture(autouse=True)
def default_device(request):
    """The CPU, except for tests that are marked ``metal``."""
    mx.set_default_device(mx.gpu if request.node.get_closest_marker("metal") else mx.cpu)


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(0)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Saved models, and folders that are none."""
    path = tmp_path_factory.mktemp("models")
    save_target(path / "target")
    save_target(path / "raw", chat_template=None)
    save_drafter(path / "drafter", drafter_config(block_size=4))
    (path / "empty").mkdir()
    (path / "config-only").mkdir()
    shutil.copy(path / "target" / "config.json", path / "config-only")
    return path


@pytest.fixture(scope="session")
def saved_pair(model_folders):
    target = str(model_folders / "target")
    return Pair(target, *mlx_lm.load(target), load_drafter(model_folders / "drafter"))


@pytest.fixture
def invoke(monkeypatch, capsys, model_folders):
    """Runs a command's main with arguments: its exit status, stdout and stderr.

    Without a ``main`` it is the generate command on the saved pair.
    """
    models = ["--model", f"{model_folders / 'target'}"]
    models += ["--draft-model", f"{model_folders / 'drafter'}"]

    def invoke(*args, main=None):
        argv = ["command", *args] if main else ["command", *models, *args]
        monkeypatch.setattr(sys, "argv", argv)
        status = 0
        try:
            (main or main_of("generate"))()
        except SystemExit as error:
            status = error.code or 0
            if isinstance(status, str):
                # As the interpreter does with a message.
                print(status, file=sys.stderr)
                status = 1
        return status, *capsys.readouterr()

    return invoke

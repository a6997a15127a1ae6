"""Another MLX or mlx-lm than those tested with is told in one line by every command."""

from importlib import metadata

import pytest
from support.commands import main_of

from mlx_dflash2 import __main__ as dispatcher
from mlx_dflash2.cli.versions import version_problem

TESTED = ("mlx<0.33,>=0.32.2", "mlx-lm<0.33,>=0.32.2")
COMMANDS = ("generate", "chat", "demo", "benchmark", "doctor", "convert", "train", "download")


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions that are installed."""
    original = metadata.version

    def install(**versions):
        versions = {name.replace("_", "-"): number for name, number in versions.items()}

        def version(package):
            if package in versions and versions[package] is None:
                raise metadata.PackageNotFoundError(package)
            return versions.get(package) or original(package)

        monkeypatch.setattr(metadata, "version", version)

    return install


@pytest.mark.parametrize(
    "versions, fits",
    [
        ({"mlx": "0.32.2", "mlx_lm": "0.32.2"}, True),
        ({"mlx": "0.32.9", "mlx_lm": "0.32.99"}, True),
        ({"mlx": "0.33.0", "mlx_lm": "0.32.2"}, False),
        ({"mlx": "0.32.2", "mlx_lm": "0.33.0rc1"}, False),
        ({"mlx": "0.32.1", "mlx_lm": "0.32.2"}, False),
        ({"mlx": "0.32.2", "mlx_lm": "1.0"}, False),
        ({"mlx": "0.9.0", "mlx_lm": None}, False),
        ({"mlx": "0.32.3.dev20261201", "mlx_lm": "0.32.2"}, True),
    ],
)
def test_the_line_names_what_is_installed_and_what_is_tested(installed, versions, fits):
    installed(**versions)
    problem = version_problem()
    assert (problem is None) == fits
    if problem:
        assert "\n" not in problem
        assert f"mlx {versions['mlx']} and mlx-lm {versions['mlx_lm'] or 'missing'}" in problem
        assert "tested with mlx <0.33,>=0.32.2 and mlx-lm <0.33,>=0.32.2" in problem


def test_the_tested_ranges_are_those_that_are_required():
    assert set(TESTED) <= set(metadata.requires("mlx-dflash2"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("args", [["--version"], ["--model", "no/such/model"]], ids=" ".join)
def test_every_command_tells(installed, invoke, command, args):
    installed(mlx="0.33.0")
    if args != ["--version"]:
        if command == "demo":
            pytest.skip("it takes no model")
        args = args[1:] if command == "download" else args
    _, _, err = invoke(*args, main=main_of(command))
    assert err.count("warning: mlx 0.33.0 and mlx-lm ") == 1


def test_the_dispatcher_and_omlx_tell(installed, invoke, tmp_path):
    installed(mlx_lm="0.31.0")
    args = ["status", "--base-path", f"{tmp_path / 'none'}"]
    for command, given in ((dispatcher.main, ["--version"]), (main_of("omlx"), args)):
        _, _, err = invoke(*given, main=command)
        assert err.count("and mlx-lm 0.31.0: mlx-dflash2 ") == 1
    out = invoke("--version", main=dispatcher.main)[1]
    assert len(out.splitlines()) == 1

"""What is shipped, and that importing it changes nothing."""

import configparser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

import mlx_dflash2
from mlx_dflash2.pairs.known import DRAFTERS
from mlx_dflash2.targets import supported_targets

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(source, target, directory):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


def sources(folder):
    """The files of a source folder that belong to a package, relative to its parent."""
    files = {path for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {str(p.relative_to(ROOT)) for p in files if p.suffix != ".pyc" and p.name[0] != "."}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))) as file:
        yield file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    path = tmp_path_factory.mktemp("sdist")
    built = build(ROOT, "sdist", path)
    with tarfile.open(built) as file:
        file.extractall(path, filter="data")
    return path / built.name.removesuffix(".tar.gz")


def dist_info(wheel, name):
    (path,) = (n for n in wheel.namelist() if re.fullmatch(rf"[^/]*\.dist-info/{name}", n))
    return wheel.read(path).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    metal = {f"mlx_dflash2/{name}" for name in sources("metal")}
    expected = sources("mlx_dflash2") | metal
    assert metal and "mlx_dflash2/embedded/smollm2_135m_dflash2/model.safetensors" in expected
    assert {n for n in wheel.namelist() if ".dist-info/" not in n} == expected
    for name in expected:
        source = ROOT / (name.removeprefix("mlx_dflash2/") if name in metal else name)
        assert wheel.read(name) == source.read_bytes(), name


def test_wheel_metadata(wheel):
    metadata = Parser().parsestr(dist_info(wheel, "METADATA"))
    assert metadata["Name"] == PROJECT["name"]
    assert metadata["Version"] == mlx_dflash2.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert dist_info(wheel, "WHEEL").count("py3-none-any") == 1


def test_wheel_puts_the_commands_on_path(wheel):
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str
    parser.read_string(dist_info(wheel, "entry_points.txt"))
    scripts = dict(parser["console_scripts"])
    assert scripts == PROJECT["scripts"]
    assert {"mlx_dflash2", "mlx_dflash2.generate"} <= set(scripts)
    lines = []
    for target in scripts.values():
        module, _, function = target.partition(":")
        lines.append(f"from {module} import {function}; assert callable({function})")
    run_python("\n".join(lines))


def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    for name in ("README.md", "LICENSE", "pyproject.toml", "PKG-INFO"):
        assert (sdist / name).is_file()
    assert f"Version: {mlx_dflash2.__version__}\n" in (sdist / "PKG-INFO").read_text()
    with zipfile.ZipFile(build(sdist, "wheel", tmp_path)) as other:
        assert set(other.namelist()) == set(wheel.namelist())


def test_readme_shows_what_there_is():
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{(ROOT / 'examples' / 'generate_response.py').read_text()}```" in readme
    words = set(re.findall(r"[\w./-]+", readme)) | set(re.findall(r"\w+", readme))
    assert set(supported_targets()) <= words
    assert {name.rpartition("/")[2] for name in DRAFTERS} <= {w.rstrip(".") for w in words}


def test_versions_agree():
    command = [Path(sys.executable).parent / "mlx_dflash2", "--version"]
    assert run(command).stdout == f"{mlx_dflash2.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", mlx_dflash2.__version__)


@pytest.mark.parametrize("first", ["mlx_dflash2", "mlx_dflash2.generate.command"])
def test_public_names_are_imported_when_they_are_used(first):
    """The function `generate` is found by its name, whether or not its command was imported."""
    code = (
        "import importlib, sys, mlx_dflash2\n"
        "assert 'mlx.core' not in sys.modules and 'mlx_lm' not in sys.modules\n"
        f"importlib.import_module({first!r})\n"
        "for name in mlx_dflash2.__all__:\n"
        "    is_module = getattr(mlx_dflash2, name).__class__.__name__ == 'module'\n"
        "    assert is_module == (name == 'embedded'), name\n"
        "from mlx_dflash2 import generate as function, generate\n"
        "from mlx_dflash2.generate import dflash_generate_step, generate as same\n"
        "assert mlx_dflash2.generate is function is same and callable(function)\n"
        "try:\n"
        "    mlx_dflash2.no_such_name\n"
        "except AttributeError as error:\n"
        "    print(error)"
    )
    assert run_python(code) == "module 'mlx_dflash2' has no attribute 'no_such_name'\n"


def run(command, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


def run_python(code, **environment):
    done = run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], **environment)
    assert not done.stderr
    return done.stdout


SNAPSHOT = """
import importlib, inspect, sys
import mlx.core as mx, mlx.nn, mlx_lm, mlx_lm.generate, mlx_lm.models.cache, mlx_lm.tokenizer_utils
for name in ("llama", "qwen3", "qwen3_5", "gemma4_text", "gated_delta", "base"):
    importlib.import_module(f"mlx_lm.models.{name}")

def snapshot():
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("mlx", "mlx_lm") or name in new:
            continue
        for key, value in list(vars(module).items()):
            # A submodule that is imported later becomes an attribute of its package.
            if inspect.ismodule(value):
                continue
            seen[name, key] = value
            if inspect.isclass(value):
                seen |= {(name, key, k): v for k, v in list(vars(value).items())}
    return seen

new = set()
loaded = set(sys.modules)
before, device, stream = snapshot(), mx.default_device(), mx.default_stream(mx.default_device())
state = [mx.array(s) for s in mx.random.state]
"""
CHECK = """
new = set(sys.modules) - loaded
after = snapshot()
assert len(before) > 3000, len(before)
changed = {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)}
assert not changed, changed
assert mx.default_device() == device and mx.default_stream(device) == stream
assert all(mx.array_equal(a, b) for a, b in zip(state, mx.random.state))
print("unchanged")
"""
IMPORT_ALL = """
import pkgutil, mlx_dflash2
for found in pkgutil.walk_packages(mlx_dflash2.__path__, "mlx_dflash2."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""


def test_import_has_no_side_effects(tmp_path):
    """No module of the package patches, writes, or moves a default."""
    environment = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    assert run_python(SNAPSHOT + IMPORT_ALL + CHECK, **environment) == "unchanged\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "patch",
    [
        "mlx_lm.models.cache.KVCache.trim = lambda *_: 0",
        "mlx.nn.Linear.__call__ = lambda *_: 0",
        "mlx_lm.generate = None",
        "mx.set_default_stream(mx.new_stream(mx.cpu))",
        "mx.random.seed(5)",
    ],
)
def test_side_effects_would_be_seen(patch):
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_python(SNAPSHOT + patch + CHECK)
    assert "AssertionError" in error.value.stderr


def test_float32_is_float32_in_the_tests():
    """An M5 rounds products of float32 matrices to TF32 unless MLX is told before it is loaded."""
    text = (Path(__file__).parent / "conftest.py").read_text()
    assert "MLX_ENABLE_TF32" in os.environ
    assert text.index('"MLX_ENABLE_TF32"') < text.index("import mlx")
    # mlx-lm's stream is the CPU's, too.
    assert text.index("set_default_device(mx.cpu)") < text.index("import mlx_lm")
    assert generation_stream.device == mx.cpu == mx.default_device()

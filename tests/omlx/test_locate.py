"""Finding oMLX's files, its version, and its models."""

import plistlib
from pathlib import Path

import pytest
from support.omlx_tools import (
    DRAFTER_CONFIG,
    MODEL,
    TARGET_CONFIG,
    FakeServer,
    make_base,
    make_folder,
    settings,
)

from mlx_dflash2.omlx import locate
from mlx_dflash2.omlx.locate import (
    OmlxVersion,
    base_dir,
    discover,
    find_drafter,
    find_target,
    parse_version,
)


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".omlx").mkdir()
    return tmp_path


def app_file(home, text):
    path = home / "Library" / "Application Support" / "oMLX" / "base-path"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_base_directory_in_order(home):
    for name in ("flag", "env", "app"):
        (home / name).mkdir()
    assert base_dir(None, {}, home) == home / ".omlx"
    app_file(home, f"  {home / 'app'}\n")
    assert base_dir(None, {}, home) == home / "app"
    with pytest.raises(ValueError, match="base directory: found"):
        base_dir(None, {"OMLX_BASE_PATH": str(home / "env")}, home)
    assert base_dir(None, {"OMLX_BASE_PATH": str(home / "app")}, home) == home / "app"
    everything = {"OMLX_BASE_PATH": str(home / "env")}
    assert base_dir(str(home / "flag"), everything, home) == home / "flag"


def test_two_directories_with_settings_are_ambiguous(home):
    (home / "env").mkdir()
    environ = {"OMLX_BASE_PATH": str(home / "env")}
    assert base_dir(None, environ, home) == home / "env"
    (home / ".omlx" / "model_settings.json").write_text("{}")
    with pytest.raises(ValueError, match="choose with --base-path"):
        base_dir(None, environ, home)
    (home / "env").rmdir()
    (home / "env").symlink_to(home / ".omlx")
    assert base_dir(None, environ, home) == home / "env"


def test_missing_base_directory_is_not_created(home):
    for given, environ in ((str(home / "no"), {}), (None, {"OMLX_BASE_PATH": str(home / "no")})):
        with pytest.raises(FileNotFoundError, match="base directory"):
            base_dir(given, environ, home)
    assert not (home / "no").exists()


def test_discovery_is_two_levels_deep_and_first_wins(tmp_path):
    for folder in ("m/A", "m/org/B", "m/org/A", "m/zorg/B", "m/.hidden/C", "m/x/y/D", "n/E"):
        make_folder(tmp_path / folder, {})
    (make_folder(tmp_path / "m" / "F", {}) / "adapter_config.json").write_text("{}")
    found = discover([tmp_path / "m", tmp_path / "n", tmp_path / "nowhere"])
    names = {name: str(path.relative_to(tmp_path)) for name, path in found.items()}
    assert names == {"A": "m/A", "B": "m/org/B", "E": "n/E"}


def test_target_by_folder_and_by_name(tmp_path):
    models = make_base(tmp_path) / "models"
    folder = models / "mlx-community" / MODEL
    for given in (str(folder), f"{folder}/", f"{folder}/../{MODEL}", MODEL):
        found = find_target(given, [models])
        assert found == (MODEL, folder, "")
    assert find_target(str(folder), [models], "renamed").model_id == "renamed"


def test_target_refusals(tmp_path):
    models = make_base(tmp_path) / "models"
    with pytest.raises(ValueError, match="without '/'"):
        find_target(f"mlx-community/{MODEL}", [models])
    with pytest.raises(ValueError, match=f"allowed: a model folder, .*{MODEL}"):
        find_target("no-such-model", [models])
    second = make_folder(models / "zzz" / MODEL, TARGET_CONFIG)
    with pytest.raises(ValueError, match="the first model named"):
        find_target(str(second), [models])
    outside = find_target(str(make_folder(tmp_path / "else" / "X", TARGET_CONFIG)), [models])
    assert outside.model_id == "X" and "--model-dir" in outside.note


def test_linked_target_has_the_name_of_the_link(tmp_path):
    models = make_base(tmp_path) / "models"
    real = make_folder(tmp_path / "store" / "abc123", TARGET_CONFIG)
    (models / "Linked").symlink_to(real)
    found = find_target(str(models / "Linked"), [models])
    assert found.model_id == "Linked" and found.note == ""


def test_target_is_named_as_its_folder_is_listed(tmp_path, monkeypatch):
    """As on a file system that opens `tiny` too where the folder is listed as `Tiny`."""
    listed = make_folder(tmp_path / "Tiny", TARGET_CONFIG)
    (tmp_path / "tiny").symlink_to(listed)
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([listed]))
    assert find_target(str(tmp_path / "tiny"), [tmp_path]).model_id == "Tiny"


def hub(tmp_path, name="models--mlx-community--Tiny", config=TARGET_CONFIG):
    folder = tmp_path / "hub" / name
    make_folder(folder / "snapshots" / "aaa", config)
    make_folder(folder / "snapshots" / "bbb", config)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("aaa")
    return folder


def test_target_in_the_hub_cache(tmp_path):
    folder = hub(tmp_path)
    for given in (folder, folder / "snapshots" / "aaa"):
        found = find_target(str(given), [tmp_path])
        assert found.model_id == "mlx-community--Tiny"
        assert found.folder == folder / "snapshots" / "aaa"


def test_drafter_is_an_absolute_real_path(tmp_path, monkeypatch):
    real = make_folder(tmp_path / "real", DRAFTER_CONFIG)
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    assert find_drafter("link") == real
    folder = hub(tmp_path, "models--z-lab--D", DRAFTER_CONFIG)
    assert find_drafter(str(folder)) == folder / "snapshots" / "aaa"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match="hf download z-lab/Other"):
        find_drafter("z-lab/Other")
    for bare in ("Qwen3.8-27B-DFlash2", "no/such/folder"):
        with pytest.raises(FileNotFoundError, match="drafter: found"):
            find_drafter(bare)


# The version


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    monkeypatch.setattr(locate, "APPS", (tmp_path / "oMLX.app",))
    monkeypatch.setattr(locate, "BREW", (tmp_path / "brew",))


NOWHERE = "http://127.0.0.1:9"


def write_package(folder, number="0.7.1", keys=("dflash_enabled", "dflash_block_size")):
    folder.mkdir(parents=True)
    if number is not None:
        (folder / "_version.py").write_text(f"__version__ = '{number}'\nraise RuntimeError\n")
    fields = "".join(f"    {key}: bool = False  # words: and more\n" for key in keys)
    source = 'class Other:\n    x: int = 1\n\n\n@dataclass\nclass ModelSettings:\n    """A.\n\n'
    source += '        docs: of a field\n    """\n\n' + fields + "\n    def f(self): ...\n"
    (folder / "model_settings.py").write_text(source)


def test_versions_sort_in_release_order():
    order = ["0.3.5", "0.3.9.dev1", "0.3.9rc1", "0.3.9", "0.6.2", "0.6.2-dflash2", "0.6.3rc1"]
    order += ["0.6.3rc2", "0.6.3", "0.6.10", "0.7.0.dev2", "0.7.0", "0.7.0.post1", "1.0.0"]
    assert sorted(order, key=parse_version) == order
    with pytest.raises(ValueError, match="omlx_version: found 'new'"):
        OmlxVersion.find("new", NOWHERE)


def test_what_is_given_counts_before_what_is_asked_and_found(nothing_installed, tmp_path):
    with FakeServer(tmp_path) as server:
        assert OmlxVersion.find("0.6.3rc1", server.url) == ("0.6.3rc1", "--omlx-version", set())
        write_package(tmp_path / "oMLX.app" / "Contents" / "Resources" / "omlx")
        assert OmlxVersion.find(None, server.url)[:2] == ("0.7.0", server.url)
        server.version = None
        assert OmlxVersion.find(None, server.url).number == "0.7.1"
        server.version = "nightly"
        found = OmlxVersion.find(None, server.url)
        assert found.number == "0.7.0" and "assumed, found oMLX nightly" in found.source


def test_the_version_of_the_app(nothing_installed, tmp_path):
    contents = tmp_path / "oMLX.app" / "Contents"
    contents.mkdir(parents=True)
    (contents / "Info.plist").write_bytes(plistlib.dumps({"CFBundleShortVersionString": "0.6.4"}))
    assert OmlxVersion.find(None, NOWHERE).number == "0.6.4"
    write_package(contents / "Resources" / "omlx", number=None)
    found = OmlxVersion.find(None, NOWHERE)
    assert found.number == "0.6.4" and found.keys == {"dflash_enabled", "dflash_block_size"}


def test_the_version_of_homebrew(nothing_installed, tmp_path):
    write_package(tmp_path / "brew" / "lib" / "python3.13" / "site-packages" / "omlx")
    assert OmlxVersion.find(None, NOWHERE).number == "0.7.1"


def test_no_version_is_found(nothing_installed):
    found = OmlxVersion.find(None, NOWHERE)
    assert found.number == "0.7.0" and "assumed" in str(found)
    found.check()


@pytest.mark.parametrize("number", ["0.6.2", "0.6.2rc1", "0.3.9"])
def test_versions_that_cannot_load_dflash_2(number):
    with pytest.raises(ValueError, match=r"too old for DFlash 2; allowed: oMLX 0\.6\.2-dflash2"):
        OmlxVersion(number, "x").check()


def test_a_package_without_the_block_size_cannot(nothing_installed, tmp_path):
    write_package(tmp_path / "oMLX.app" / "Contents" / "Resources" / "omlx", keys=("mtp_enabled",))
    with pytest.raises(ValueError, match="too old for DFlash 2"):
        OmlxVersion.find(None, NOWHERE).check()
    OmlxVersion("0.6.2-dflash2", "x").check()


def test_what_has_no_effect_is_told_by_version_and_target():
    entry = settings()["models"][MODEL]
    (line,) = OmlxVersion("0.7.0", "x").notes(entry, "qwen3_5")
    assert line == (
        "oMLX 0.7.0 (x): without effect in its batched engine: dflash_draft_quant_activation_bits, "
        "dflash_verify_mode"
    )
    assert OmlxVersion("0.6.4", "x").notes(entry, "qwen3_5") == []
    assert OmlxVersion("0.7.0", "x").notes(entry, "gemma4") == []


def test_keys_that_are_not_known_here_are_named_and_nothing_is_predicted():
    version = OmlxVersion("0.6.4", "x")
    entry = {
        "dflash_max_concurrent": 4,
        "qwen35_ane_prefill_gdn": True,
        "cache_reasoning_output": 1,
    }
    assert version.notes(entry, "qwen3_5") == [
        "oMLX 0.6.4 (x): not known here, kept: dflash_max_concurrent"
    ]
    source = OmlxVersion("0.6.4", "x", frozenset({"dflash_max_concurrent", "temperature"}))
    assert source.notes({"dflash_max_concurrent": 4, "temperature": 1}, "qwen3_5") == []
    assert "typo" in source.notes({"typo": 4}, "qwen3_5")[0]


def test_a_drafter_below_the_model_directories(tmp_path):
    made = make_folder(tmp_path / "models" / "z-lab" / "Tiny-DFlash2", DRAFTER_CONFIG)
    assert find_drafter("z-lab/Tiny-DFlash2", [tmp_path / "none", tmp_path / "models"]) == made

"""Find a pair: ask for each file once, read each config once, refuse what does not fit."""

import dataclasses
import io
import json
import shutil
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from support.folders import HASH, publish, refused
from support.hub import local_hub
from support.saved_models import embedded_target, save_drafter, save_target, write_config
from support.tiny import drafter_config

from mlx_dflash2 import embedded
from mlx_dflash2.checkpoint import files, load
from mlx_dflash2.checkpoint.target import find_target
from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.pairs.find import find_pair
from mlx_dflash2.pairs.load import load_pair

TARGET, DRAFTER = "org/target", "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    drafter = save_drafter(path / "drafter", drafter_config(block_size=4))
    return save_target(path / "target"), drafter


@pytest.fixture
def hub(folders, tmp_path):
    with local_hub(tmp_path / "hub", dict(zip((TARGET, DRAFTER), folders, strict=True))) as hub:
        yield hub


@pytest.fixture
def opened(monkeypatch):
    """How often each file named config.json is opened."""
    counts, original = Counter(), io.open

    def count(file, *args, **kwargs):
        path = Path(file) if isinstance(file, str | Path) else Path("?")
        counts[path.parent.name] += path.name == "config.json"
        return original(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", count)
    monkeypatch.setattr("builtins.open", count)
    return counts


# --- how often


def test_the_hub_is_asked_once_for_each_file(hub, folders):
    sources = find_pair(TARGET, DRAFTER)
    downloads = {key for key in hub.asked if key[1]}
    assert downloads == {(TARGET, "config.json"), (DRAFTER, "config.json")}
    load_pair(sources)
    wanted = {(TARGET, file.name) for file in folders[0].iterdir()}
    wanted |= {(DRAFTER, file.name) for file in folders[1].iterdir()}
    asked = {key: count for key, count in hub.asked.items() if key[1]}
    assert asked == dict.fromkeys(wanted, 1)
    # Once for the commit; older clients also before they fetch the weights of it.
    assert all(hub.asked[repo, ""] <= 2 for repo in (TARGET, DRAFTER))


def test_a_command_asks_no_more_than_that(hub, folders, invoke):
    status, out, err = invoke("--model", TARGET, "--draft-model", DRAFTER, "-m", "3")
    assert status == 0 and out, err
    assert {count for (_, name), count in hub.asked.items() if name} == {1}
    assert all(hub.asked[repo, ""] <= 2 for repo in (TARGET, DRAFTER))


def test_all_files_are_of_the_commit_that_was_found(hub, monkeypatch):
    asked, original = [], files.snapshot_download

    def download(repo, revision=None, allow_patterns=None):
        asked.append((repo, revision))
        return original(repo, revision=revision, allow_patterns=allow_patterns)

    monkeypatch.setattr(files, "snapshot_download", download)
    load_pair(find_pair(TARGET, DRAFTER))
    commit = find_target(TARGET).folder.name
    assert len(commit) == 40
    assert asked[:4] == [(TARGET, None), (DRAFTER, None), (TARGET, commit), (DRAFTER, commit)]


def test_a_cached_pair_needs_no_hub(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for repo, folder in zip((TARGET, DRAFTER), folders, strict=True):
        publish(tmp_path, repo, folder)
    sources = find_pair(TARGET, DRAFTER)
    assert sources.target.revision == sources.drafter.revision == HASH
    assert load_pair(sources).name == TARGET


def test_each_config_is_read_and_parsed_once(folders, opened, monkeypatch):
    parsed, original = [], DrafterArgs.from_dict

    def from_dict(config):
        parsed.append(config)
        return original(config)

    monkeypatch.setattr(DrafterArgs, "from_dict", from_dict)
    sources = find_pair(*folders)
    assert opened["target"] == opened["drafter"] == len(parsed) == 1
    mlx_lm.load(str(folders[0]))
    theirs = opened["target"] - 1
    pair = load_pair(sources)
    assert opened["drafter"] == len(parsed) == 1
    # Only mlx-lm reads the target's again.
    assert opened["target"] == 1 + 2 * theirs
    assert pair.drafter.args is sources.drafter.args


def test_sources_cannot_be_changed(folders):
    sources = find_pair(*folders)
    for thing, name in ((sources, "target"), (sources.drafter, "args")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, None)


# --- what the user is told


def test_nothing_is_printed_and_notes_are_returned(folders, capsys):
    embedded_target()
    sources = find_pair()
    assert sources.notes == ()
    assert sources.drafter.folder == embedded.drafter_path()
    assert find_pair(*folders).notes == ()
    load_pair(find_pair(*folders))
    assert capsys.readouterr() == ("", "")


def test_a_drafter_of_another_target_is_noted(hub):
    (note,) = find_pair(TARGET, DRAFTER).notes
    assert note.startswith(f"warning: {DRAFTER} was made for Qwen3-4B, but the model is {TARGET}")


def test_the_command_prints_notes_before_weights_are_read(hub, invoke, monkeypatch):
    def stop(*_):
        raise ValueError("no further")

    monkeypatch.setattr(load, "read_weights", stop)
    status, out, err = invoke("--model", TARGET, "--draft-model", DRAFTER)
    assert (status, out) == (1, "")
    assert err.count("was made for Qwen3-4B") == 1
    assert err.index("\nwarning: ") < err.index("\nerror: no further")


# --- refusals, before weights are fetched or read


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({"hidden_size": 32}, {}, "does not fit the target: its `hidden_size` is 32"),
        ({"num_target_layers": 9}, {}, "its `num_target_layers` is 9 but the target has 4"),
        ({"vocab_size": 5000}, {}, "its `vocab_size` is 5000 but the target's is 512"),
        ({}, {"block_size": 5}, "`block_size` is 5 but has to be from 1 to 4"),
        ({}, {"verify_width": 0}, "`verify_width` is 0 but has to be from 1"),
        ({"quantization": {"bits": 4}}, {"draft_bits": 4}, "`bits` is 4 but has to be None"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(hub, folders, tmp_path, changes, options, message):
    config = drafter_config(block_size=4) | changes
    hub.repos["org/other"] = write_config(tmp_path / "other", config)
    assert message in refused(ValueError, find_pair, TARGET, "org/other", **options)
    assert {name for _, name in hub.asked if name} == {"config.json"}


def test_fields_that_a_config_leaves_out_are_left_to_mlx_lm(folders, tmp_path):
    """Such as those of Gemma 3, whose configs state only what differs from the defaults."""
    sizes = {"hidden_size": 1152, "vocab_size": 262144, "num_target_layers": 26}
    drafter = write_config(tmp_path / "drafter", drafter_config() | sizes)
    target = write_config(tmp_path / "target", {"model_type": "gemma3_text"})
    assert find_pair(target, drafter).target.config == {"model_type": "gemma3_text"}
    config = json.loads((folders[0] / "config.json").read_text())
    del config["vocab_size"]
    with pytest.raises(ValueError, match=r"config.json cannot be read: .*'vocab_size'"):
        find_pair(write_config(tmp_path, config), folders[1])


def test_the_cpu_computes_in_float32_a_gpu_in_what_is_stored(monkeypatch):
    for device, expected in ((mx.cpu, mx.float32), (mx.gpu, None)):
        monkeypatch.setattr(mx, "default_device", lambda device=device: mx.Device(device))
        assert load.device_dtype() == expected


@pytest.fixture
def listed(folders, tmp_path):
    """Both models downloaded from a hub that lists further files of theirs; then offline."""
    repos = {}
    for name, folder in zip((TARGET, DRAFTER), folders, strict=True):
        repos[name] = shutil.copytree(folder, tmp_path / "listed" / folder.name)
        (repos[name] / "original.json").write_text("{}")
        (repos[name] / "model-of-another-tool.safetensors").write_bytes(b"")
    with local_hub(tmp_path / "hub", repos):
        for name in repos:
            files.snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"])
        for file in tmp_path.glob("hub/*/snapshots/*/*o*.*"):
            if file.name in ("original.json", "model-of-another-tool.safetensors"):
                file.unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            yield tmp_path / "hub"


def test_offline_what_is_needed_is_enough(listed):
    with pytest.warns(match=r"is incomplete: .* missing \(.*original.json"):
        pair = load_pair(find_pair(TARGET, DRAFTER))
    assert pair.name == TARGET


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_offline_what_is_missing_is_named(listed, name):
    (file,) = listed.glob(f"models--org--target/snapshots/*/{name}")
    file.unlink()
    with pytest.warns(match=rf"missing \(.*{name}"), pytest.raises((OSError, ValueError)) as error:
        load_pair(find_pair(TARGET, DRAFTER))
    assert "\n" not in str(error.value)


def test_a_name_that_is_nowhere_says_whether_the_hub_was_reached(hub, monkeypatch):
    with pytest.raises(FileNotFoundError, match="the hub does not have it, or it is private"):
        find_target("org/nothing")
    with pytest.raises(FileNotFoundError, match="it is not a repository's name"):
        find_target("no/such/folder")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="not in the cache, and the hub cannot be reached"):
        find_target("org/nothing")

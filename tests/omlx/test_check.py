"""Whether target, drafter and settings fit."""

import hashlib
import json

import pytest
from support.omlx_tools import DRAFTER_CONFIG, MODEL, TARGET_CONFIG, make_folder, settings

from mlx_dflash2.omlx.check import check_entry, check_hash, check_pair, check_settings
from mlx_dflash2.omlx.locate import ListedModel, OmlxVersion


def pair(tmp_path, target=TARGET_CONFIG, drafter=DRAFTER_CONFIG, weights=("fc.weight",)):
    return check_pair(
        make_folder(tmp_path / "t", target), make_folder(tmp_path / "d", drafter, weights)
    )


def changed(config, **values):
    return {**config, **values}


def nested(**values):
    return changed(DRAFTER_CONFIG, dflash_config=DRAFTER_CONFIG["dflash_config"] | values)


FIRST_GENERATION = changed(DRAFTER_CONFIG, architectures=["DFlashDraftModel"]) | {
    "dflash_config": {
        key: DRAFTER_CONFIG["dflash_config"][key]
        for key in ("block_size", "mask_token_id", "target_layer_ids")
    }
}


def test_fitting_pair(tmp_path):
    found = pair(tmp_path)
    assert (found.block_size, found.target_quantized, found.drafter_quantized) == (8, True, False)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            {"target": changed(TARGET_CONFIG, model_type="llama")},
            "target model_type: found 'llama'",
        ),
        ({"target": DRAFTER_CONFIG}, "given as the model, is a drafter"),
        ({"target": {"hidden_size": 64}}, "target model_type: found 'None'"),
        # The one type for which ANE prefill is refused beside DFlash.
        (
            {"target": changed(TARGET_CONFIG, model_type="k2_horizon")},
            "target model_type: found 'k2_horizon'",
        ),
        ({"drafter": FIRST_GENERATION}, "architectures: found ['DFlashDraftModel']"),
        ({"drafter": changed(DRAFTER_CONFIG, hidden_size=96)}, "hidden_size"),
        ({"drafter": changed(DRAFTER_CONFIG, num_target_layers=9)}, "num_target_layers"),
        ({"drafter": nested(target_layer_ids=[1, 4, 9])}, "target_layer_ids"),
        ({"drafter": nested(mask_token_id=None)}, "mask_token_id"),
        ({"drafter": nested(block_size=0)}, "block_size"),
        ({"weights": ("fc.weight", "lm_head.weight")}, "'lm_head.weight'"),
        ({"weights": ("fc.weight", "model.embed_tokens.weight")}, "embed_tokens"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path, kwargs, words):
    with pytest.raises(ValueError) as error:
        pair(tmp_path, **kwargs)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_quantization_that_omlx_could_not_do(tmp_path):
    found = pair(tmp_path)
    entry = {"dflash_draft_quant_enabled": True}
    check_entry(entry, found)
    with pytest.raises(ValueError, match="group_size: found 128, allowed: a divisor"):
        check_entry(entry | {"dflash_draft_quant_group_size": 128}, found)
    odd = found._replace(drafter_rows=(96,))
    with pytest.raises(ValueError, match="group_size: found 64, allowed: a divisor"):
        check_entry(entry | {"dflash_draft_quant_group_size": None}, odd)
    # What is no size at all is reported as a bad value, not here.
    for value in ("64", 64.5, True, 0, -1, [64]):
        check_entry(entry | {"dflash_draft_quant_group_size": value}, odd)
    stored = changed(DRAFTER_CONFIG, quantization={"bits": 4, "group_size": 64})
    ready = pair(tmp_path / "stored", drafter=stored)
    with pytest.raises(ValueError, match="quantized already"):
        check_entry(entry, ready)
    check_entry({"dflash_draft_quant_enabled": False}, ready)


def test_incomplete_folders(tmp_path):
    pair(tmp_path)
    target, drafter = tmp_path / "t", tmp_path / "d"
    weights = drafter / "model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-4])
    with pytest.raises(ValueError, match="truncated"):
        check_pair(target, drafter)
    weights.unlink()
    with pytest.raises(FileNotFoundError):
        check_pair(target, drafter)
    for name in ("a", "b"):
        (drafter / f"{name}.safetensors").write_bytes(raw)
    index = {"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}
    (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"c\.safetensors"):
        check_pair(target, drafter)
    (drafter / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        check_pair(target, drafter)


@pytest.mark.parametrize("layout", ["hub", "local-dir"])
def test_known_hashes_are_checked(tmp_path, layout):
    folder = make_folder(tmp_path / "snapshots" / "aaa", DRAFTER_CONFIG)
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    published = hashlib.sha256(raw).hexdigest()
    if layout == "hub":
        (tmp_path / "blobs").mkdir()
        weights.rename(tmp_path / "blobs" / published)
        weights.symlink_to(tmp_path / "blobs" / published)
    else:
        note = folder / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
        note.parent.mkdir(parents=True)
        note.write_text(f"commit\n{published}\n123.4\n")
    check_hash(weights)
    weights.write_bytes(raw[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"sha256 .* download it again"):
        check_hash(weights)


# The settings of a model


@pytest.fixture
def check(tmp_path):
    """Check the recommended settings with some changed, in a version, on a chip."""
    pair(tmp_path)

    def run(version="0.6.4", chip="M4", model=MODEL, target=tmp_path / "t", **values):
        entry = settings(drafter=str(tmp_path / "d"))["models"][MODEL] | values
        models = {MODEL: {k: v for k, v in entry.items() if v is not ...}}
        omlx = OmlxVersion(version, "x")
        return check_settings(models, ListedModel(model, target), omlx, chip=chip)

    return run


def test_settings_that_would_run(check):
    assert check() == ([], [])
    problems, notes = check("0.7.0")
    assert problems == [] and "without effect" in notes[0]


@pytest.mark.parametrize(
    "values, words",
    [
        ({"dflash_enabled": False}, "dflash_enabled: found false"),
        ({"dflash_block_size": 9}, "dflash_block_size: found 9, allowed: 2 to 8"),
        ({"dflash_block_size": "x"}, 'dflash_block_size: found "x"'),
        ({"dflash_draft_model": "bare-name"}, "dflash_draft_model: found 'bare-name'"),
        ({"dflash_draft_model": "/no/such"}, "drafter: found '/no/such'"),
        ({"dflash_draft_model": ...}, "dflash_draft_model: found ''"),
        ({"dflash_draft_model": 5}, "dflash_draft_model: found 5"),
        ({"mtp_enabled": True}, "mtp_enabled: found true"),
        ({"moe_expert_offload_enabled": True}, "moe_expert_offload_enabled: found true"),
        ({"version": "0.6.2"}, "too old for DFlash 2"),
        ({"chip": "M1 Max"}, "activation_bits: found 16, allowed: 32 on M1 and M2"),
        ({"model": f"mlx-community--{MODEL}"}, f"oMLX does not look under '{MODEL}'"),
        ({"target": None}, "not below oMLX's model directories"),
    ],
)
def test_settings_that_would_not_run(check, values, words):
    problems, _ = check(**values)
    assert any(words in line for line in problems), problems


def test_the_rule_of_m1_and_m2_counts_where_it_holds(check):
    assert check("0.7.0", "M1") == check("0.7.0", "M4")
    problems, notes = check(chip=None)
    assert problems == [] and "32 on M1 and M2" in notes[0]
    assert check(chip=None, dflash_draft_quant_activation_bits=32) == ([], [])


def test_an_alias_is_not_an_id(tmp_path):
    models = {"other": {"model_alias": MODEL}}
    version = OmlxVersion("0.7.0", "x")
    problems, _ = check_settings(models, ListedModel(MODEL, tmp_path), version)
    assert problems == [f"models: no entry {MODEL!r}; oMLX does not look under 'other'"]


def test_the_drafter_that_is_meant(tmp_path):
    pair(tmp_path)
    models = settings(drafter=str(tmp_path / "d"))["models"]
    target, version = ListedModel(MODEL, tmp_path / "t"), OmlxVersion("0.6.4", "x")
    problems, _ = check_settings(models, target, version, chip="M4", drafter=tmp_path / "t")
    assert len(problems) == 1 and "dflash_draft_model: found" in problems[0]

"""The settings document and the table of oMLX's keys."""

import json
from pathlib import Path

import pytest
from support.omlx_tools import DRAFTER, MODEL, readme_example, settings

from mlx_dflash2.omlx import model_settings
from mlx_dflash2.omlx.change import entry_warnings
from mlx_dflash2.omlx.settings import KEYS, RULES, SWITCHES, refusals, value_problems


def test_recommended_document():
    assert settings() == {
        "version": 1,
        "models": {
            MODEL: {
                "dflash_enabled": True,
                "dflash_draft_model": DRAFTER,
                "dflash_draft_quant_enabled": True,
                "dflash_draft_quant_weight_bits": 4,
                "dflash_draft_quant_activation_bits": 16,
                "dflash_draft_quant_group_size": 64,
                "dflash_block_size": 5,
                "dflash_verify_mode": "dflash",
                "mtp_enabled": False,
                "vlm_mtp_enabled": False,
            }
        },
    }


def test_readme_shows_what_is_exported():
    drafter = "/Users/ada/.omlx/models/z-lab/Qwen3.8-27B-DFlash2"
    assert readme_example() == settings("Qwen3.8-27B-4bit", drafter)


@pytest.mark.parametrize(
    "chip, bits",
    [("M1", 32), ("Apple M1 Max", 32), ("M2 Ultra", 32), ("M3", 16), ("m4 pro", 16), ("M10", 16)],
)
def test_activation_bits_by_chip(chip, bits):
    entry = settings(chip=chip)["models"][MODEL]
    assert entry["dflash_draft_quant_activation_bits"] == bits


def test_block_size():
    def block(**kwargs):
        return settings(**kwargs)["models"][MODEL].get("dflash_block_size")

    assert block() == 5
    assert block(drafter_block_size=4) == 4
    assert block(drafter_block_size=8, block_size=8) == 8
    assert block(quantized_target=False, drafter_block_size=8) == 8
    assert block(quantized_target=False) is None


def test_no_quantisation_and_no_nulls():
    entry = settings(quant=None, max_ctx=None)["models"][MODEL]
    assert entry["dflash_draft_quant_enabled"] is False
    assert not [k for k in entry if k.startswith("dflash_draft_quant_") and k[19:] != "enabled"]
    assert "dflash_max_ctx" not in entry and None not in entry.values()


def test_every_value_has_the_json_type():
    entry = settings(max_ctx=32768, options={"dflash_ssd_cache": False})["models"][MODEL]
    for key, value in entry.items():
        assert type(value) is KEYS[key].kind


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"model": "mlx-community/Qwen"}, "target: found 'mlx-community/Qwen'"),
        ({"model": ""}, "target: found ''"),
        ({"model": ".hidden"}, "target: found '.hidden'"),
        ({"model": "bad\udcff"}, "valid Unicode"),
        ({"drafter": "Qwen3.8-27B-DFlash2"}, "dflash_draft_model: found"),
        ({"drafter": "~/models/drafter"}, "dflash_draft_model: found"),
        ({"drafter": "./drafter"}, "dflash_draft_model: found"),
        ({"drafter": "/models/../drafter"}, "dflash_draft_model: found"),
        ({"drafter": "a/b/c"}, "dflash_draft_model: found"),
        ({"chip": "Intel"}, "chip: found 'Intel'"),
        ({"quant": 3}, "dflash_draft_quant_weight_bits: found 3, allowed: 2 or 4 or 8"),
        ({"quant": True}, "dflash_draft_quant_weight_bits: found true"),
        ({"group_size": 48}, "dflash_draft_quant_group_size: found 48, allowed: 32 or 64 or 128"),
        ({"activation_bits": 8}, "dflash_draft_quant_activation_bits: found 8, allowed: 16 or 32"),
        ({"block_size": 0}, "dflash_block_size: found 0"),
        ({"block_size": 1}, "dflash_block_size: found 1, allowed: 2 or more"),
        ({"activation_bits": 0}, "dflash_draft_quant_activation_bits: found 0"),
        ({"block_size": 9, "drafter_block_size": 8}, "dflash_block_size: found 9, allowed: 2 to 8"),
        ({"block_size": 5.0}, "dflash_block_size: found 5.0"),
        ({"max_ctx": 0}, "dflash_max_ctx: found 0, allowed: an integer >= 1, or no such key"),
        ({"verify_mode": "fast"}, 'dflash_verify_mode: found "fast"'),
        ({"options": {"dflash_ssd": True}}, "options: found 'dflash_ssd'"),
        ({"options": {"dflash_enabled": False}}, "options: found 'dflash_enabled'"),
        ({"options": {"dflash_ssd_cache": 1}}, "dflash_ssd_cache: found 1, allowed: true or false"),
    ],
)
def test_refusals_name_field_value_and_allowed(kwargs, words):
    with pytest.raises(ValueError) as error:
        settings(**kwargs)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_repo_id_is_a_drafter_reference():
    entry = model_settings(MODEL, "z-lab/Qwen3.8-27B-DFlash2", chip="M4")["models"][MODEL]
    assert entry["dflash_draft_model"] == "z-lab/Qwen3.8-27B-DFlash2"


def test_problems_of_an_existing_entry():
    entry = {
        "dflash_enabled": True,
        "mtp_enabled": True,
        "dflash_max_ctx": 0,
        "dflash_draft_window_size": 0,
        "dflash_draft_sink_size": -1,
        "dflash_in_memory_cache": None,
        "dflash_draft_quant_weight_bits": None,
        "dflash_block_size": "5",
        "temperature": "not ours",
    }
    found = {line.partition(":")[0] for line in value_problems(entry)}
    assert found == {
        "dflash_max_ctx",
        "dflash_draft_window_size",
        "dflash_draft_sink_size",
        "dflash_in_memory_cache",
        "dflash_block_size",
    }
    (line,) = refusals(entry)
    assert line.startswith(
        "mtp_enabled: found true, allowed: false beside dflash_enabled; oMLX 0.3"
    )


def test_every_rule_names_what_it_refuses_and_what_resolves_it():
    for rule in RULES:
        bad = {**dict.fromkeys(rule.beside, True), rule.key: True if rule.key in SWITCHES else 0}
        lines = [line for line in refusals(bad) if line.startswith(f"{rule.key}: found")]
        assert len(lines) == 1 and rule.since in lines[0] and rule.remedy in lines[0]
        assert not [line for line in refusals({rule.key: None}) if line.startswith(rule.key)]
    assert refusals(settings()["models"][MODEL]) == []
    # Beside nothing that it is refused with, a switch may be on.
    assert refusals({"mtp_enabled": True, "moe_expert_offload_resident_fraction": 0.25}) == []


def test_the_page_has_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "omlx.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for rule in RULES:
        (row,) = (row for row in rows if row.startswith(f"| `{rule.key}`"))
        assert row.endswith(f"| {rule.since} | `{rule.remedy}` |")


@pytest.mark.parametrize("value", [0, 1.5, -1, True, "x", [0.5]])
def test_fractions_that_omlx_refuses(value):
    assert refusals({"moe_expert_offload_resident_fraction": value})


def test_warnings_of_an_existing_document():
    models = {
        "a": {
            "dflash_enabled": True,
            "active_profile_name": "fast",
            "dflash_verify_mode": "ddtree",
        },
        "c": {"dflash_enabled": True, "mtp_enabled": True},
        "d": {"dflash_enabled": True},
    }
    text = "\n".join(entry_warnings(models, "a"))
    assert "'fast'" in text and "dflash_verify_mode" in text
    assert "c is lost at oMLX's next save: mtp_enabled" in text and "d has DFlash on too" in text
    assert entry_warnings({"a": json.loads('{"temperature": 1}')}, "a") == []

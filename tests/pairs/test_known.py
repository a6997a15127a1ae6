"""Known pairs are told by name: any organisation and quantization, no other model."""

import warnings

import pytest

from mlx_dflash2.pairs.known import (
    DRAFTERS,
    UNRUNNABLE,
    default_drafter,
    known_target,
    mismatch_note,
    model_name,
)

QWEN, QWEN_DRAFTER = "Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"
HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("target", DRAFTERS)
@pytest.mark.parametrize("form", ["{}", "Qwen/{}", "mlx-community/{}-4bit", "/models/org/{}-bf16"])
def test_every_known_target_has_its_drafter(target, form):
    assert default_drafter(form.format(target)) == DRAFTERS[target]


@pytest.mark.parametrize(
    "name",
    [
        QWEN,
        QWEN.lower(),
        *(f"{QWEN}-{form}" for form in ("4bit", "3-bit", "bf16", "fp16", "MLX-8bit", "8bit-MLX")),
        *(f"{QWEN}-{form}" for form in ("mxfp4", "nvfp4", "FP8", "GPTQ-Int4", "AWQ", "mlx")),
        *(f"{QWEN}-{form}" for form in ("4bit-DWQ", "4bit-DWQ-053125", "4bit-gs32", "6.5bit")),
        *(f"{QWEN}{form}" for form in ("-mixed-3-6-bit", "-mixed_3_6", "_q4", "-4bit-group-32")),
        f"~/.cache/huggingface/hub/models--mlx-community--{QWEN}-4bit/snapshots/{HASH}",
        f"/data/models--Qwen--{QWEN}/snapshots/{HASH}/",
        f"./{QWEN}-8bit/",
    ],
)
def test_storage_words_and_paths_do_not_matter(name):
    assert default_drafter(name) == QWEN_DRAFTER


@pytest.mark.parametrize(
    "name",
    [
        f"someone/{QWEN}-Something-Finetune",
        f"someone/{QWEN}-Finetune-4bit",
        f"someone/{QWEN}-abliterated",
        f"someone/{QWEN}-4bit-uncensored",
        f"someone/My-{QWEN}",
        f"{QWEN}B",
        f"{QWEN}-v2",
        "Qwen/Qwen3.8-27",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-4B-Base",
        "Qwen/Qwen3.8-2.7B",
        f"{QWEN}/checkpoint-100",
        QWEN_DRAFTER,
        "",
        "/",
    ],
)
def test_other_models_have_no_drafter(name):
    with pytest.raises(ValueError) as error:
        default_drafter(name)
    message = str(error.value)
    assert "\n" not in message
    assert all(target in message for target in DRAFTERS)


@pytest.mark.parametrize(
    "name, drafter",
    [
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "Llama-3.1-8B-Instruct"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "Llama-3.1-8B-Instruct"),
        ("unsloth/Qwen3.5-9B-UD-MLX-4bit", "Qwen3.5-9B"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen3-8B"),
        ("Intel/Qwen3.5-27B-int4-AutoRound", "Qwen3.5-27B"),
        ("Jundot/Qwen3.5-27B-oQ4", "Qwen3.5-27B"),
        ("Jundot/Qwen3.5-27B-oQ3.5e", "Qwen3.5-27B"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit-dwq-v2", "Qwen3-Coder-30B-A3B-Instruct"),
        ("lmstudio-community/Qwen3-Coder-Next-MLX-8bit", "Qwen3-Coder-Next"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b"),
        ("mlx-community/gemma-4-31b-it-4bit", "gemma-4-31B-it"),
        ("mlx-community/gemma-4-12b-it-4bit", "gemma-4-12B-it"),
    ],
)
def test_names_of_the_community(name, drafter):
    assert default_drafter(name) == DRAFTERS[drafter]


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "NousResearch/Hermes-3-Llama-3.1-8B",
        "meta-Qwen3-8B",
        "google/gemma-4-31B",
        "google/gemma-4-31B-it-qat-4bit",
        "Qwen/Qwen3-Coder-30B-A3B",
        "openai/gpt-oss-safeguard-20b",
        "unsloth/gpt-oss-20b-heretic-oQ4",
        "someone/Qwen3.5-27B-oQ",
        "Qwen/Qwen3.5-27B-Base",
    ],
)
def test_relatives_have_none(name):
    with pytest.raises(ValueError, match="No drafter is known"):
        default_drafter(name)


@pytest.mark.parametrize("name", ["zai-org/GLM-5.3-Flash", "mlx-community/GLM-5.3-Flash-4bit"])
def test_a_target_without_a_model_file_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"incoai/GLM-5\.3-Flash-DFlash2.*no model file") as error:
        default_drafter(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target, drafter", (DRAFTERS | UNRUNNABLE).items())
def test_known_drafters_know_their_target(target, drafter):
    assert known_target(drafter) == target
    assert known_target(f"mlx-community/{drafter.split('/')[1]}-4bit") == target


@pytest.mark.parametrize("drafter", ["me/my-drafter", QWEN, f"{QWEN}-DFlash3", f"{QWEN}-DFlash"])
def test_other_drafters_have_no_known_target(drafter):
    assert known_target(drafter) is None
    assert mismatch_note("anything", drafter) is None


@pytest.mark.parametrize(
    "model, drafter, noted",
    [
        ("mlx-community/Qwen3.8-27B-4bit", QWEN_DRAFTER, False),
        ("mlx-community/Qwen3.8-27B-4bit", "incoai/Qwen3.8-27B-DFlash2", False),
        ("mlx-community/Qwen3.8-27B-Finetune", QWEN_DRAFTER, True),
        ("mlx-community/Qwen3.6-27B-4bit", QWEN_DRAFTER, True),
        ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.6-27B-DFlash", True),
        ("someone/My-Model", "me/my-drafter", False),
    ],
)
def test_mismatch_note(model, drafter, noted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note = mismatch_note(model, drafter)
    assert (note is not None) == noted
    if noted:
        assert model in note and known_target(drafter) in note and "\n" not in note


def test_the_working_directory_names_a_model(tmp_path, monkeypatch):
    folder = tmp_path / f"{QWEN}-4bit"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert model_name(".") == folder.name
    assert default_drafter(".") == QWEN_DRAFTER

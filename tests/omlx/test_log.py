"""Verdicts about server logs."""

import pytest

from mlx_dflash2.omlx.log import read_log, what_to_look_for

PREFIX = "2026-08-20 10:00:00,123 - omlx.engine_pool - INFO - "
ENABLED = PREFIX + "DFlash enabled for Qwen3.8-27B-4bit, draft=/models/Qwen3.8-27B-DFlash2"
LOADED = PREFIX + (
    "DFlashEngine loaded: target=/models/Qwen3.8-27B-4bit, draft=/models/Qwen3.8-27B-DFlash2, "
    "max_ctx=unlimited, fallback=vlm, l1_cache=True, l2_cache=False, draft_window=2048, "
    "draft_sink=0, verify=dflash"
)
DONE = PREFIX + "DFlash generation complete: 100 tokens, 45.3 tok/s, acceptance=87.2%, cycles=38"
LOW = PREFIX + "DFlash generation complete: 100 tokens, 9.1 tok/s, acceptance=0.4%, cycles=98"
START = PREFIX + (
    "DFlash start failed for Qwen3.8-27B-4bit: Received 32 parameters not in model. Falling "
    "back to vlm engine."
)
INIT = PREFIX + "DFlash init failed for Qwen3.8-27B-4bit: bad spec w3a16. Falling back."
MISSING = PREFIX + "DFlash enabled for Qwen3.8-27B-4bit but dflash-mlx is not installed."
CONTEXT = PREFIX + "DFlash context fallback: 5120 >= 4096, using vlm engine"
FORK = LOADED.replace("loaded:", "loaded (Path A double-engine):")


@pytest.mark.parametrize(
    "lines, ran, words",
    [
        ([], False, "no line 'DFlash enabled for"),
        (["unrelated", ""], False, "no line"),
        ([ENABLED], False, "no line 'DFlashEngine loaded'"),
        ([ENABLED, LOADED], False, "verify dflash"),
        ([ENABLED, LOADED, DONE, DONE], True, "2 generations, 200 tokens, acceptance 87.2 %"),
        ([ENABLED, FORK, DONE], True, "acceptance 87.2 %"),
        ([DONE], True, "acceptance 87.2 %"),
        ([ENABLED, LOADED, LOW], False, "far too low"),
        ([ENABLED, START], False, "Received 32 parameters not in model"),
        ([INIT], False, "bad spec w3a16"),
        ([MISSING], False, "dflash-mlx is not installed"),
        ([ENABLED, LOADED, DONE, CONTEXT], False, "5120 >= 4096"),
        ([ENABLED, START, ENABLED, LOADED, DONE], True, "1 generations"),
        ([ENABLED, LOADED, DONE, ENABLED, START], False, "32 parameters"),
    ],
)
def test_verdict(lines, ran, words):
    verdict = read_log(lines)
    assert (verdict.ran, words in verdict.text) == (ran, True), verdict
    assert "\n" not in verdict.text


def test_fallback_without_a_reason_line():
    line = PREFIX + "Successfully loaded Qwen3.8-27B-4bit as vlm (fallback from DFlash)"
    assert not read_log([ENABLED, line]).ran


def test_another_model_does_not_count():
    assert read_log([ENABLED, LOADED, DONE], "Qwen3.8-27B-4bit").ran
    verdict = read_log([ENABLED, LOADED, DONE], "Other")
    assert not verdict.ran and "DFlash enabled for Other" in verdict.text
    later = [line.replace("Qwen3.8-27B-4bit", "Other") for line in (ENABLED, START)]
    assert read_log([ENABLED, LOADED, DONE, *later], "Qwen3.8-27B-4bit").ran
    assert not read_log([ENABLED, LOADED, DONE, *later]).ran


def test_generations_belong_to_the_model_that_is_loaded():
    other = START.replace("Qwen3.8-27B-4bit", "Other")
    lines = [ENABLED, LOADED, other, DONE]
    assert read_log(lines, "Qwen3.8-27B-4bit").ran
    assert "32 parameters" in read_log(lines, "Other").text


def test_a_log_that_begins_later_names_no_model():
    verdict = read_log([DONE], "Qwen3.8-27B-4bit")
    assert verdict.ran and "a model that the log does not name" in verdict.text


def test_what_to_look_for_can_be_read_back():
    text = what_to_look_for("Qwen3.8-27B-4bit", "/models/D")
    assert "good  DFlash enabled for Qwen3.8-27B-4bit, draft=/models/D" in text
    assert text.count("  bad ") == 4

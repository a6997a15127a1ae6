"""What is read in the logs of oMLX 0.6 and 0.7."""

import gzip
import os

import pytest

from mlx_dflash2.omlx import log
from mlx_dflash2.omlx.log import LoggedModel, find_log, log_lines, read_log

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


PLAIN = PREFIX + "Chat completion: 100 tokens in 2.10s (47.6 tok/s), prompt: 17"
# oMLX 0.7
NAME = "Qwen3.8-27B-4bit"
LOADING = PREFIX + f"Loading model: {NAME}"
QUANTIZED = PREFIX + "DFlash drafter quantized: 36 linear layers at 4 bits (group 64)"
DRAFTER = PREFIX + (
    "DFlash drafter loaded: path=/models/Qwen3.8-27B-DFlash2 kind=dflash2 block=5 "
    "target_layers=[5, 19, 33, 47, 61]"
)
ATTACHED = PREFIX + (
    f"DFlash drafter attached to engine: /models/{NAME} (kind=dflash2, block=5, "
    "layers=[5, 19, 33, 47, 61])"
)
BATCHED = PREFIX + (
    "MTP[0] finish=stop tokens=371 cycles=95 tok/cycle=3.91 accept=274/315 (87.0%) "
    "depth[d1=90/95] emits[init=2,draft=274]"
)


def answer(tokens, model=NAME, kind="Chat completion"):
    return PREFIX + (
        f"{kind}: model={model}, {tokens} tokens in 10.97s (42.8 tok/s), prompt: 68, "
        "finish_reason=stop, max_tokens=32768, request_max_tokens=None"
    )


def verdict(lines, model=None):
    models = read_log(lines, {})
    if model is None:
        drafting = [name for name, found in models.items() if found.draft or found.acceptance]
        model = (drafting or [*models])[-1] if models else ""
    return models.get(model, LoggedModel())


@pytest.mark.parametrize(
    "lines, ran, words",
    [
        ([], False, "no line about DFlash"),
        (["unrelated", ""], False, "no line"),
        ([ENABLED], False, "no line says that it was loaded"),
        ([ENABLED, LOADED], False, "send a streaming request"),
        ([ENABLED, LOADED, DONE, DONE], True, "acceptance 87.2 %"),
        ([ENABLED, FORK, DONE, PLAIN], True, "acceptance 87.2 %"),
        ([DONE], True, "acceptance 87.2 %"),
        ([ENABLED, LOADED, LOW], False, "far too low"),
        ([ENABLED, START], False, "Received 32 parameters not in model"),
        ([INIT], False, "bad spec w3a16"),
        ([MISSING], False, "dflash-mlx is not installed"),
        ([ENABLED, LOADED, DONE, CONTEXT], False, "5120 >= 4096"),
        ([ENABLED, START, ENABLED, LOADED, DONE], True, "acceptance 87.2 %"),
        ([ENABLED, LOADED, DONE, ENABLED, START], False, "32 parameters"),
        ([LOADING, QUANTIZED, DRAFTER, ATTACHED], False, "send a streaming request"),
        ([LOADING, DRAFTER, ATTACHED, BATCHED, answer(371)], True, "acceptance 87.0 %"),
        ([LOADING, DRAFTER, BATCHED, answer(371)], True, "acceptance 87.0 %"),
        ([ATTACHED, BATCHED, answer(371)], True, "acceptance 87.0 %"),
        # The lines of MTP alone are not DFlash's.
        ([LOADING, BATCHED, answer(371)], False, "no line about DFlash"),
        (
            [LOADING, PREFIX + f"DFlash drafter load failed for {NAME}: no such file", answer(9)],
            False,
            "no such file",
        ),
    ],
)
def test_verdict(lines, ran, words):
    found = verdict(lines)
    assert (found.ran, words in found.verdict) == (ran, True), found
    assert "\n" not in found.verdict


def test_each_answer_says_whether_drafts_ran():
    lines = [LOADING, DRAFTER, ATTACHED, BATCHED, answer(370), answer(12), answer(5, "Other")]
    lines += [BATCHED.replace("371", "40").replace("87.0", "50.0")]
    lines += [answer(40, kind="Anthropic message")]
    rows = verdict(lines, NAME).rows()
    assert [row.partition(": ")[2] for row in rows] == [
        "drafts ran, acceptance 87.0 %",
        "drafts not logged",
        "drafts ran, acceptance 50.0 %",
    ]
    assert rows[0].startswith("  2026-08-20 10:00:00,123  370 tokens")
    assert verdict(lines, "Other").rows()[0].endswith("5 tokens: no drafts")


def test_concurrent_answers_get_their_own_acceptance():
    other = BATCHED.replace("tokens=371", "tokens=99").replace("87.0", "20.0")
    lines = [ATTACHED, BATCHED, other, answer(99), answer(371)]
    assert [share for _, _, share in verdict(lines).answers] == [20.0, 87.0]


def test_an_alias_is_the_model():
    lines = [ATTACHED, BATCHED, answer(371, "qwen")]
    assert read_log(lines, {"qwen": NAME})[NAME].ran


def test_another_model_does_not_count():
    assert verdict([ENABLED, LOADED, DONE], NAME).ran
    assert "no line about DFlash" in verdict([ENABLED, LOADED, DONE], "Other").verdict
    later = [line.replace(NAME, "Other") for line in (ENABLED, START)]
    assert verdict([ENABLED, LOADED, DONE, *later], NAME).ran
    assert not verdict([ENABLED, LOADED, DONE, *later], "Other").ran


def test_generations_belong_to_the_model_that_is_loaded():
    lines = [ENABLED, LOADED, START.replace(NAME, "Other"), DONE]
    assert verdict(lines, NAME).ran
    assert "32 parameters" in verdict(lines, "Other").verdict


def test_a_hub_path_names_the_model():
    path = "/hub/models--mlx-community--Tiny/snapshots/abc"
    lines = [ATTACHED.replace(f"/models/{NAME}", path), BATCHED, answer(371, "mlx-community--Tiny")]
    assert verdict(lines, "mlx-community--Tiny").ran


def test_rotated_logs_are_read_first(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(DONE + "\n")
    (tmp_path / "server.log.2026-08-19").write_text(ENABLED + "\n" + LOADED + "\n")
    with gzip.open(tmp_path / "server.log.1.gz", "wt") as stream:
        stream.write(ENABLED.replace(NAME, "Older") + "\n")
    os.utime(tmp_path / "server.log.1.gz", (1, 1))
    os.utime(tmp_path / "server.log.2026-08-19", (2, 2))
    lines = [line.rstrip() for line in log_lines(path)]
    assert lines == [ENABLED.replace(NAME, "Older"), ENABLED, LOADED, DONE]
    assert verdict(lines, NAME).ran


@pytest.mark.parametrize("end", [None, -9, 10], ids=["no gzip", "cut off", "a header"])
def test_a_damaged_rotated_log_is_named(tmp_path, end):
    raw = b"no gzip" if end is None else gzip.compress(b"x" * 99)[:end]
    (tmp_path / "server.log.1.gz").write_bytes(raw)
    (tmp_path / "server.log").touch()
    with pytest.raises(ValueError, match=r"log .*server\.log\.1\.gz: found a damaged file"):
        list(log_lines(tmp_path / "server.log"))


def test_homebrews_log_is_found_where_omlx_has_none(tmp_path, monkeypatch):
    brew = tmp_path / "omlx.log"
    monkeypatch.setattr(log, "BREW_LOGS", (brew,))
    own = tmp_path / "logs" / "server.log"
    assert find_log(tmp_path) == own
    brew.touch()
    assert find_log(tmp_path) == brew
    own.parent.mkdir()
    own.touch()
    assert find_log(tmp_path) == own


def test_a_damaged_log_is_read():
    assert verdict(["\ufffd" * 9, ATTACHED, BATCHED, answer(371), "DFlash"], NAME).ran

"""`--copy-drafts` of the commands: with the drafter, without one, and what does not go together."""

import importlib
import io
import json
import sys

import pytest
from support.commands import main_of
from support.saved_models import save_pair

from mlx_dflash2.benchmark.arms import make_arms
from mlx_dflash2.copies import CopyProposer
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.evaluation.prompts import read_chats
from mlx_dflash2.pairs.find import find_pair
from mlx_dflash2.pairs.load import load_pair

benchmark, chat, generate = (
    importlib.import_module(f"mlx_dflash2.{name}.command")
    for name in ("benchmark", "chat", "generate")
)

TEXT = "the quick brown fox jumps over "


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target, drafter, _ = save_pair(tmp_path_factory.mktemp("pair"))
    return {"target": str(target), "drafter": str(drafter)}


def pair_of(*args, **kwargs):
    return load_pair(find_pair(*args, **kwargs))


def test_what_a_pair_drafts_with(folders):
    target, drafter = folders["target"], folders["drafter"]
    off = pair_of(target, drafter)
    assert isinstance(off.proposer, Drafter) and off.drafter is off.proposer
    both = pair_of(target, drafter, copy_drafts="with", verify_width=16)
    assert isinstance(both.proposer, CopyProposer) and both.drafter is both.proposer.drafter
    only = find_pair(target, copy_drafts="only", verify_width=16)
    proposer = load_pair(only).proposer
    assert isinstance(proposer, CopyProposer) and proposer.drafter is None
    for needy in (only, load_pair(only)):
        with pytest.raises(ValueError, match="`copy_drafts` is only but a drafter is needed"):
            _ = needy.drafter


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(draft_model="x"), "`draft_model` is x but `copy_drafts` is only: nothing uses it"),
        (dict(draft_bits=4), "`draft_bits` is 4 but"),
        (dict(block_size=4), "`block_size` is 4 but"),
        (dict(verify_width=17), "`verify_width` is 17 but has to be from 1 to 16"),
    ],
    ids=str,
)
def test_what_copies_alone_do_not_use_is_refused(folders, options, message):
    with pytest.raises(ValueError, match=message):
        find_pair(folders["target"], copy_drafts="only", **options)


def test_generate(folders, invoke):
    answers = {}
    for mode in ("off", "with", "only"):
        models = ["--model", folders["target"]]
        models += [] if mode == "only" else ["--draft-model", folders["drafter"]]
        status, out, err = invoke(
            *models, "--prompt", TEXT * 3, "--copy-drafts", mode, "--ignore-chat-template",
            "-m", "60", "--verify-width", "8", main=main_of("generate"),
        )  # fmt: skip
        assert status == 0
        answers[mode] = out
        assert ("Copies: " in err) == (mode != "off")
    assert answers["off"] == answers["with"] == answers["only"] != ""


def test_chat_goes_on_without_a_drafter(folders, invoke, monkeypatch):
    answers = []
    for arguments in (["--copy-drafts", "only"], ["--draft-model", folders["drafter"]]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\n{TEXT}\nq\n"))
        models = ["--model", folders["target"]]
        status, out, err = invoke(*models, *arguments, "-m", "20", main=main_of("chat"))
        assert status == 0 and err.count(" tokens/s") == 2
        answers.append(out)
    assert answers[0] == answers[1] != ""


def test_the_arms_of_a_benchmark(folders):
    drafter = pair_of(folders["target"], folders["drafter"]).drafter
    arms = make_arms({"D": drafter}, [0.0], [None, 4], copies=["off", "with", "only"])
    found = {arm.name: (type(arm.proposer).__name__, arm.rows, arm.copies) for arm in arms}
    assert found == {
        "plain": ("NoneType", 1, False),
        "copies": ("CopyProposer", 16, True),
        "D": ("Drafter", 8, False),
        "D and copies": ("CopyProposer", 16, True),
        "D width 4": ("Drafter", 4, False),
        "D and copies width 4": ("CopyProposer", 4, True),
    }
    assert arms[0].is_plain and not any(arm.is_plain for arm in arms[1:])
    only = make_arms({"D": drafter}, [0.0], [None], copies=["only"])
    assert [arm.name for arm in only] == ["plain", "copies"]


def test_a_benchmark_of_copies(folders, invoke, tmp_path):
    prompts, results = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text(json.dumps({"suite": "again", "prompt": TEXT * 3}))
    status, out, _ = invoke(
        "--model", folders["target"], "--draft-model", folders["drafter"], "--suites",
        str(prompts), "--copy-drafts", "off", "with", "only", "--temps", "0", "-m", "40",
        "--json", str(results), main=main_of("benchmark"),
    )  # fmt: skip
    assert status == 0 and "DFlash 2 and copies" in out
    found = json.loads(results.read_text())
    samples = {sample["arm"]: sample for sample in found["samples"]}
    assert list(samples) == ["plain", "copies", "DFlash 2", "DFlash 2 and copies"]
    assert len({tuple(sample["tokens"]) for sample in samples.values()}) == 1
    assert sum(samples["copies"]["stats"]["copied_at"]) > 0
    assert samples["DFlash 2"]["stats"]["copied_at"] == []
    assert all(v["verdict"] == "identical" for a in found["parity"].values() for v in a)
    assert set(found["phases"]) == {"copies", "DFlash 2", "DFlash 2 and copies"}


@pytest.mark.parametrize("suite", ["editing", "reading"])
def test_the_suites_repeat_their_prompts(suite):
    """Each is a chat whose last message asks for text that stands before it."""
    chats = read_chats([suite])
    assert len(chats) == 8 and {chat.suite for chat in chats} == {suite}
    for chat in chats:
        roles = [message["role"] for message in chat.messages]
        assert roles == ["user", "assistant", "user"]
        before, answer, question = (message["content"] for message in chat.messages)
        assert len(before) > 3 * len(question)
        if suite == "reading":
            assert all(line in before for line in answer.splitlines())

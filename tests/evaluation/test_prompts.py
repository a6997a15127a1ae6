"""Prompts of a benchmark: built in, from files, and of public suites in the hub's cache."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from mlx_lm.tokenizer_utils import load as load_tokenizer
from support.saved_models import WITHOUT_THINKING, save_target

from mlx_dflash2.evaluation import prompts as data


def read(path: Path, limit=None):
    return data.read_chats([str(path)], limit)


def test_built_in_prompts_are_of_five_kinds():
    rows = data.read_chats(["built-in"])
    kinds = [row.suite for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "chat": 4, "code": 4, "math": 4, "prose": 4, "structured": 4,
    }  # fmt: skip
    assert len(data.read_chats(["built-in"], limit=1)) == 5


def test_lines_of_a_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    path.write_text("\n".join(map(json.dumps, ["a", {"prompt": "b", "suite": "x"}, chat])) + "\n\n")
    rows = read(path)
    assert [row.suite for row in rows] == ["mine", "x", "mine"]
    assert [row.messages[-1]["content"] for row in rows] == ["a", "b", "u"]
    assert [row.suite for row in read(path, limit=1)] == ["mine", "x"]


@pytest.mark.parametrize(
    "line", ["{", "1", '{"text": "a"}', '{"messages": []}', '{"messages": [1]}']
)
def test_lines_that_are_no_prompt_are_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text('"a"\n' + line)
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 2"):
        read(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read(path)


ROWS = {
    "gsm8k": {"question": "1 + 1?", "answer": "2"},
    "math500": {"problem": "1 + 1?"},
    "humaneval": {"prompt": "def f():"},
    "mbpp": {"prompt": "Write f."},
    "mt-bench": {"prompt": ["first", "second"]},
}


@pytest.mark.parametrize("name", data.SUITES)
def test_suites_become_messages(name, tmp_path, monkeypatch):
    suite = data.SUITES[name]
    file = tmp_path / suite.files.replace("*", "-0.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(ROWS[name]) + "\n")
    asked = []

    def download(repo, **kwargs):
        asked.append((repo, kwargs["repo_type"], kwargs["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (row,) = data.read_chats([name])
    assert asked == [(suite.repo, "dataset", suite.files)] and row.suite == name
    (message,) = row.messages
    found = next(iter(ROWS[name].values()))
    assert (found[0] if isinstance(found, list) else found) in message["content"]
    assert "second" not in message["content"]


def test_parquet_files_are_read(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "main").mkdir()
    table = pyarrow.Table.from_pylist([ROWS["gsm8k"]])
    parquet.write_table(table, tmp_path / "main" / "test-00000-of-00001.parquet")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    (row,) = data.read_chats(["gsm8k"])
    assert row.messages[0]["content"].startswith("1 + 1?\nPlease reason")


def test_a_hub_out_of_reach_takes_one_line(monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("long\ntext")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError) as error:
        data.read_chats(["gsm8k"])
    assert "gsm8k" in str(error.value) and "offline" in str(error.value)
    assert "\n" not in str(error.value)


CHATS = [data.Chat("s", [{"role": "user", "content": "w7 w8"}])]


def test_templates_without_thinking(tmp_path):
    tokenizer = load_tokenizer(save_target(tmp_path / "t", chat_template=WITHOUT_THINKING))
    (prompt,) = data.encode(CHATS, tokenizer)
    asked = "<s><|im_start|>user\nw7 w8<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.suite, prompt.text) == ("s", "w7 w8")
    assert tokenizer.decode(prompt.tokens) == asked
    with pytest.raises(ValueError, match="enable_thinking"):
        data.encode(CHATS, tokenizer, "on")


def test_thinking_on_and_off(tmp_path):
    tokenizer = load_tokenizer(save_target(tmp_path / "target"))
    off, on = data.encode(CHATS, tokenizer)
    assert (off.suite, on.suite) == ("s", "s, thinking")
    assert tokenizer.decode(on.tokens) == tokenizer.decode(off.tokens) + "<think>"
    assert data.encode(CHATS, tokenizer, "on") == [on]
    assert data.encode(CHATS, tokenizer, "off") == [off]
    assert data.encode(CHATS, tokenizer, "both") == [off, on]
    assert data.digest([on]) != data.digest([off]) and len(data.digest([on])) == 16

"""Prompts: the sets that come along, a JSONL file, or a public suite from the hub."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from mlx_lm.tokenizer_utils import TokenizerWrapper

# Answers to the last two repeat much of what their prompts say.
PACKAGED = {
    name: Path(__file__).with_name(file)
    for name, file in (
        ("built-in", "prompts.jsonl"),
        ("editing", "editing.jsonl"),
        ("reading", "reading.jsonl"),
    )
}
_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:"


@dataclass(frozen=True)
class Prompt:
    """A prompt's suite, its text for people, and its token ids."""

    suite: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """A public data set: files of a hub repository, and how a row becomes a user's message."""

    repo: str
    files: str
    message: Callable[[dict[str, Any]], str]


# Of MT-Bench's two turns only the first: the second would depend on each arm's own answer.
SUITES = {
    "gsm8k": Suite("openai/gsm8k", "main/test*", lambda row: f"{row['question']}\n{_REASON}"),
    "math500": Suite("HuggingFaceH4/MATH-500", "test*", lambda row: f"{row['problem']}\n{_REASON}"),
    "humaneval": Suite(
        "openai/openai_humaneval",
        "openai_humaneval/test*",
        lambda row: f"{_CODE}\n```python\n{row['prompt']}\n```",
    ),
    "mbpp": Suite("google-research-datasets/mbpp", "sanitized/test*", lambda row: row["prompt"]),
    "mt-bench": Suite(
        "HuggingFaceH4/mt_bench_prompts", "data/train*", lambda row: row["prompt"][0]
    ),
}


def read_rows(names: Iterable[str], limit: int | None = None) -> list[dict[str, Any]]:
    """Chats of suites or JSONL files.

    Args:
        names (iterable of str): Names of ``PACKAGED`` or ``SUITES``, or paths of JSONL files.
        limit (int, optional): The most prompts a suite.

    Returns:
        list: Objects with ``suite`` and ``messages``.

    Raises:
        FileNotFoundError: if a file is missing or a suite cannot be had.
        ValueError: if a line is no prompt.
    """
    rows, counts = [], {}
    for name in names:
        if name in SUITES:
            found = _suite_rows(name)
        else:
            found = _jsonl_rows(PACKAGED.get(name) or Path(name).expanduser())
        for row in found:
            counts[row["suite"]] = counts.get(row["suite"], 0) + 1
            if limit is None or counts[row["suite"]] <= limit:
                rows.append(row)
    if not rows:
        raise ValueError("There are no prompts to measure.")
    return rows


def _jsonl_rows(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is neither a file nor a suite; suites are {', '.join((*PACKAGED, *SUITES))}."
        )
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            yield _chat(line, f"{path}, line {number}", path.stem)


def _chat(line: str, place: str, suite: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not valid JSON: {error}.") from error
    row = {"prompt": row} if isinstance(row, str) else row
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        row = row | {"messages": [{"role": "user", "content": row["prompt"]}]}
    messages = row.get("messages") if isinstance(row, dict) else None
    valid = isinstance(messages, list) and messages and all(map(_is_message, messages))
    if not valid:
        raise ValueError(f"{place} has neither a `prompt` text nor a list of `messages`.")
    return {"suite": str(row.get("suite", suite)), "messages": messages}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _suite_rows(name: str) -> Iterable[dict[str, Any]]:
    suite = SUITES[name]
    try:
        folder = snapshot_download(suite.repo, repo_type="dataset", allow_patterns=suite.files)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"The suite {name} ({suite.repo}) is not in the hub's cache and the hub cannot be "
            f"reached ({type(error).__name__}); built-in prompts and JSONL files work offline."
        ) from error
    files = sorted(Path(folder).glob(suite.files))
    if not files:
        raise FileNotFoundError(f"{suite.repo} holds no {suite.files}.")
    for file in files:
        for row in _read_table(file):
            message = {"role": "user", "content": suite.message(row)}
            yield {"suite": name, "messages": [message]}


def _read_table(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f"{file.name} is a Parquet file, which pyarrow reads: "
            "pip install 'mlx-dflash2[suites]'."
        ) from error
    return parquet.read_table(file).to_pylist()


def encode(
    rows: Iterable[dict[str, Any]], tokenizer: TokenizerWrapper, thinking: str | None = None
) -> list[Prompt]:
    """Prompts as token ids, in the target's chat template if it has one.

    Args:
        rows (iterable): From :func:`read_rows`.
        tokenizer (TokenizerWrapper): The target's.
        thinking (str, optional): ``on``, ``off`` or ``both``, for templates that know
          ``enable_thinking``; with ``both`` each suite comes twice. Default: ``None``, ``both``
          for those templates and nothing for others.

    Raises:
        ValueError: if ``thinking`` is given for a template that does not know it.
    """
    template = tokenizer.chat_template if tokenizer.has_chat_template else ""
    knows = isinstance(template, str) and "enable_thinking" in template
    if thinking is not None and not knows:
        raise ValueError(
            f"`thinking` is {thinking!r} but the target's chat template has no enable_thinking."
        )
    modes = {"on": [True], "off": [False]}.get(thinking, [False, True] if knows else [None])
    prompts = []
    for row in rows:
        for mode in modes:
            suite = row["suite"] + {True: ", thinking", False: "", None: ""}[mode]
            config = {} if mode is None else {"enable_thinking": mode}
            text = row["messages"][-1]["content"]
            if template:
                chat = tokenizer.apply_chat_template(
                    row["messages"], tokenize=False, add_generation_prompt=True, **config
                )
                tokens = tokenizer.encode(chat, add_special_tokens=False)
            else:
                tokens = tokenizer.encode(text)
            prompts.append(Prompt(suite, text, tuple(tokens)))
    return prompts


def digest(prompts: Iterable[Prompt]) -> str:
    """A short hash of all prompts' suites and token ids."""
    content = json.dumps([(prompt.suite, prompt.tokens) for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]

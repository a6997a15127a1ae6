"""Read prompts: the sets that come along, a JSONL file, or a public suite from the hub."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Answers to the last two repeat much of what their prompts say.
PACKAGED = {
    "built-in": Path(__file__).with_name("prompts.jsonl"),
    "editing": Path(__file__).with_name("editing.jsonl"),
    "reading": Path(__file__).with_name("reading.jsonl"),
}
_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:"


class Chat(NamedTuple):
    """Messages to answer, and the suite that they belong to."""

    suite: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt's suite, its last message, and its token ids."""

    suite: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """A public data set: files of a hub repository, and how a row becomes a message."""

    repo: str
    files: str
    message: Callable[[dict[str, Any]], str]


# Of MT-Bench only the first turn: the second would depend on each arm's own answer.
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


def read_chats(names: Iterable[str], limit: int | None = None) -> list[Chat]:
    """Read the chats of suites or JSONL files.

    Args:
        names (iterable of str): Names of ``PACKAGED`` or ``SUITES``, or paths of JSONL files.
        limit (int, optional): The most prompts per suite. Default: ``None``, all.

    Raises:
        FileNotFoundError: if a file is missing or a suite cannot be downloaded.
        ValueError: if a line is not a prompt.
    """
    chats: list[Chat] = []
    counts: Counter[str] = Counter()
    for name in names:
        if name in SUITES:
            found = _suite_chats(name)
        else:
            found = _jsonl_chats(PACKAGED.get(name) or Path(name).expanduser())
        for chat in found:
            counts[chat.suite] += 1
            if limit is None or counts[chat.suite] <= limit:
                chats.append(chat)
    if not chats:
        raise ValueError("There are no prompts to measure.")
    return chats


def _jsonl_chats(path: Path) -> Iterable[Chat]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is neither a file nor a suite; suites are {', '.join((*PACKAGED, *SUITES))}."
        )
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            yield _chat(line, f"{path}, line {number}", path.stem)


def _chat(line: str, place: str, suite: str) -> Chat:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not valid JSON: {error}.") from error
    row = {"prompt": row} if isinstance(row, str) else row
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        row = row | {"messages": [{"role": "user", "content": row["prompt"]}]}
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"{place} has neither a `prompt` text nor a list of `messages`.")
    return Chat(str(row.get("suite", suite)), messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _suite_chats(name: str) -> Iterable[Chat]:
    # Imported here because help needs only the names of the suites.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    suite = SUITES[name]
    try:
        folder = snapshot_download(suite.repo, repo_type="dataset", allow_patterns=suite.files)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"The suite {name} ({suite.repo}) is not in the hub's cache, and the hub cannot be "
            f"reached ({type(error).__name__}); built-in prompts and JSONL files work offline."
        ) from error
    files = sorted(Path(folder).glob(suite.files))
    if not files:
        raise FileNotFoundError(f"{suite.repo} does not have {suite.files}.")
    for file in files:
        for row in _read_table(file):
            yield Chat(name, [{"role": "user", "content": suite.message(row)}])


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
    chats: Iterable[Chat], tokenizer: TokenizerWrapper, thinking: str | None = None
) -> list[Prompt]:
    """Encode chats with the target's chat template, if it has one.

    Args:
        chats (iterable of Chat): From :func:`read_chats`.
        tokenizer (TokenizerWrapper): The target's.
        thinking (str, optional): ``on``, ``off`` or ``both``, for templates with
          ``enable_thinking``; ``both`` gives each suite twice. Default: ``None``, which is
          ``both`` for those templates.

    Raises:
        ValueError: if ``thinking`` is given but the template has no ``enable_thinking``.
    """
    template = tokenizer.chat_template if tokenizer.has_chat_template else ""
    can_think = isinstance(template, str) and "enable_thinking" in template
    if thinking is not None and not can_think:
        raise ValueError(
            f"`thinking` is {thinking!r} but the target's chat template has no enable_thinking."
        )
    modes = {"on": [True], "off": [False]}.get(thinking or "both", [False, True])
    prompts = []
    for suite, messages in chats:
        for mode in modes if can_think else [False]:
            config = {"enable_thinking": mode} if can_think else {}
            content = messages[-1]["content"]
            if template:
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **config
                )
                tokens = tokenizer.encode(text, add_special_tokens=False)
            else:
                tokens = tokenizer.encode(content)
            prompts.append(Prompt(f"{suite}, thinking" if mode else suite, content, tuple(tokens)))
    return prompts


def digest(prompts: Iterable[Prompt]) -> str:
    """Return a short hash of all prompts' suites and token ids."""
    content = json.dumps([(prompt.suite, prompt.tokens) for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]

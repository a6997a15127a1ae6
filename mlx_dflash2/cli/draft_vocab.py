"""The `--draft-vocab` flag: which tokens the drafter drafts."""

import json
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafter.vocabulary import FrequentTokens
from ..evaluation.prompts import encode, read_chats
from .console import note

FLAG = "--draft-vocab"


def frequent_tokens(given: str, tokenizer: TokenizerWrapper) -> FrequentTokens:
    """Read the flag, and say how much of the built-in prompts its tokens are.

    Args:
        given (str): A number, or a file of ids between white space or commas, such as JSON.
        tokenizer (TokenizerWrapper): The target's; its EOS tokens may always be drafted.

    Raises:
        ValueError: if it is neither, or the tokenizer has no order of merges.
    """
    if given.isdecimal():
        ids = merge_order(tokenizer)[: int(given)]
    else:
        ids = _read(Path(given).expanduser())
    tokens = FrequentTokens([*ids, *tokenizer.eos_token_ids]) if ids else FrequentTokens([])
    text = [i for p in encode(read_chats(["built-in"]), tokenizer) for i in p.tokens]
    share = tokens.coverage(text)
    note(f"{FLAG}: {len(tokens.ids)} tokens, {share:.1%} of those in the built-in prompts.")
    return tokens


def merge_order(tokenizer: TokenizerWrapper) -> list[int]:
    """Order the ids of a BPE tokenizer: single symbols, then what was merged, the first first.

    Raises:
        ValueError: if the tokenizer is of another kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if not model.get("merges"):
        raise ValueError(f"{FLAG} N needs a BPE tokenizer; give a file of ids.")
    pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
    merged = [model["vocab"]["".join(pair)] for pair in pairs if "".join(pair) in model["vocab"]]
    return list(dict.fromkeys([*sorted(set(model["vocab"].values()) - set(merged)), *merged]))


def _read(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{FLAG} is {path} but has to be a number or a file of ids.") from error
    words = text.strip().strip("[]").replace(",", " ").split()
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ValueError(f"{FLAG}: {path} holds {wrong[0]!r} but has to hold token ids.")
    return [int(word) for word in words]

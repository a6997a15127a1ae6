"""Write a corpus of the target's own answers to prompts, shard by shard."""

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ..cli.console import note
from ..evaluation.prompts import Prompt, digest
from .corpus import Corpus, Text, write_shard
from .records import read_record, refuse_difference, write_record

# Of a token's four bytes, about what is left once its shard is compressed.
_BYTES_PER_TOKEN = 2


@dataclass(frozen=True)
class CorpusSettings:
    """What decides a corpus besides its prompts; shards of other settings do not mix with it."""

    model: str
    max_tokens: int
    max_seq_length: int
    temp: float
    top_p: float
    seed: int
    shard_size: int
    # Draws depend on it, greedy answers do not.
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("max_tokens", 1), ("max_seq_length", 2), ("seed", 0), ("shard_size", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"`{name}` is {getattr(self, name)} but has to be {low} or more.")
        if self.temp < 0:
            raise ValueError(f"`temp` is {self.temp} but has to be 0 or more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p} but has to be above 0 and at most 1.")


def write_answers(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: list[Prompt],
    folder: str | Path,
    *,
    name: str,
    max_tokens: int = 512,
    max_seq_length: int = 2048,
    temp: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    shard_size: int = 256,
    progress: bool = True,
) -> Corpus:
    """Write a model's answers as ``shard-*.npz``; called again, resume after the last shard.

    Args:
        model (nn.Module): The target, or anything that mlx-lm generates with in batches.
        tokenizer (TokenizerWrapper): Its tokenizer.
        prompts (list of Prompt): The prompts to answer.
        folder (str or Path): Where shards and ``corpus.json`` go.
        name (str): The model's name or path, for ``corpus.json``.
        max_tokens (int): The most tokens of an answer, its end-of-sequence token included.
        max_seq_length (int): The most tokens of prompt and answer.
        temp (float): 0 takes the likeliest token.
        top_p (float): Nucleus sampling if ``temp`` is above 0. Default: ``1.0``, none.
        seed (int): Seeds each shard together with the shard's number: resuming changes nothing.
        batch_size (int): Answers to write at a time.
        shard_size (int): Prompts per shard; an interruption loses the current shard.
        progress (bool): Whether to show a bar on stderr.

    Raises:
        ValueError: if a setting is out of range, no prompt can be used, or the folder has a
            corpus of other settings.
    """
    drawn = batch_size if temp > 0 else None
    settings = CorpusSettings(
        name, max_tokens, max_seq_length, temp, top_p, seed, shard_size, drawn
    )
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size} but has to be 1 or more.")
    usable = _usable(prompts, max_seq_length)
    folder = Path(folder).expanduser()
    _claim(folder, asdict(settings) | {"prompts": digest(usable), "count": len(usable)})
    shards = {
        folder / f"shard-{start // shard_size:05d}.npz": usable[start : start + shard_size]
        for start in range(0, len(usable), shard_size)
    }
    with _Progress(shards, settings, progress) as bar:
        for index, (file, part) in enumerate(shards.items()):
            if not file.exists():
                _seed(seed, index)
                with closing(_generator(model, tokenizer, settings, batch_size)) as generator:
                    write_shard(file, _texts(generator, part, settings, bar.advance))
                bar.written(file)
    return Corpus(folder)


def _usable(prompts: list[Prompt], max_seq_length: int) -> list[Prompt]:
    """Return the prompts that can be answered, sorted by length: a batch pads to its longest."""
    filled = [prompt for prompt in prompts if prompt.tokens and str(prompt.text or "").strip()]
    usable = [prompt for prompt in filled if len(prompt.tokens) < max_seq_length]
    if len(usable) < len(prompts):
        skipped = (
            f"{len(prompts) - len(filled)} empty, {len(filled) - len(usable)} without room "
            f"for an answer in `max_seq_length` ({max_seq_length})"
        )
        if not usable:
            raise ValueError(f"None of {len(prompts)} prompts can be answered: {skipped}.")
        warnings.warn(f"Skipped some of {len(prompts)} prompts: {skipped}.", stacklevel=3)
    if not usable:
        raise ValueError("There are no prompts to answer.")
    return sorted(usable, key=lambda prompt: len(prompt.tokens))


def _claim(folder: Path, record: dict[str, Any]) -> None:
    """Record that the folder is this corpus's, or refuse the folder of another one."""
    file = folder / "corpus.json"
    if file.exists():
        found = read_record(file)
        refuse_difference(file, found, record, "give another folder or the same value")
        return
    if any(folder.glob("*.npz")):
        raise ValueError(f"{folder} has shards but no {file.name}; give another folder.")
    write_record(file, record)


def missing_texts(folder: str | Path) -> int:
    """Count the texts that a corpus has still to get."""
    file = Path(folder) / "corpus.json"
    count = read_record(file).get("count", 0) if file.is_file() else 0
    return max(0, count - len(Corpus(folder)))


def _seed(seed: int, index: int) -> None:
    # Hashed together: shard 1 of seed 0 is not shard 0 of seed 1.
    mx.random.seed(int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))


def _generator(
    model: nn.Module, tokenizer: TokenizerWrapper, settings: CorpusSettings, batch_size: int
) -> BatchGenerator:
    return BatchGenerator(
        model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=make_sampler(settings.temp, settings.top_p),
        completion_batch_size=batch_size,
        prefill_batch_size=min(8, batch_size),
    )


def _texts(
    generator: BatchGenerator,
    prompts: list[Prompt],
    settings: CorpusSettings,
    advance: Callable[[int, int], None],
) -> list[Text]:
    budgets = [
        min(settings.max_tokens, settings.max_seq_length - len(prompt.tokens)) for prompt in prompts
    ]
    uids = generator.insert([list(prompt.tokens) for prompt in prompts], budgets)
    tokens = {uid: list(prompt.tokens) for uid, prompt in zip(uids, prompts, strict=True)}
    while responses := generator.next_generated():
        for response in responses:
            # Stop tokens belong to the text: a drafter has to learn where answers end.
            tokens[response.uid].append(response.token)
        finished = sum(response.finish_reason is not None for response in responses)
        advance(len(responses), finished)
    return [
        Text(np.array(tokens[uid], np.uint32), len(prompt.tokens), prompt.suite)
        for uid, prompt in zip(uids, prompts, strict=True)
    ]


class _Progress:
    """A bar over prompts, with the rate of tokens and the whole corpus' size on disk."""

    def __init__(
        self, shards: dict[Path, list[Prompt]], settings: CorpusSettings, show: bool
    ) -> None:
        self.sizes = {file: len(part) for file, part in shards.items()}
        self.done = [file for file in shards if file.exists()]
        self.total, self.tokens, self.start = sum(self.sizes.values()), 0, perf_counter()
        if show:
            tokens = sum(
                min(len(prompt.tokens) + settings.max_tokens, settings.max_seq_length)
                for part in shards.values()
                for prompt in part
            )
            size = tqdm.format_sizeof(tokens * _BYTES_PER_TOKEN, "B")
            note(
                f"{self.total} prompts in {len(shards)} shards, {len(self.done)} of them written; "
                f"at most {tokens} tokens, about {size} on disk"
            )
        self.bar = tqdm(
            desc="Answers",
            unit="prompt",
            total=self.total,
            initial=sum(self.sizes[file] for file in self.done),
            miniters=0,  # shows new tokens even if no answer has ended
            disable=not show,
        )
        self.disk = ""

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def advance(self, tokens: int, prompts: int) -> None:
        self.tokens += tokens
        rate = self.tokens / (perf_counter() - self.start)
        self.bar.set_postfix_str(f"{rate:.0f} tok/s{self.disk}", refresh=False)
        self.bar.update(prompts)

    def written(self, file: Path) -> None:
        self.done.append(file)
        size = sum(file.stat().st_size for file in self.done)
        share = sum(self.sizes[file] for file in self.done) / self.total
        self.disk = f", about {tqdm.format_sizeof(size / share, 'B')} on disk"

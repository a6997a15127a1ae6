"""Write a corpus of the target's own answers to prompts, shard by shard."""

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cli.console import note
from ..cli.progress import Progress
from ..evaluation.prompts import Prompt, digest
from .corpus import Corpus, Text, write_shard
from .records import read_record, refuse_difference, write_record

# Of a token's four bytes, about what is left once its shard is compressed.
_BYTES_PER_TOKEN = 2

# A prompt and the most tokens of its answer.
Task = tuple[Prompt, int]


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
        model, tokenizer: The target, or anything that mlx-lm generates with in batches.
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
        ValueError: if no prompt can be used, or the folder has a corpus of other settings.
    """
    usable = _usable(prompts, max_seq_length)
    folder = Path(folder).expanduser()
    record = {
        "model": name, "max_tokens": max_tokens, "max_seq_length": max_seq_length, "temp": temp,
        "top_p": top_p, "seed": seed, "shard_size": shard_size,
        # It decides draws, but not greedy answers.
        "batch_size": batch_size if temp > 0 else None,
        "prompts": digest(usable), "count": len(usable),
    }  # fmt: skip
    _claim(folder, record)
    tasks = [(p, min(max_tokens, max_seq_length - len(p.tokens))) for p in usable]
    shards = {
        folder / f"shard-{start // shard_size:05d}.npz": tasks[start : start + shard_size]
        for start in range(0, len(tasks), shard_size)
    }
    with _Progress(shards, progress) as bar:
        for index, (file, part) in enumerate(shards.items()):
            if not file.exists():
                # Hashed together: shard 1 of seed 0 is not shard 0 of seed 1.
                mx.random.seed(int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
                sampler = make_sampler(temp, top_p)
                with closing(_generator(model, tokenizer, sampler, batch_size)) as generator:
                    write_shard(file, _texts(generator, part, bar.advance))
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


def _generator(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    sampler: Callable[[mx.array], mx.array],
    batch_size: int,
) -> BatchGenerator:
    return BatchGenerator(
        model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=sampler,
        completion_batch_size=batch_size,
        prefill_batch_size=min(8, batch_size),
    )


def _texts(
    generator: BatchGenerator, tasks: list[Task], advance: Callable[[int, int], None]
) -> list[Text]:
    tokens = [list(prompt.tokens) for prompt, _ in tasks]
    uids = generator.insert([list(ids) for ids in tokens], [budget for _, budget in tasks])
    by_uid = dict(zip(uids, tokens, strict=True))
    while responses := generator.next_generated():
        for response in responses:
            # Stop tokens belong to the text: a drafter has to learn where answers end.
            by_uid[response.uid].append(response.token)
        finished = sum(response.finish_reason is not None for response in responses)
        advance(len(responses), finished)
    return [
        Text(np.array(ids, np.uint32), len(prompt.tokens), prompt.suite)
        for ids, (prompt, _) in zip(tokens, tasks, strict=True)
    ]


class _Progress:
    """A bar over prompts, with the rate of tokens and the whole corpus' size on disk."""

    def __init__(self, shards: dict[Path, list[Task]], show: bool) -> None:
        self.shards = shards
        self.done = [file for file in shards if file.exists()]
        self.total, self.tokens, self.start = sum(map(len, shards.values())), 0, perf_counter()
        if show:
            tokens = sum(len(p.tokens) + most for part in shards.values() for p, most in part)
            note(
                f"{self.total} prompts in {len(shards)} shards, {len(self.done)} of them written; "
                f"at most {tokens} tokens, about "
                f"{Progress.format_sizeof(tokens * _BYTES_PER_TOKEN, 'B')} on disk"
            )
        self.bar = Progress(
            desc="Answers",
            unit="prompt",
            total=self.total,
            initial=sum(len(shards[file]) for file in self.done),
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
        share = sum(len(self.shards[file]) for file in self.done) / self.total
        self.disk = f", about {Progress.format_sizeof(size / share, 'B')} on disk"

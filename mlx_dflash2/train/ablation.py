"""What each idea of DFlash 2 brings: matched drafters that differ in one part."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..benchmark.data import encode
from ..benchmark.plots import line_plot
from ..drafter import Drafter
from ..variants import parameters, without_selector
from .arguments import parse
from .chain import chain
from .corpus import Corpus, Text, write_shard
from .evaluate import acceptance, decode
from .prompts import built_in
from .run import Run
from .taps import ComputedTaps

# The selector learns beside the others, not through them: one run gives a drafter with it and
# the same drafter without it.
_RUNS = {
    "plain": ["--conv-kernel-size", "0", "--detach-selector"],
    "convolution": ["--detach-selector"],
    "deep": ["--conv-kernel-size", "0", "--selector-rank", "0"],
}


def train(folder: str | Path, options: Sequence[str], layers: int) -> dict[str, Drafter]:
    """Train the three runs, each from where it stopped, and take five drafters from them.

    Args:
        folder (str or Path): A folder for each run is made in it.
        options (sequence of str): Of ``mlx_dflash2.train``, the same for all runs.
        layers (int): Of all drafters but the last, which has twice as many.

    Returns:
        dict: Drafters by name, ready to draft.
    """
    drafters = {}
    for name, own in _RUNS.items():
        depth = 2 * layers if name == "deep" else layers
        path = Path(folder) / name
        own = [*own, "--num-layers", str(depth), "--output-path", str(path)]
        run = Run(parse(["fit", *options, *own]))
        run.fit()
        drafter = run.trained()[0]
        if name == "deep":
            drafters["DFlash, twice the layers"] = drafter
            continue
        first = "DFlash" if name == "plain" else "DFlash + convolution"
        drafters[first] = without_selector(drafter)
        second = "DFlash + selector" if name == "plain" else "DFlash 2"
        drafters[second] = drafter
    return drafters


def measure(
    drafters: dict[str, Drafter],
    run: Run,
    *,
    num_prompts: int,
    max_tokens: int,
    temps: Sequence[float] = (0.0, 1.0),
) -> dict[str, Any]:
    """Decode held-out prompts with each drafter.

    Args:
        drafters (dict): By name, the one to compare with first.
        run (Run): Gives the target.
        num_prompts (int): Of the built-in held-out ones.
        max_tokens (int): The most tokens of an answer.
        temps (sequence of float): Temperatures, 0 first. Default: ``(0.0, 1.0)``.

    Returns:
        dict: For each name ``parameters``, ``decoding`` by temperature as
        :func:`.evaluate.acceptance`, ``chain`` (acceptance lengths by what chooses drafts) and
        ``round_ms``, the milliseconds of a round at temperature 0.
    """
    model, tokenizer = run.loaded
    rows = built_in("held_out", run.args.seed, num_prompts)
    prompts = encode([{"suite": r.kind, "messages": r.messages} for r in rows], tokenizer)
    found = {}
    for name, drafter in drafters.items():
        result = {"parameters": sum(x.size for x in parameters(drafter).values()), "decoding": {}}
        for temp in temps:
            answers = decode(
                model, tokenizer, drafter, prompts, max_tokens=max_tokens, temp=temp, seed=1
            )
            result["decoding"][f"{temp:g}"] = acceptance(answers)
            if temp == 0:
                seconds = sum(answer.stats.generation_time for answer in answers)
                rounds = sum(answer.stats.rounds for answer in answers)
                result["round_ms"] = 1000 * seconds / max(1, rounds)
                texts = [Text([*a.prompt, *a.tokens], len(a.prompt), a.kind) for a in answers]
        file = run.folder / "held_out.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_shard(file, texts)
        corpus = Corpus(file)
        source = ComputedTaps(run.target, corpus, drafter.target_layer_ids, final=False)
        counts = chain(drafter, run.target, corpus, source, range(len(corpus)))
        result["chain"] = counts.lengths()
        found[name] = result
        mx.clear_cache()
    return found


def table(found: dict[str, Any]) -> str:
    """The comparison as Markdown, gains against the first drafter."""
    base = next(iter(found.values()))
    temps = list(base["decoding"])
    head = ["", "parameters", *(f"T = {temp}" for temp in temps), "gain", "oracle", "ms a round"]
    lines = ["| " + " | ".join(head) + " |", "|" + "-|" * len(head)]
    for name, result in found.items():
        cells = [name, f"{result['parameters'] / 1e6:.2f} M"]
        for temp in temps:
            one = result["decoding"][temp]
            low, high = one["interval"]
            cells.append(f"{one['acceptance_length']:.2f} ({low:.2f}–{high:.2f})")
        now, was = (r["decoding"][temps[0]]["acceptance_length"] for r in (result, base))
        cells.append(f"{now / was - 1:+.1%}")
        cells.append(f"{result['chain']['oracle']:.2f}")
        cells.append(f"{result['round_ms']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(found: dict[str, Any], folder: str | Path):
    """Write ``ablation.json`` and ``ablation.png`` (drafts accepted by position)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.json").write_text(json.dumps(found, indent=1) + "\n")
    temp = next(iter(next(iter(found.values()))["decoding"]))
    curves = {name: result["decoding"][temp]["by_position"] for name, result in found.items()}
    figure = line_plot(f"Drafts accepted, temperature {temp}", curves, "share of drafts")
    figure.savefig(folder / "ablation.png")

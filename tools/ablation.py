r"""Measure what each idea of DFlash 2 brings: matched drafters that differ in one part.

    python tools/ablation.py FOLDER

It goes on where it stopped. Give it a folder with texts and taps, such as this command makes:

    mlx_dflash2.train data taps --output-path FOLDER --dequantize --labels soft \
        --target-layer-ids 1 10 19 28 --mask-token-id 4 --num-layers 2 --block-size 8 \
        --num-prompts 10000 --own-prompts 8000 --max-tokens 144
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.drafter.variants import parameters, without_selector
from mlx_dflash2.evaluation.plots import line_plot
from mlx_dflash2.evaluation.prompts import Prompt, encode
from mlx_dflash2.train.corpus import Corpus
from mlx_dflash2.train.data import write_answers
from mlx_dflash2.train.evaluate import acceptance, answer_prompts, interval
from mlx_dflash2.train.options import parse
from mlx_dflash2.train.prompts import built_in
from mlx_dflash2.train.run import Run
from mlx_dflash2.train.taps import CachedTaps, write_taps
from tools.chain import Chain, chain

RESULTS = Path(__file__).parents[1] / "examples" / "results"
# The selector's loss reaches no other weights, but for the norm that all gradients are clipped by:
# one run gives a drafter with it and the same drafter without it.
_RUNS = {
    "plain": ["--conv-kernel-size", "0", "--detach-selector"],
    "convolution": ["--detach-selector"],
    "deep": ["--conv-kernel-size", "0", "--selector-rank", "0"],
}


def train(
    folder: str | Path,
    options: Sequence[str],
    layers: int,
    start: Sequence[str] | None = None,
) -> dict[str, Drafter]:
    """Train the three runs, each from where it stopped, and take five drafters from them.

    Args:
        folder (str or Path): A folder for each run is made in it.
        options (sequence of str): Of ``mlx_dflash2.train``, the same for all runs.
        layers (int): Of all drafters but the last, which has twice as many.
        start (sequence of str, optional): Options, beside the others, of a plain drafter that is
            trained first and that all runs begin from, those of the deep one with layers added.
            Default: each run begins from the target's layers.

    Returns:
        dict: Drafters by name, ready to draft.

    Raises:
        ValueError: if a time limit stopped a run.
    """
    if start is not None:
        options = [*options, "--draft-model", str(_trained_start(folder, options, layers, start))]
    drafters = {}
    for name, own in _RUNS.items():
        depth = 2 * layers if name == "deep" else layers
        path = Path(folder) / name
        own = [*own, "--num-layers", str(depth), "--output-path", str(path)]
        drafter = _trained(path, [*options, *own]).training.trained()[0]
        if name == "deep":
            drafters["DFlash, twice the layers"] = drafter
            continue
        first = "DFlash" if name == "plain" else "DFlash + convolution"
        drafters[first] = without_selector(drafter)
        second = "DFlash + selector" if name == "plain" else "DFlash 2"
        drafters[second] = drafter
    return drafters


def _trained(path: Path, options: Sequence[str]) -> Run:
    run = Run(parse(["fit", *options]))
    if not run.fit():
        raise ValueError(f"{path} is not trained to its end yet; run it again to go on.")
    return run


def _trained_start(
    folder: str | Path, options: Sequence[str], layers: int, start: Sequence[str]
) -> Path:
    """The exported plain drafter that all others begin from."""
    path = Path(folder) / "start"
    own = ["--conv-kernel-size", "0", "--selector-rank", "0", "--num-layers", str(layers)]
    _trained(path, [*options, *start, *own, "--output-path", str(path)]).export()
    return path / "export"


def measure(
    drafters: dict[str, Drafter],
    run: Run,
    held_out: Corpus,
    *,
    num_decoded: int,
    max_tokens: int,
) -> dict[str, Any]:
    """Count the rounds that each drafter takes for held-out text, and decode some of it.

    Args:
        drafters (dict): By name, the one to compare with first.
        run (Run): Gives the target.
        held_out (Corpus): The target's greedy answers to prompts that no drafter was trained on.
        num_decoded (int): How many of these prompts are decoded at temperatures 0 and 1.
        max_tokens (int): The most tokens of a decoded answer.

    Returns:
        dict: For each name ``parameters``; ``chain``, acceptance lengths by what chooses drafts,
        with ``interval``, 5 % to 95 % of a bootstrap over prompts, and ``gain`` over the first
        drafter with ``gain_interval`` of the same kind; ``decoding`` by temperature as
        :func:`.evaluate.acceptance`; and ``round_ms``, milliseconds of a round at temperature 0.
    """
    model, tokenizer = run.inputs.loaded
    layers = next(iter(drafters.values())).target_layer_ids
    folder, about = run.folder / "held_out_taps", {"model": run.inputs.name}
    about["dequantize"] = run.args.dequantize
    write_taps(run.inputs.target, held_out, layers, folder, final=False, **about)
    source = CachedTaps(folder, held_out, final=False, layers=layers)
    texts = np.linspace(0, len(held_out) - 1, num_decoded).round().astype(int)
    prompts = [
        Prompt(kind, "", tuple(tokens[:start].tolist()))
        for tokens, start, kind in (held_out[text] for text in texts)
    ]
    found, first = {}, None
    for name, drafter in drafters.items():
        counts = chain(drafter, run.inputs.target, held_out, source, range(len(held_out)))
        first = counts if first is None else first
        result = {
            "parameters": sum(x.size for x in parameters(drafter).values()),
            "chain": counts.lengths() | spread(counts, first),
            "decoding": {},
        }
        for temp in (0.0, 1.0):
            answers = answer_prompts(
                model, tokenizer, drafter, prompts, max_tokens=max_tokens, temp=temp, seed=1
            )
            result["decoding"][f"{temp:g}"] = acceptance(answers)
            if temp == 0:
                seconds = sum(answer.stats.generation_time for answer in answers)
                rounds = sum(answer.stats.rounds for answer in answers)
                result["round_ms"] = 1000 * seconds / max(1, rounds)
        found[name] = result
        mx.clear_cache()
    return found


def spread(counts: Chain, first: Chain) -> dict[str, Any]:
    """Intervals over prompts, of a drafter's acceptance length and of its gain over another one.

    Args:
        counts, first (Chain): The drafter's and the other one's, for the same texts.

    Returns:
        dict: ``interval``, ``gain`` as a share, and ``gain_interval``, which is paired: both
        drafters meet the same prompts in every resample.
    """
    return {
        "interval": interval(counts.tokens, counts.path),
        "gain": float(first.path.sum() / counts.path.sum()) - 1,
        "gain_interval": [ratio - 1 for ratio in interval(first.path, counts.path)],
    }


def table(found: dict[str, Any]) -> str:
    """The comparison as Markdown, gains against the first drafter."""
    names = ["", "parameters", "T = 0", "gain", "oracle", "T = 0, decoded", "T = 1, decoded"]
    names.append("ms a round")
    lines = ["| " + " | ".join(names) + " |", "|" + "-|" * len(names)]
    for name, result in found.items():
        counted = result["chain"]
        cells = [name, f"{result['parameters'] / 1e6:.2f} M"]
        low, high = counted["interval"]
        cells.append(f"{counted['path']:.3f} ({low:.2f}–{high:.2f})")
        low, high = counted["gain_interval"]
        cells.append(f"{counted['gain']:+.1%} ({low:+.1%} to {high:+.1%})")
        cells.append(f"{counted['oracle']:.2f}")
        cells += [f"{result['decoding'][t]['acceptance_length']:.2f}" for t in ("0", "1")]
        cells.append(f"{result['round_ms']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(found: dict[str, Any], folder: str | Path):
    """Write ``ablation.json`` and ``ablation.png`` (drafts accepted by position)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.json").write_text(json.dumps(found, indent=1) + "\n")
    curves = {name: result["decoding"]["0"]["by_position"] for name, result in found.items()}
    figure = line_plot("Drafts accepted, temperature 0", curves, "share of drafts")
    figure.savefig(folder / "ablation.png")


def main(folder: Path) -> None:
    """Train, measure and draw the drafters of the published table from a folder's texts."""
    options = (
        f"--data {folder / 'data'} --taps {folder / 'taps'} --dequantize --labels soft --factored "
        "--block-size 8 --target-layer-ids 1 10 19 28 --mask-token-id 4 --selector-rank 128 "
        "--rope-theta 10000 --vocab-sample 4096 --batch-size 6 --anchors 48 --train-block-size 5 "
        "--gamma 2 --learning-rate 8e-4 --average 0.98 --iters 2500"
    ).split()
    start = "--iters 260 --min-learning-rate 4e-4".split()

    drafters = train(folder / "ablation", options, layers=2, start=start)
    run = Run(parse([*options, "--output-path", str(folder / "ablation")]))
    model, tokenizer = run.inputs.loaded
    options = {"name": run.inputs.name, "max_tokens": 96, "batch_size": 110}
    prompts = encode(built_in("held_out", seed=0, count=110), tokenizer)
    held_out = write_answers(model, tokenizer, prompts, folder / "held_out", **options)
    found = measure(drafters, run, held_out, num_decoded=22, max_tokens=48)
    print(table(found))
    save(found, RESULTS)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/ablation.py FOLDER")
    main(Path(sys.argv[1]))

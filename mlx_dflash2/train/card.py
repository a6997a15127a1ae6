"""The model card of a trained drafter."""

from typing import Any

from ..checkpoint.card import weights_row
from ..drafter.model import Drafter

_CARD = """\
---
library_name: mlx
tags: [mlx, dflash, speculative-decoding]
---

# A DFlash {generation} drafter for {target}

It drafts blocks of {block} (the anchor and {drafts} tokens). It is not a model on its own: it uses
the embedding, the head and the hidden states of its target.

```shell
mlx_dflash2.generate --model {target} --draft-model PATH --prompt "Hello"
```

| | |
| --- | --- |
| Layers | {layers}, hidden size {hidden} |
| Taps | after target layers {taps} |
| Convolution | {conv} |
| Selector | {selector} |
| Mask id | {mask} |
{weights}

## Training

{texts} texts with {tokens} tokens of {source}; {steps} steps, at most {blocks} blocks.
Options: {options}.
"""
_RESULTS = "\n## Held-out prompts\n"


def make_card(
    drafter: Drafter, target: str, numbers: dict[str, int], options: dict[str, Any], own: bool
) -> str:
    """Describe a drafter.

    Args:
        drafter, target: The drafter as it is written, and the target's name.
        numbers (dict): ``texts``, ``tokens``, ``steps`` and ``blocks`` of its training.
        options (dict): Those that differ from their defaults.
        own (bool): Whether the target wrote the texts in the data stage.
    """
    args, selector = drafter.args, "none"
    if args.has_selector:
        selector = f"rank {args.selector_rank} over {args.selector_top_k} candidates"
    return _CARD.format(
        generation=args.generation,
        target=target,
        block=args.block_size,
        drafts=args.block_size - 1,
        layers=args.num_hidden_layers,
        hidden=args.hidden_size,
        taps=", ".join(map(str, args.target_layer_ids)),
        conv=f"{args.conv_kernel_size} taps" if args.has_conv else "none",
        selector=selector,
        mask=args.mask_token_id,
        weights=weights_row(drafter),
        **{name: f"{number:,}" for name, number in numbers.items()},
        options=", ".join(f"`{name}` {value}" for name, value in options.items()),
        source="the target's own answers" if own else "given answers",
    )


def with_results(card: str, found: dict[str, Any]) -> str:
    """Replace the results in a card by those of the latest eval stage."""
    return card.partition(_RESULTS)[0] + results_table(found)


def results_table(found: dict[str, Any]) -> str:
    """Format the results of the eval stage as Markdown."""
    lines = [*_RESULTS.splitlines(), "", "| | acceptance length | 90 % interval |", "|-|-|-|"]
    for temp, result in found["decoding"].items():
        low, high = result["interval"]
        lines.append(
            f"| decoding, temperature {temp}, {result['prompts']} prompts, {result['tokens']} "
            f"tokens | {result['acceptance_length']:.2f} | {low:.2f}–{high:.2f} |"
        )
    recall = found["recall"]
    if recall is not None:
        for name, label in (
            ("acceptance_best", "at every anchor: best token of each row"),
            ("acceptance_path", "at every anchor: the drafted path"),
            ("acceptance_oracle", "at every anchor: true token wherever it is a candidate"),
        ):
            lines.append(f"| {label} | {recall[name]:.2f} | |")
    for temp, result in found["decoding"].items():
        kinds = ", ".join(f"{kind} {x:.2f}" for kind, x in result["by_kind"].items())
        lines += ["", f"Temperature {temp} by kind: {kinds}."]
        rates = " ".join(f"{rate:.2f}" for rate in result["by_position"])
        lines.append(f"Drafts accepted, by position: {rates}.")
    return "\n".join([*lines, ""])

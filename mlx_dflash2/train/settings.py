"""The options of a run that its checkpoints were made with, and those that may differ."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from .options import parse
from .records import refuse_difference

# They do not change what is computed, or what they change is recorded by itself.
_FREE = {
    "stage", "config", "given", "output_path", "time_limit", "save_every", "steps_per_report",
    "no_cache", "taps", "eval_prompts", "num_eval_prompts", "eval_max_tokens", "eval_temp",
    "eval_stride", "bits", "data_batch_size", "grad_checkpoint", "thinking",
}  # fmt: skip
ADVICE = "give another --output-path or the first value"


def deciding(args: Namespace) -> dict[str, Any]:
    """The options that decide what is computed, as JSON keeps them."""
    return json.loads(json.dumps({k: v for k, v in vars(args).items() if k not in _FREE}))


def as_trained(args: Namespace, settings: dict[str, Any], source: Path) -> Namespace:
    """Options with those that decide what is computed taken from a checkpoint.

    Args:
        args (Namespace): Of the command line, which need not repeat them.
        settings (dict): The checkpoint's.
        source (Path): The checkpoint.

    Raises:
        ValueError: if one was given that is another one than the checkpoint's, or is missing in
            both.
    """
    refuse_missing(args, settings, source)
    wanted = deciding(args)
    stored = {name: value for name, value in settings.items() if name in wanted}
    explicit = {name: wanted[name] for name in stored if name in args.given}
    refuse_difference(source, stored, explicit, ADVICE)
    return Namespace(**vars(args) | stored)


def refuse_missing(args: Namespace, settings: dict[str, Any], source: Path):
    """Refuse a checkpoint that does not say how it was made: a default may have changed since.

    A flag's cannot: a checkpoint from before there was the flag was made without it.

    Raises:
        ValueError: naming an option that the checkpoint lacks and that was not given either.
    """
    for name, value in deciding(args).items():
        if name not in settings and name not in args.given and value is not False:
            raise ValueError(f"{source} does not say its `{name}`; give the one that it had.")


def not_default(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of a checkpoint that somebody gave."""
    defaults = deciding(parse([]))
    return {k: v for k, v in settings.items() if k in defaults and v != defaults[k]}

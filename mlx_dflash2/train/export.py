"""Export a run's drafter: its weights, its model card, and a record of what it was made of."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..checkpoint.card import describe_scheme
from ..checkpoint.quantization import Quantization
from ..checkpoint.save import config_of, save_drafter
from ..drafter.model import Drafter
from .card import make_card, with_results
from .checkpoints import Saved, not_default
from .corpus import Corpus
from .records import read_record, write_record

_FOLDER, _RECORD = "export", "export.json"


def exported_step(folder: Path) -> int | None:
    """Return the step that a run's export is of, if there is one and its step is known."""
    file = folder / _RECORD
    return read_record(file).get("step") if (folder / _FOLDER).exists() and file.is_file() else None


def is_exported(folder: Path, made: dict[str, Any]) -> bool:
    """Tell whether a run's export of ``made``, its ``step`` and ``bits``, exists already.

    Raises:
        ValueError: if there is an export of something else.
    """
    path, file = folder / _FOLDER, folder / _RECORD
    if not path.exists():
        return False
    found = read_record(file) if file.is_file() else {}
    if found != made:
        raise ValueError(
            f"{path} is of step {found.get('step', 'unknown')} ({_scheme(found)}) but step "
            f"{made['step']} ({_scheme(made)}) is asked for; remove that folder."
        )
    return True


def _scheme(made: dict[str, Any]) -> str:
    return f"{made['bits']} bits" if made.get("bits") else "bfloat16"


def export_drafter(
    drafter: Drafter, corpus: Corpus, saved: Saved, made: dict[str, Any], folder: Path, name: str
) -> str:
    """Write a run's export.

    Args:
        drafter (Drafter): The trained drafter, which is rounded and quantized in place.
        corpus, saved: The texts it was trained on, and its checkpoint.
        made (dict): Its ``step`` and the ``bits`` to quantize to, or ``None``.
        folder (Path): The run's.
        name (str): The target's name or path.

    Returns:
        str: Bits and dtype of its weights.
    """
    drafter.update(tree_map(lambda x: x.astype(mx.bfloat16), drafter.parameters()))
    mx.eval(drafter.parameters())
    if made["bits"] is not None:
        Quantization(made["bits"]).apply(drafter)
    settings = saved.settings
    numbers = {"texts": len(corpus), "tokens": corpus.num_answer_tokens, "steps": saved.step}
    numbers["blocks"] = saved.step
    for count in ("batch_size", "anchors", "grad_accumulation_steps", "processes"):
        numbers["blocks"] *= settings[count]
    private = ("model", "data", "prompts", "draft_model")
    options = {k: v for k, v in not_default(settings).items() if k not in private}
    # A hub's name says where to get the target; a path is of this machine alone.
    target = Path(name).name if Path(name).expanduser().is_dir() else name
    card = make_card(drafter, target, numbers, options, own=settings["data"] is None)
    # Write the record first: an export without one could not be traced to its step.
    write_record(folder / _RECORD, made)
    save_drafter(drafter, folder / _FOLDER, config_of(drafter.args), card)
    return describe_scheme(drafter)


def add_results(folder: Path, found: dict[str, Any]) -> None:
    """Write the results of the eval stage into the card of a run's export."""
    card = folder / _FOLDER / "README.md"
    card.write_text(with_results(card.read_text(encoding="utf-8"), found), encoding="utf-8")

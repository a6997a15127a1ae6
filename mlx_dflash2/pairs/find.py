"""Find a pair: which folders or repositories, and what their configs say, but no weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import embedded
from ..checkpoint.files import Source
from ..checkpoint.load import DrafterSource, check_bits, find_drafter, find_target
from ..decode.loop import check_widths
from ..drafter.args import DrafterArgs
from ..drafter.fit import check_fit
from ..targets.shape import TargetShape
from .known import default_drafter, mismatch_note

EMBEDDED_NOTE = (
    "No --model: this is the embedded pair, SmolLM2-135M-Instruct with its drafter. For "
    "Qwen3.8-27B: mlx_dflash2.generate --model mlx-community/Qwen3.8-27B-4bit"
)


@dataclass(frozen=True)
class PairSources:
    """A target and a drafter that fit each other, as far as their configs tell.

    Attributes:
        target (Source): The target's folder and config.
        drafter (DrafterSource): The drafter's folder, config and args.
        draft_bits (int, optional): Bits to quantize the drafter to when it is read.
        notes (tuple of str): Lines that the user should see.
    """

    target: Source
    drafter: DrafterSource
    draft_bits: int | None = None
    notes: tuple[str, ...] = ()


def find_pair(
    model: str | Path | None = None,
    draft_model: str | Path | None = None,
    *,
    draft_bits: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
) -> PairSources:
    """Find a target and its drafter, and check that they fit; no weights are fetched or read.

    Args:
        model (str or Path, optional): Folder or repository of the target. Default: ``None``,
            the embedded pair.
        draft_model (str or Path, optional): Folder or repository of the drafter. Default:
            ``None``, the known drafter of the target.
        draft_bits (int, optional): Bits to quantize the drafter to when it is read.
        block_size, verify_width (int, optional): As in :func:`dflash_generate_step`.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such model, or the package of the
            embedded target is not installed.
        ValueError: if a model is of the wrong kind, no drafter is known for the target, the two
            do not fit, or an option does not fit the drafter.
    """
    notes = []
    if model is None:
        model = embedded.target_path()
        notes.append(EMBEDDED_NOTE)
    target = find_target(model)
    if not draft_model:
        # The embedded target may also be named by its folder, as in a saved prompt cache.
        found = embedded.is_target(model)
        draft_model = embedded.drafter_path() if found else default_drafter(model)
    drafter = find_drafter(draft_model)
    check_bits(draft_bits, drafter)
    check_widths(drafter.args.block_size, block_size, verify_width)
    _check_fit(drafter.args, target.config)
    if (mismatch := mismatch_note(model, draft_model)) is not None:
        notes.append(f"warning: {mismatch}")
    return PairSources(target, drafter, draft_bits, tuple(notes))


def _check_fit(args: DrafterArgs, config: dict[str, Any]) -> None:
    try:
        shape = TargetShape.from_config(config)
    except ValueError:
        # mlx-lm has defaults for fields that a config leaves out; the loaded model is checked.
        return
    check_fit(args, shape)

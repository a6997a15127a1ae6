"""Find a pair: which folders or repositories, and what their configs say, but no weights."""

from dataclasses import dataclass
from pathlib import Path

from .. import embedded
from ..checkpoint.load import DrafterSource, check_bits, find_drafter
from ..checkpoint.target import TargetSource, find_target
from ..decode.checks import check_widths
from ..drafter.fit import check_fit
from .known import default_drafter, mismatch_note


@dataclass(frozen=True)
class PairSources:
    """A target and a drafter that fit each other, as far as their configs tell.

    Attributes:
        target (TargetSource): The target's folder, config and shape.
        drafter (DrafterSource): The drafter's folder, config and args.
        draft_bits (int, optional): Bits to quantize the drafter to when it is read.
        notes (tuple of str): Lines that the user should see.
    """

    target: TargetSource
    drafter: DrafterSource
    draft_bits: int | None = None
    notes: tuple[str, ...] = ()


def find_pair(
    model: str | Path | None = None,
    draft_model: str | Path | None = None,
    *,
    revision: str | None = None,
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
        revision (str, optional): Revision of the target's repository. Default: ``None``.
        draft_bits (int, optional): Bits to quantize the drafter to when it is read.
        block_size, verify_width (int, optional): As in :func:`dflash_generate_step`.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such model, or the package of the
            embedded target is not installed.
        ValueError: if a model is of the wrong kind or not supported, no drafter is known for
            the target, the two do not fit, or an option does not fit the drafter.
    """
    notes = []
    if model is None:
        model = embedded.target_path()
    target = find_target(model, revision)
    if not draft_model:
        # The embedded target may also be named by its folder, as in a saved prompt cache.
        found = embedded.is_target(model)
        draft_model = embedded.drafter_path() if found else default_drafter(model)
    drafter = find_drafter(draft_model)
    check_bits(draft_bits, drafter)
    check_widths(drafter.args.block_size, block_size, verify_width)
    check_fit(drafter.args, target.shape)
    if (mismatch := mismatch_note(model, draft_model)) is not None:
        notes.append(f"warning: {mismatch}")
    return PairSources(target, drafter, draft_bits, tuple(notes))

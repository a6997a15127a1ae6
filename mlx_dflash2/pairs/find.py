"""Find a pair: which folders or repositories, and what their configs say, but no weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import embedded
from ..checkpoint.load import DrafterSource, check_bits, find_drafter
from ..checkpoint.target import TargetSource, find_target
from ..copies import MAX_DRAFTS
from ..decode.checks import check_widths
from ..drafter.fit import check_fit
from .known import default_drafter, mismatch_note


@dataclass(frozen=True)
class PairSources:
    """A target, and a drafter that fits it as far as their configs tell, or none for copies.

    Attributes:
        target (TargetSource): The target's folder, config and shape.
        draft_model (DrafterSource, optional): The drafter's folder, config and args.
        draft_bits (int, optional): Bits to quantize the drafter to when it is read.
        notes (tuple of str): Lines that the user should see.
        copies (bool): Draft copies of the text, too.
    """

    target: TargetSource
    draft_model: DrafterSource | None
    draft_bits: int | None = None
    notes: tuple[str, ...] = ()
    copies: bool = False

    @property
    def drafter(self) -> DrafterSource:
        """Return the drafter's source.

        Raises:
            ValueError: if there are only copies.
        """
        if self.draft_model is None:
            raise ValueError("`copy_drafts` is only but a drafter is needed.")
        return self.draft_model


def find_pair(
    model: str | Path | None = None,
    draft_model: str | Path | None = None,
    *,
    revision: str | None = None,
    draft_bits: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    copy_drafts: str = "off",
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
        copy_drafts (str): ``with`` also drafts copies of the text so far; ``only`` drafts nothing
            else, and looks for no drafter. Default: ``off``.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such model, or the package of the
            embedded target is not installed.
        ValueError: if a model is of the wrong kind or not supported, no drafter is known for
            the target, the two do not fit, or an option does not fit the drafter.
    """
    notes: list[str] = []
    if model is None:
        model = embedded.target_path()
    target = find_target(model, revision)
    if copy_drafts == "only":
        unused = {"draft_model": draft_model, "draft_bits": draft_bits, "block_size": block_size}
        _check_unused(unused)
        check_widths(1, None, verify_width, MAX_DRAFTS)
        return PairSources(target, None, notes=tuple(notes), copies=True)
    copies = copy_drafts == "with"
    if not draft_model:
        # The embedded target may also be named by its folder, as in a saved prompt cache.
        found = embedded.is_target(model)
        draft_model = embedded.drafter_path() if found else default_drafter(model)
    drafter = find_drafter(draft_model)
    check_bits(draft_bits, drafter)
    max_copied = MAX_DRAFTS if copies else 0
    check_widths(drafter.args.block_size, block_size, verify_width, max_copied)
    check_fit(drafter.args, target.shape)
    if (mismatch := mismatch_note(model, draft_model)) is not None:
        notes.append(f"warning: {mismatch}")
    return PairSources(target, drafter, draft_bits, tuple(notes), copies)


def _check_unused(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}` is {value} but `copy_drafts` is only: nothing uses it.")

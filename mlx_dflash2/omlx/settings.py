"""The settings of one target and drafter, as plain data."""

import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from .fields import DFLASH2_OMLX, NEWEST_OMLX, check_value, known_fields

SETTINGS_VERSION = 1
# Verifying more rows than this costs a quantised target more than it gains.
QUANTIZED_BLOCK_SIZE = 5
DEFAULT_QUANT = 4
DEFAULT_GROUP_SIZE = 64
DEFAULT_VERIFY_MODE = "dflash"


def chip_generation(chip: str) -> int:
    """Read the generation out of a chip name.

    Args:
        chip (str): Such as ``M4``, ``M1 Max`` or ``Apple M3 Ultra``.
    Returns:
        int: The number after the M.
    Raises:
        ValueError: If the name is not that of an Apple M chip.
    """
    match = re.fullmatch(r"(?:Apple )?M([1-9]\d*)(?: (?:Pro|Max|Ultra))?", chip.strip(), re.I)
    if match is None:
        raise ValueError(f"chip: found {chip!r}, allowed: M1, M2 Pro, M3 Max, M4, M5 and so on")
    return int(match[1])


def check_model_id(model_id: str) -> None:
    """Check that oMLX could know a model by this id.

    Args:
        model_id (str): A folder name, or ``Org--Name`` for a model in the hub cache.
    Raises:
        ValueError: If the id is empty, hidden, or holds a slash.
    """
    if not model_id or "/" in model_id or model_id.startswith("."):
        raise ValueError(
            f"target: found {model_id!r}, allowed: the name of the model's folder, or Org--Name "
            "for a model in the hub cache (oMLX never finds an id with '/')"
        )
    _check_unicode("target", model_id)


def check_draft_reference(drafter: str) -> None:
    """Check that a drafter reference means the same to oMLX wherever it was started.

    Args:
        drafter (str): An absolute path or a hub repo id.
    Raises:
        ValueError: If it is a bare name, a relative path or starts with ``~``.
    """
    absolute = PurePosixPath(drafter).is_absolute() and ".." not in PurePosixPath(drafter).parts
    if not absolute and not is_repo_id(drafter):
        raise ValueError(
            f"dflash_draft_model: found {drafter!r}, allowed: "
            "an absolute path, or a hub repo id owner/name"
        )
    _check_unicode("dflash_draft_model", drafter)


def _check_unicode(name: str, text: str) -> None:
    # oMLX saves UTF-8: a name that is not Unicode would make each of its saves fail.
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{name}: found {text!r}, allowed: names that are valid Unicode")


def is_repo_id(reference: str) -> bool:
    """Tell a hub repo id from a path.

    Args:
        reference (str): A drafter reference.
    Returns:
        bool: True for ``owner/name``.
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", reference) is not None


def default_block_size(quantized_target: bool, drafter_block_size: int | None) -> int | None:
    """Choose the block, which counts the token already known.

    Args:
        quantized_target (bool): Whether the target's weights are quantised.
        drafter_block_size (int, optional): The block the drafter was trained with.
    Returns:
        int or None: The block, or None to leave the choice to the drafter.
    """
    if not quantized_target:
        return drafter_block_size
    return min(QUANTIZED_BLOCK_SIZE, drafter_block_size or QUANTIZED_BLOCK_SIZE)


def model_settings(
    target: str,
    drafter: str,
    *,
    chip: str,
    quant: int | None = DEFAULT_QUANT,
    block_size: int | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    activation_bits: int | None = None,
    verify_mode: str = DEFAULT_VERIFY_MODE,
    max_ctx: int | None = None,
    quantized_target: bool = True,
    drafter_block_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    omlx_version: str = NEWEST_OMLX,
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """Build the settings document that makes oMLX run a target with a DFlash 2 drafter.

    Args:
        target (str): The target's id in oMLX: its folder name, or ``Org--Name`` in the hub cache.
        drafter (str): The drafter's absolute path, or its hub repo id.
        chip (str): The chip the server runs on, such as ``M4 Max``.
        quant (int, optional): Bits to quantise the drafter to at load; None loads it as stored.
            Default: ``4``.
        block_size (int, optional): Tokens of a verify block, the known one included. Default:
            5 for a quantised target, else the drafter's own.
        group_size (int): Group size of the drafter's quantisation. Default: ``64``.
        activation_bits (int, optional): Default: 32 on M1 and M2, else 16.
        verify_mode (str): Default: ``dflash``.
        max_ctx (int, optional): Prompt length from which oMLX leaves DFlash; None for no limit.
        quantized_target (bool): Whether the target's weights are quantised. Default: ``True``.
        drafter_block_size (int, optional): The block the drafter was trained with, an upper bound.
        options (dict, optional): Further keys of the field table.
        omlx_version (str): The server's version. Default: the newest one known here.
        known (collection, optional): The keys the server knows, instead of `omlx_version`.
    Returns:
        dict: ``{"version": 1, "models": {target: {...}}}`` without null values.
    Raises:
        ValueError: If a value is not allowed, or the server is too old for DFlash 2.
    """
    check_model_id(target)
    check_draft_reference(drafter)
    if block_size is None:
        block_size = default_block_size(quantized_target, drafter_block_size)
    entry = {
        "dflash_enabled": True,
        "dflash_draft_model": drafter,
        **_quant_fields(quant, group_size, activation_bits, chip),
        "dflash_block_size": block_size,
        "dflash_verify_mode": verify_mode,
        "dflash_max_ctx": max_ctx,
        "mtp_enabled": False,
        "vlm_mtp_enabled": False,
    }
    entry = {key: value for key, value in entry.items() if value is not None}
    _add_options(entry, options or {})
    for key, value in entry.items():
        check_value(key, value)
    _check_block(block_size, drafter_block_size)
    entry = _only_known(entry, known_fields(omlx_version) if known is None else known)
    return {"version": SETTINGS_VERSION, "models": {target: entry}}


def _quant_fields(
    quant: int | None, group_size: int, activation_bits: int | None, chip: str
) -> dict[str, Any]:
    # On M1 and M2, 16 bits mean float16, which overflows: nearly every draft is rejected then.
    by_chip = 32 if chip_generation(chip) <= 2 else 16
    if quant is None:
        return {"dflash_draft_quant_enabled": False}
    return {
        "dflash_draft_quant_enabled": True,
        "dflash_draft_quant_weight_bits": quant,
        "dflash_draft_quant_activation_bits": (
            by_chip if activation_bits is None else activation_bits
        ),
        "dflash_draft_quant_group_size": group_size,
    }


def _add_options(entry: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key in entry or value is None:
            raise ValueError(f"options: found {key!r} = {value!r}, allowed: a key not set already")
        entry[key] = value


def single_entry(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Take apart a document as from `model_settings`.

    Args:
        settings (dict): The document.
    Returns:
        tuple: The model's id and its settings.
    Raises:
        ValueError: If it holds more or less than one model, or a key or value that is not ours.
    """
    models = settings["models"]
    if len(models) != 1:
        raise ValueError(f"models: found {len(models)} entries to merge, allowed: 1")
    ((model_id, entry),) = models.items()
    check_model_id(model_id)
    for key, value in entry.items():
        check_value(key, value)
    return model_id, dict(entry)


def _check_block(block_size: int | None, drafter_block_size: int | None) -> None:
    if block_size is None:
        return
    # A block of one is the known token alone: nothing would be drafted.
    if block_size < 2 or (drafter_block_size and block_size > drafter_block_size):
        upper = f" to {drafter_block_size}, the drafter's own" if drafter_block_size else " or more"
        raise ValueError(f"dflash_block_size: found {block_size}, allowed: 2{upper}")


def _only_known(entry: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    if "dflash_block_size" not in known:
        raise ValueError(
            "omlx_version: this oMLX has no dflash_block_size and cannot load a DFlash 2 drafter; "
            f"allowed: {DFLASH2_OMLX[0]}, or {DFLASH2_OMLX[1]} and later"
        )
    dropped = [k for k, v in entry.items() if k not in known and v is not False]
    if dropped:
        raise ValueError(f"{dropped[0]}: unknown to this oMLX, which would drop it; leave it out")
    return {key: value for key, value in entry.items() if key in known}

"""The settings keys of oMLX that DFlash depends on, and the settings of one model."""

import json
import operator
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

NEWEST_OMLX = "0.7.0"
TOO_OLD = "is too old for DFlash 2; allowed: oMLX 0.6.2-dflash2, or 0.6.3rc1 and later"
# Verifying more rows than this costs a quantized target more than it gains.
QUANTIZED_BLOCK_SIZE = 5
_PATH = "an absolute path, or a hub repo id owner/name"


class Key(NamedTuple):
    """A settings key of every oMLX that runs DFlash 2, with its values or its least integer.

    ``batched`` says whether it has an effect where oMLX drafts inside its batched engine.
    """

    kind: type
    allowed: tuple[Any, ...] | int
    batched: bool = False
    nullable: bool = True


_BOOL, _SWITCH = Key(bool, (True, False), nullable=False), Key(bool, (True, False), True, False)
KEYS = {
    "dflash_enabled": _SWITCH,
    "dflash_draft_model": Key(str, (), batched=True),
    "dflash_draft_quant_enabled": Key(bool, (True, False), batched=True),
    "dflash_draft_quant_weight_bits": Key(int, (2, 4, 8), batched=True),
    "dflash_draft_quant_activation_bits": Key(int, (16, 32)),
    "dflash_draft_quant_group_size": Key(int, (32, 64, 128), batched=True),
    "dflash_block_size": Key(int, 1, batched=True),
    "dflash_verify_mode": Key(str, ("dflash", "adaptive", "ddtree", "off")),
    # In the file, 0 is not "unlimited": it sends every prompt to the ordinary engine.
    "dflash_max_ctx": Key(int, 1),
    "dflash_in_memory_cache": _BOOL,
    "dflash_in_memory_cache_max_entries": Key(int, 1, nullable=False),
    "dflash_in_memory_cache_max_bytes": Key(int, 0, nullable=False),
    "dflash_ssd_cache": _BOOL,
    "dflash_ssd_cache_max_bytes": Key(int, 0, nullable=False),
    "dflash_draft_window_size": Key(int, 1),
    "dflash_draft_sink_size": Key(int, 0),
    "mtp_enabled": _SWITCH,
    "vlm_mtp_enabled": _SWITCH,
}


class Rule(NamedTuple):
    """A value for which oMLX drops a model's whole entry, and erases it at its next save.

    From version ``since`` on it has to fit where a key of ``beside`` is on, always if there are
    none. Beside DFlash, ``qwen35_ane_prefill_enabled`` counts for k2_horizon alone, which is not
    a type of target that DFlash runs with.
    """

    key: str
    since: str
    beside: tuple[str, ...]
    remedy: str
    allowed: str = "false"
    fits: Callable[[Any], bool] = operator.not_


_NOT_VLM = ("dflash_enabled", "mtp_enabled", "specprefill_enabled", "turboquant_kv_enabled")
_NOT_MOE = ("dflash_enabled", "mtp_enabled", "vlm_mtp_enabled")
_MOE, _FRACTION = "moe_expert_offload_enabled", "moe_expert_offload_resident_fraction"
_OQ, _TOKENS, _NEW = ("qwen35_oq_a8_enabled",), "qwen35_oq_a8_min_tokens", "0.7.0.dev2"
RULES = (
    Rule("mtp_enabled", "0.3.9", ("dflash_enabled",), "--replace-mtp"),
    Rule("vlm_mtp_enabled", "0.6.2", _NOT_VLM, "--replace-mtp"),
    Rule(_MOE, _NEW, _NOT_MOE, f"--turn-off {_MOE}"),
    Rule(
        *(_FRACTION, _NEW, (), f"--unset {_FRACTION}", "above 0 and at most 1"),
        lambda value: value is None or (type(value) in (int, float) and 0 < value <= 1),
    ),
    Rule(
        *(_TOKENS, _NEW, _OQ, f"--unset {_TOKENS}", "1 or more"),
        lambda value: isinstance(value, int | float) and value >= 1,
    ),
)
# What an export may turn off, and what it may remove.
SWITCHES = tuple(rule.key for rule in RULES if rule.fits is operator.not_)
REMOVABLE = frozenset((*KEYS, _FRACTION, _TOKENS))


def refusals(entry: Mapping[str, Any]) -> list[str]:
    """List why oMLX would drop a model's entry, and the flag that resolves it."""
    lines = []
    for key, since, beside, remedy, allowed, fits in RULES:
        on = [other for other in beside if entry.get(other)]
        if key in entry and (on or not beside) and not fits(entry[key]):
            allowed += f" beside {on[0]}" if on else ""
            lines.append(
                f"{key}: found {json.dumps(entry[key])}, allowed: {allowed}; oMLX {since} and "
                f"later drop all settings of the model; {remedy} resolves it, disable gives it back"
            )
    return lines


def check_name(what: str, name: str, allowed: Collection[str] = KEYS) -> None:
    """Refuse a key that is not one of those allowed."""
    if name not in allowed:
        raise ValueError(f"{what}: found {name!r}, allowed: {', '.join(sorted(allowed))}")


def value_problems(entry: Mapping[str, Any]) -> list[str]:
    """List the values that oMLX would misread; a bool is not an int and 4.0 is not 4."""
    problems = []
    for name, (kind, allowed, _, nullable) in KEYS.items():
        value: Any = entry.get(name)
        fits, words = type(value) is kind, _PATH
        if isinstance(allowed, int):
            fits, words = fits and value >= allowed, f"an integer >= {allowed}"
        elif allowed:
            fits, words = fits and value in allowed, " or ".join(map(json.dumps, allowed))
        if name in entry and not fits and not (value is None and nullable):
            words += ", or no such key" if nullable else ""
            problems.append(f"{name}: found {json.dumps(value)}, allowed: {words}")
    if entry.get("dflash_block_size") == 1:
        problems.append("dflash_block_size: found 1, allowed: 2 or more (1 drafts nothing)")
    return problems


def model_settings(
    target: str,
    drafter: str,
    *,
    chip: str | None = None,
    quant: int | None = 4,
    block_size: int | None = None,
    group_size: int = 64,
    activation_bits: int | None = None,
    verify_mode: str = "dflash",
    max_ctx: int | None = None,
    quantized_target: bool = True,
    drafter_block_size: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the settings document that makes oMLX run a target with a DFlash 2 drafter.

    Args:
        target (str): The target's id in oMLX: its folder name, or ``Org--Name`` in the hub cache.
        drafter (str): The drafter's absolute path, or its hub repo id.
        chip (str, optional): The chip of oMLX's Mac, such as ``M4 Max``.
        quant, group_size (int): Bits and group size to quantize the drafter with at load; None
            loads it as stored. Default: ``4`` and ``64``.
        block_size (int, optional): Tokens of a verify block, the anchor included. Default: 5 for
            a quantized target, else the drafter's own.
        activation_bits (int, optional): Default: 32 if the chip is an M1 or M2, else 16.
        verify_mode (str): Default: ``dflash``.
        max_ctx (int, optional): Prompt tokens from which oMLX leaves DFlash. Default: no limit.
        quantized_target (bool): Whether the target's weights are quantized. Default: ``True``.
        drafter_block_size (int, optional): The block the drafter was trained with.
        options (dict, optional): Further DFlash keys.

    Returns:
        dict: ``{"version": 1, "models": {target: {...}}}`` without null values.

    Raises:
        ValueError: If a value is not allowed.
    """
    check_model_id(target)
    check_draft_reference(drafter)
    if block_size is None:
        largest = QUANTIZED_BLOCK_SIZE if quantized_target else drafter_block_size
        block_size = min(largest, drafter_block_size or largest) if largest else None
    if quant is not None and activation_bits is None:
        # On M1 and M2, 16 bits are float16, which overflows: nearly every draft is rejected.
        activation_bits = 32 if chip_generation(chip or "") <= 2 else 16
    entry: dict[str, Any] = {
        "dflash_enabled": True,
        "dflash_draft_model": drafter,
        "dflash_draft_quant_enabled": quant is not None,
        "dflash_draft_quant_weight_bits": quant,
        "dflash_draft_quant_activation_bits": None if quant is None else activation_bits,
        "dflash_draft_quant_group_size": None if quant is None else group_size,
        "dflash_block_size": block_size,
        "dflash_verify_mode": verify_mode,
        "dflash_max_ctx": max_ctx,
        "mtp_enabled": False,
        "vlm_mtp_enabled": False,
    }
    entry = {key: value for key, value in entry.items() if value is not None}
    for key in options or {}:
        check_name("options", key, KEYS.keys() - entry.keys())
    entry |= options or {}
    if problems := value_problems(entry):
        raise ValueError(problems[0])
    if block_size is not None and block_size > (drafter_block_size or block_size):
        allowed = f"2 to {drafter_block_size}, the drafter's own"
        raise ValueError(f"dflash_block_size: found {block_size}, allowed: {allowed}")
    return {"version": 1, "models": {target: entry}}


def chip_generation(chip: str) -> int:
    """Read the generation out of a chip name such as ``M4``, ``M1 Max`` or ``Apple M3 Ultra``."""
    match = re.fullmatch(r"(?:Apple )?M([1-9]\d*)(?: (?:Pro|Max|Ultra))?", chip.strip(), re.I)
    if match is None:
        raise ValueError(f"chip: found {chip!r}, allowed: M1, M2 Pro, M3 Max, M4, M5 and so on")
    return int(match[1])


def check_model_id(model_id: str) -> None:
    """Refuse an id that oMLX could not know a model by, or could not save."""
    if "/" in model_id or model_id[:1] in ("", ".") or not model_id.isprintable():
        raise ValueError(
            f"target: found {model_id!r}, allowed: the name of the model's folder, in valid "
            "Unicode and without '/', or Org--Name for a model in the hub cache"
        )


def check_draft_reference(drafter: str) -> None:
    """Refuse a reference whose meaning depends on where oMLX is started: a bare name, ``~``."""
    path = PurePosixPath(drafter)
    absolute = path.is_absolute() and ".." not in path.parts and drafter.isprintable()
    if not (absolute or is_repo_id(drafter)):
        raise ValueError(f"dflash_draft_model: found {drafter!r}, allowed: {_PATH}")


def is_repo_id(reference: str) -> bool:
    """Tell a hub repo id, ``owner/name``, from a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", reference) is not None

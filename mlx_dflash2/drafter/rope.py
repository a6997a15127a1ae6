"""The rotary embedding of each drafter layer, as its config describes it."""

from typing import Any

from .fields import Fields, is_integer, is_number, is_positive, refuse, section

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = ("yarn", "deepseek_yarn", "telechat3-yarn")
# What each kind has to state for mlx-lm to build it; the M-RoPE of a multimodal target is plain
# RoPE for the drafter's one-dimensional positions.
_NEEDED = {
    "default": (),
    "mrope": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings"),
    "longrope": (
        "original_max_position_embeddings",
        "max_position_embeddings",
        "short_factor",
        "long_factor",
    ),
} | {kind: ("factor", "original_max_position_embeddings") for kind in YARN}
_POSITIVE = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale")
# A larger factor is a typo, and the arithmetic of a rotation overflows.
_MOST = 1000
_OPTIONAL = (*_POSITIVE, "mscale_all_dim")


def rope_parameters(fields: Fields, layer_type: str, head_dim: int) -> dict[str, Any]:
    """Read one layer's rotation: ``rope_type``, ``rope_theta`` and what its kind needs.

    Raises:
        ValueError: naming the field that is missing, contradicts another or is out of range.
    """
    section_name, nested, of_layer = _section(fields.top, layer_type)
    theta = _theta(section_name, nested.pop("rope_theta", None), fields.top, of_layer)
    # Fields of the whole model count for a rotation, too; null is absent.
    shared = ("original_max_position_embeddings", "max_position_embeddings")
    given = {name: fields.top[name] for name in shared if fields.top.get(name) is not None}
    given |= {name: value for name, value in nested.items() if value is not None}
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    if not isinstance(kind, str) or kind not in _NEEDED:
        refuse(f"{section_name}.rope_type", kind, "one of " + ", ".join(_NEEDED))
    if kind in YARN and "max_position_embeddings" in given:
        given.setdefault("original_max_position_embeddings", given["max_position_embeddings"])
    _check_kind(section_name, kind, given, head_dim)
    used = {name: given[name] for name in _NEEDED[kind] + _OPTIONAL if name in given}
    return used | {"rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}


def _section(config: dict[str, Any], layer_type: str) -> tuple[str, dict[str, Any], bool]:
    """Find the layer's object: its name, a copy, and whether it is for one kind of layer only."""
    parameters, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    if parameters and scaling and _without_theta(parameters) != _without_theta(scaling):
        refuse("rope_scaling", scaling, "absent, or the same as rope_parameters")
    name = "rope_parameters" if parameters or not scaling else "rope_scaling"
    found = parameters or scaling
    if SLIDING in found or FULL in found:
        return f"{name}.{layer_type}", dict(section(found, layer_type)), layer_type in found
    return name, dict(found), False


def _without_theta(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != "rope_theta"}


def _theta(name: str, nested: Any, config: dict[str, Any], of_layer: bool) -> float:
    flat: Any = config.get("rope_theta")
    if nested is None and flat is None:
        refuse("rope_theta", None, "given, at the top level or in rope_parameters")
    for found, where in ((flat, "rope_theta"), (nested, f"{name}.rope_theta")):
        if found is not None and not (is_number(found) and found > 1):
            refuse(where, found, "a number above 1")
    # A kind of layer may have another base than the model; the model's own, given twice, may not
    # differ.
    if None not in (nested, flat) and nested != flat and not of_layer:
        refuse("rope_theta", flat, f"{nested!r} as in {name}, or absent")
    return float(flat if nested is None else nested)


def _check_kind(section_name: str, kind: str, given: dict[str, Any], head_dim: int) -> None:
    def require(name: str, ok: bool, allowed: str) -> None:
        if not ok:
            refuse(f"{section_name}.{name}", given.get(name), allowed)

    require("partial_rotary_factor", given.get("partial_rotary_factor", 1) == 1, "1.0 or absent")
    require("attention_factor", "attention_factor" not in given, "absent")
    require("truncate", given.get("truncate", True) is True, "true or absent")
    for name in _NEEDED[kind]:
        if name in ("short_factor", "long_factor"):
            allowed = f"a list of {head_dim // 2} numbers above 0"
            require(name, _is_factors(given.get(name), head_dim // 2), allowed)
        elif name == "factor":
            require(name, is_number(given.get(name), 1, _MOST), f"a number from 1 to {_MOST}")
        else:
            require(name, is_integer(given.get(name), 2), f"an integer from 2 on for {kind!r}")
    for name in _POSITIVE:
        value = given.get(name, 1)
        require(name, is_positive(value) and value <= _MOST, f"above 0 and at most {_MOST}")
    require("mscale_all_dim", is_number(given.get("mscale_all_dim", 0), 0, _MOST), "0 or more")
    if kind == "llama3":
        low, high = given.get("low_freq_factor", 1), given.get("high_freq_factor", 4)
        require("high_freq_factor", high > low, f"above low_freq_factor {low}")


def _is_factors(value: Any, size: int) -> bool:
    return isinstance(value, list) and len(value) == size and all(map(is_positive, value))

"""The settings keys of oMLX that matter for DFlash: types, allowed values, first version."""

import ast
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEWEST_OMLX = "0.6.3rc2"
# The first builds that load a DFlash 2 drafter: z-lab's fork, then the mainline.
DFLASH2_OMLX = ("0.6.2-dflash2", "0.6.3rc1")


@dataclass(frozen=True)
class Field:
    """One settings key; `since` is the first version in which it is certain to exist."""

    name: str
    kind: type
    since: str
    choices: tuple[Any, ...] = ()
    minimum: int | None = None
    nullable: bool = False

    def allowed(self) -> str:
        """Words for the values this key may hold."""
        if self.choices:
            words = " or ".join(json.dumps(c) for c in self.choices)
        elif self.kind is bool:
            words = "true or false"
        elif self.kind is int:
            words = f"an integer >= {self.minimum}"
        else:
            words = "an absolute path or a Hugging Face repo id"
        return f"{words}, or no such key" if self.nullable else words


FIELDS: tuple[Field, ...] = (
    Field("dflash_enabled", bool, "0.3.5"),
    Field("dflash_draft_model", str, "0.3.5", nullable=True),
    Field("dflash_draft_quant_enabled", bool, "0.3.9", nullable=True),
    Field("dflash_draft_quant_weight_bits", int, "0.3.9", (2, 4, 8), nullable=True),
    Field("dflash_draft_quant_activation_bits", int, "0.3.9", (16, 32), nullable=True),
    Field("dflash_draft_quant_group_size", int, "0.3.9", (32, 64, 128), nullable=True),
    Field("dflash_block_size", int, "0.6.2-dflash2", minimum=1, nullable=True),
    Field(
        "dflash_verify_mode",
        str,
        "0.6.2",
        ("dflash", "adaptive", "ddtree", "off"),
        nullable=True,
    ),
    # In the file 0 is not "unlimited": it sends every prompt to the ordinary engine.
    Field("dflash_max_ctx", int, "0.3.9.dev1", minimum=1, nullable=True),
    Field("dflash_in_memory_cache", bool, "0.3.9.dev1"),
    Field("dflash_in_memory_cache_max_entries", int, "0.3.9", minimum=1),
    Field("dflash_in_memory_cache_max_bytes", int, "0.3.9", minimum=0),
    Field("dflash_ssd_cache", bool, "0.3.9"),
    Field("dflash_ssd_cache_max_bytes", int, "0.3.9", minimum=0),
    Field("dflash_draft_window_size", int, "0.6.2", minimum=1, nullable=True),
    Field("dflash_draft_sink_size", int, "0.6.2", minimum=0, nullable=True),
    Field("mtp_enabled", bool, "0.3.9"),
    Field("vlm_mtp_enabled", bool, "0.6.2"),
)

# Keys of other features, named only to tell a key oMLX keeps from one it will delete.
OTHER_KEYS = frozenset(
    """
    active_profile_name chat_template_kwargs description display_name enable_thinking
    force_sampling forced_ct_kwargs guided_grammar guided_grammar_enabled index_cache_freq
    is_default is_favorite is_hidden is_pinned max_context_window max_tokens
    max_tool_result_tokens min_p model_alias model_type_override mtp_fixed_draft_depth
    mtp_num_draft_tokens presence_penalty preserve_thinking reasoning_parser
    repetition_penalty specprefill_draft_model specprefill_enabled specprefill_keep_pct
    specprefill_threshold temperature thinking_budget_enabled thinking_budget_tokens top_k
    top_p trust_remote_code ttl_seconds turboquant_kv_bits turboquant_kv_enabled
    turboquant_skip_last vlm_mtp_draft_block_size vlm_mtp_draft_model vlm_mtp_enabled
    """.split()
)

_STAGES = {".dev": -2, "rc": -1, "": 0, "-dflash": 1}


def find_field(name: str) -> Field:
    """Look up one key.

    Args:
        name (str): The key, such as ``dflash_block_size``.
    Returns:
        Field: Its row in the table.
    Raises:
        ValueError: If the table has no such key.
    """
    for field in FIELDS:
        if field.name == name:
            return field
    names = ", ".join(f.name for f in FIELDS)
    raise ValueError(f"settings key: found {name!r}, allowed: {names}")


def check_value(name: str, value: Any) -> None:
    """Check the type and range of one value; a bool is not an int and 4.0 is not 4.

    Args:
        name (str): The key.
        value (Any): The value as JSON gives it.
    Raises:
        ValueError: If oMLX would misread the value, or the table has no such key.
    """
    field = find_field(name)
    if value is None and field.nullable:
        return
    fits = type(value) is field.kind
    if fits and field.choices:
        fits = value in field.choices
    elif fits and field.minimum is not None:
        fits = value >= field.minimum
    if not fits:
        raise ValueError(f"{name}: found {json.dumps(value)}, allowed: {field.allowed()}")


def parse_version(text: str) -> tuple[int, ...]:
    """Turn an oMLX version into a tuple that sorts in release order.

    Args:
        text (str): Such as ``0.6.3rc1``, ``0.3.9.dev1``, ``0.6.2-dflash2`` or ``0.6.4``.
    Returns:
        tuple: Comparable with the result for any other version.
    Raises:
        ValueError: If the text is not an oMLX version.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:(\.dev|rc|-dflash)(\d+))?", text)
    if match is None:
        raise ValueError(
            f"omlx_version: found {text!r}, allowed: a version such as {NEWEST_OMLX!r}"
        )
    major, minor, patch, stage, serial = match.groups()
    return int(major), int(minor), int(patch), _STAGES[stage or ""], int(serial or 0)


def known_fields(omlx_version: str = NEWEST_OMLX) -> frozenset[str]:
    """Name the keys of the table that a version of oMLX knows.

    Args:
        omlx_version (str): The version. Default: the newest one this table covers.
    Returns:
        frozenset: Key names.
    Raises:
        ValueError: If the version cannot be read.
    """
    version = parse_version(omlx_version)
    return frozenset(f.name for f in FIELDS if parse_version(f.since) <= version)


def installed_fields() -> frozenset[str] | None:
    """Read the settings keys of an importable `omlx` package from its source, without running it.

    Returns:
        frozenset or None: Every key of its ``ModelSettings``, or None without such a package.
    """
    spec = importlib.util.find_spec("omlx")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "model_settings.py"
        if source.is_file():
            return dataclass_fields(source.read_text(encoding="utf-8"))
    return None


def dataclass_fields(source: str) -> frozenset[str] | None:
    """List the annotated names of the class ``ModelSettings`` in Python source.

    Args:
        source (str): The text of a module.
    Returns:
        frozenset or None: The names, or None if there is no such class to read.
    """
    try:
        module = ast.parse(source)
    except SyntaxError:  # written for a newer Python
        return None
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == "ModelSettings":
            names = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
            return frozenset(n.id for n in names if isinstance(n, ast.Name))
    return None

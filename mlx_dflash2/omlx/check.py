"""Would oMLX run DFlash with a target, a drafter and settings, and if not, why not."""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from .change import Entry, Models, entry_warnings
from .locate import ListedModel, OmlxVersion, find_drafter
from .log import LoggedModel
from .settings import check_draft_reference, chip_generation, refusals, value_problems

_TARGET_TYPES = "gemma4, gemma4_text, gemma4_unified, laguna, muse_glimmer, muse_glimmer_text"
# A drafter with a head or an embedding of its own is refused by oMLX's runtime.
_FOREIGN_TENSORS = ("lm_head.", "embed_tokens.", "model.lm_head.", "model.embed_tokens.")


class FittingPair(NamedTuple):
    """What the settings depend on, read from two model folders that fit each other."""

    model_type: str
    block_size: int
    target_quantized: bool
    drafter_quantized: bool
    drafter_rows: tuple[int, ...]


def check_pair(target: Path, drafter: Path, hashes: bool = True) -> FittingPair:
    """Check two model folders with the code that binds them for decoding, and with oMLX's rules.

    ``hashes`` compares the drafter's files with the hub's hashes, which reads all of them.
    """
    # These start MLX, which no other part of the command needs.
    from ..checkpoint.files import read_config, read_headers, weight_files
    from ..pairs.find import find_pair

    config = read_config(target)
    model_type = str(config.get("model_type"))
    if "qwen" not in model_type and model_type not in _TARGET_TYPES.split(", "):
        allowed = f"a Qwen type, {_TARGET_TYPES}"
        raise ValueError(f"target model_type: found {model_type!r}, allowed: {allowed}")
    sources = find_pair(target, drafter)
    args, drafter_config = sources.drafter.args, sources.drafter.config
    found = drafter_config.get("architectures") or []
    if "DFlash2DraftModel" not in found:
        raise ValueError(f"drafter architectures: found {found!r}, allowed: ['DFlash2DraftModel']")
    read_headers(weight_files(target))
    files = weight_files(drafter)
    for name in read_headers(files):
        if name.startswith(_FOREIGN_TENSORS):
            raise ValueError(f"drafter tensor: found {name!r}, allowed: no head or embedding")
    for file in files if hashes else ():
        check_hash(file)
    attention, taps = args.num_attention_heads * args.head_dim, len(args.target_layer_ids)
    rows = (args.hidden_size, args.intermediate_size, attention, taps * args.hidden_size)
    stored, drafter_stored = (
        bool(side.get("quantization") or side.get("quantization_config"))
        for side in (config, sources.drafter.config)
    )
    return FittingPair(model_type, args.block_size, stored, drafter_stored, rows)


def check_hash(file: Path) -> None:
    """Compare a weight file with the hash that the hub gave for it, where the download kept it."""
    blob = file.resolve()
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    lines = note.read_text(encoding="utf-8").split("\n") if note.is_file() else []
    published = blob.name if blob.parent.name == "blobs" else "".join(lines[1:2]).strip()
    if re.fullmatch(r"[0-9a-f]{64}", published):
        with open(file, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != published:
            allowed = f"{published[:12]} as published; download it again"
            raise ValueError(f"drafter file {file}: found sha256 {found[:12]}, allowed: {allowed}")


def check_entry(entry: Entry, pair: FittingPair) -> None:
    """Refuse settings that do not suit the drafter: its block, and how it is quantized."""
    size, group = entry.get("dflash_block_size"), entry.get("dflash_draft_quant_group_size")
    if type(size) is int and size > pair.block_size:
        allowed = f"2 to {pair.block_size}, the drafter's own"
        raise ValueError(f"dflash_block_size: found {size}, allowed: {allowed}")
    quantizes = entry.get("dflash_draft_quant_enabled")
    if quantizes and pair.drafter_quantized:
        allowed = "false, the drafter is quantized already"
        raise ValueError(f"dflash_draft_quant_enabled: found true, allowed: {allowed}")
    group = 64 if group is None else group
    # The check of single values names what is not a size at all.
    odd = [row for row in pair.drafter_rows if type(group) is int and group > 0 and row % group]
    if quantizes and odd:
        allowed = f"a divisor of the drafter's row lengths, such as {odd[0]}"
        raise ValueError(f"dflash_draft_quant_group_size: found {group}, allowed: {allowed}")


def check_settings(
    models: Models,
    target: ListedModel,
    omlx: OmlxVersion,
    *,
    drafter: Path | None = None,
    chip: str | None = None,
    hashes: bool = True,
) -> tuple[list[str], list[str]]:
    """List what keeps DFlash from running with the settings of a model, and what may surprise.

    ``drafter`` is the one that is meant, by default that of the settings.
    """
    model_id, model_type = target.model_id, ""
    if model_id not in models:
        near = [k for k in models if re.split("--|/", k)[-1] == model_id.split("--")[-1]]
        near += [k for k, entry in models.items() if entry.get("model_alias") == model_id]
        hint = f"; oMLX does not look under {near[0]!r}" if near else ""
        return [f"models: no entry {model_id!r}{hint}"], []
    entry = models[model_id]
    problems = refusals(entry) + value_problems(entry)
    notes = [*filter(None, [target.note]), *entry_warnings(models, model_id)]
    if not entry.get("dflash_enabled"):
        problems.append("dflash_enabled: found false, allowed: true")
    try:
        omlx.check()
        reference = str(entry.get("dflash_draft_model") or "")
        check_draft_reference(reference)
        folder = find_drafter(reference)
        notes += [] if reference[0] == "/" else [f"{reference}: a path does not need the network"]
        if drafter is not None and not folder.samefile(drafter):
            raise ValueError(f"dflash_draft_model: found {reference!r}, allowed: '{drafter}'")
        if target.folder is None:
            raise ValueError(f"target: {model_id} is not below oMLX's model directories")
        pair = check_pair(target.folder, folder, hashes)
        model_type = pair.model_type
        check_entry(entry, pair)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    bits = entry.get("dflash_draft_quant_activation_bits")
    sixteen = entry.get("dflash_draft_quant_enabled") and bits != 32
    if sixteen and not omlx.drafts_batched(model_type):
        allowed = "32 on M1 and M2, else nearly every draft is rejected"
        line = f"dflash_draft_quant_activation_bits: found {json.dumps(bits)}, allowed: {allowed}"
        notes += [line] if chip is None else []
        problems += [line] if chip is not None and chip_generation(chip) <= 2 else []
    return problems, notes + omlx.notes(entry, model_type)


def status_row(
    models: Models, target: ListedModel, log: LoggedModel, omlx: OmlxVersion, chip: str | None
) -> tuple[str, str, str, str, str, str]:
    """Tell of a model: DFlash, drafter, quantization, acceptance, and what is to do."""
    entry = models.get(target.model_id, {})
    if not entry.get("dflash_enabled"):
        return target.model_id, "off", "", "", "", (*refusals(entry), "")[0]
    problems, _ = check_settings(models, target, omlx, chip=chip, hashes=False)
    bits, group = (entry.get(f"dflash_draft_quant_{key}") for key in ("weight_bits", "group_size"))
    quant = f"{bits or 4} bits, group {group or 64}"
    quant = quant if entry.get("dflash_draft_quant_enabled") else "as stored"
    share = "" if log.acceptance is None else f"{log.acceptance:.1f} %"
    drafter = Path(str(entry.get("dflash_draft_model"))).name
    todo = (*problems, "" if log.ran else log.verdict)[0]
    return target.model_id, "on", drafter, quant, share, todo

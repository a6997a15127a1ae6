"""Would oMLX run DFlash with the settings it has, and if not, why not."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .entry import entry_problems, entry_warnings
from .fields import known_fields
from .fit import Pair, check_pair, check_quant
from .locate import Target, find_drafter
from .settings import QUANTIZED_BLOCK_SIZE, check_draft_reference, chip_generation, is_repo_id


@dataclass
class Report:
    """What would run, what stands in the way, and what may surprise."""

    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_settings(
    models: Mapping[str, Mapping[str, Any]],
    target: Target,
    drafter: Path | None = None,
    *,
    chip: str | None = None,
    known: Collection[str] | None = None,
    all_known: Collection[str] | None = None,
) -> Report:
    """Check the settings of one model against its folder and its drafter.

    Args:
        models (dict): The settings of all models.
        target (Target): The model.
        drafter (Path, optional): The drafter that is meant. Default: the one in the settings.
        chip (str, optional): The server's chip, if known.
        known (collection, optional): DFlash keys that this oMLX knows. Default: those of the
            newest version in the field table.
        all_known (collection, optional): All keys it knows, if that is certain.
    Returns:
        Report: Without problems, DFlash would run.
    """
    report = Report(warnings=list(target.warnings))
    entry = models.get(target.model_id)
    if entry is None:
        report.problems.append(_no_entry(models, target.model_id))
        return report
    report.problems += entry_problems(entry)
    report.warnings += entry_warnings(models, target.model_id, all_known)
    if entry.get("dflash_enabled") is not True:
        found = json.dumps(entry.get("dflash_enabled"))
        report.problems.append(f"dflash_enabled: found {found}, allowed: true")
    if "dflash_block_size" not in (known_fields() if known is None else known):
        report.problems.append("this oMLX knows no dflash_block_size: it is too old for DFlash 2")
    pair = _check_drafter(report, entry.get("dflash_draft_model"), target, drafter)
    if pair is not None:
        try:
            check_quant(entry, pair)
        except ValueError as error:
            report.problems.append(str(error))
        _check_block(report, entry.get("dflash_block_size"), pair)
    _check_chip(report, entry, chip)
    return report


def _no_entry(models: Mapping[str, Any], model_id: str) -> str:
    near = [k for k in models if k.replace("--", "/").split("/")[-1] == model_id.split("--")[-1]]
    aliased = [k for k, entry in models.items() if entry.get("model_alias") == model_id]
    hint = f"; the file has {near[0]!r}, which oMLX does not find" if near else ""
    hint = f"; it is the alias of {aliased[0]!r}" if aliased else hint
    return f"models: no entry {model_id!r}{hint}"


def _check_drafter(
    report: Report, reference: Any, target: Target, drafter: Path | None
) -> Pair | None:
    if not isinstance(reference, str):
        report.problems.append("dflash_draft_model: found no such key, allowed: a drafter")
        return None
    try:
        check_draft_reference(reference)
        if is_repo_id(reference):
            report.warnings.append(
                f"dflash_draft_model is a repo id: without network and hub cache {reference} "
                "falls back in silence; an absolute path is safer"
            )
        folder = find_drafter(reference)
        if drafter is not None and not folder.samefile(drafter):
            raise ValueError(f"dflash_draft_model: found {reference!r}, allowed: '{drafter}'")
        pair = check_pair(target.folder, folder)
    except (ValueError, OSError) as error:
        report.problems.append(str(error))
        return None
    report.facts.append(f"drafter {folder} fits {target.folder}, block size {pair.block_size}")
    return pair


def _check_block(report: Report, block_size: Any, pair: Pair) -> None:
    if type(block_size) is not int:
        return
    if block_size > pair.block_size:
        report.problems.append(
            f"dflash_block_size: found {block_size}, allowed: 2 to {pair.block_size}, the "
            "drafter's own"
        )
    elif pair.target_quantized and block_size > QUANTIZED_BLOCK_SIZE:
        report.warnings.append(
            f"dflash_block_size is {block_size}: above {QUANTIZED_BLOCK_SIZE} a quantised target "
            "verifies slower"
        )


def _check_chip(report: Report, entry: Mapping[str, Any], chip: str | None) -> None:
    bits = entry.get("dflash_draft_quant_activation_bits")
    if not entry.get("dflash_draft_quant_enabled") or bits == 32:
        return
    if chip is None:
        report.warnings.append("the chip is not known: on M1 and M2 activation bits must be 32")
    elif chip_generation(chip) <= 2:
        report.problems.append(
            f"dflash_draft_quant_activation_bits: found {json.dumps(bits)}, allowed: 32 on {chip} "
            "(else nearly every draft is rejected)"
        )

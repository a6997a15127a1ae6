"""Recognize known pairs of target and drafter by name.

A name is known if it is the published one plus words that only say how the weights are stored,
whoever publishes it: ``Qwen3.8-27B``, ``Qwen3.8-27B-4bit``, ``Qwen3.8-27B-MLX-8bit``,
``Qwen3.8-27B-4bit-DWQ``. A name with any other word does not match, as the word may stand for
other weights: ``Qwen3-4B-Instruct-2507``.
"""

import os
import re
from pathlib import Path

DRAFTERS = {
    "Qwen3.8-27B": "z-lab/Qwen3.8-27B-DFlash2",
    "Muse-Glimmer-30B": "z-lab/Muse-Glimmer-30B-DFlash2",
    "Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
    "Qwen3.6-35B-A3B": "z-lab/Qwen3.6-35B-A3B-DFlash",
    "Qwen3.5-397B-A17B": "z-lab/Qwen3.5-397B-A17B-DFlash",
    "Qwen3.5-122B-A10B": "z-lab/Qwen3.5-122B-A10B-DFlash",
    "Qwen3.5-35B-A3B": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "Qwen3.5-27B": "z-lab/Qwen3.5-27B-DFlash",
    "Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
    "Qwen3.5-4B": "z-lab/Qwen3.5-4B-DFlash",
    "Qwen3-Coder-Next": "z-lab/Qwen3-Coder-Next-DFlash",
    "Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
    "gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    "gemma-4-31B-it": "z-lab/gemma-4-31B-it-DFlash",
    "gemma-4-26B-A4B-it": "z-lab/gemma-4-26B-A4B-it-DFlash",
    "gemma-4-12B-it": "z-lab/gemma4-12B-it-DFlash",
    "Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
}
# Published pairs whose target mlx-lm cannot run.
UNRUNNABLE = {"GLM-5.3-Flash": "incoai/GLM-5.3-Flash-DFlash2"}

_STORAGE_WORD = (
    r"mlx|quant(?:ized)?|affine|mixed(?:[-_]\d+)*|(?:\d+(?:\.\d+)?[-_]?)?bits?|[qw]\d+(?:a\d+)?"
    r"|int\d+|bf16|fp?16|fp?32|bfloat16|float16|float32|(?:mx|nv)?fp[468]"
    r"|autoround|auto-round|oq\d+(?:\.\d+)?[a-z]?|unsloth|ud|bnb|awq|gptq|dwq(?:[-_]v?\d+)?|gs?\d+|group[-_]?\d+"
)
_STORAGE = re.compile(rf"(?:[-_.](?:{_STORAGE_WORD}))*", re.IGNORECASE)


def default_drafter(path_or_hf_repo: str | Path) -> str:
    """Return the repository of the drafter that was published for a target.

    Args:
        path_or_hf_repo (str or Path): The target's folder or repository; only its name counts.

    Raises:
        ValueError: if no drafter is known, or mlx-lm cannot run the target.
    """
    name = model_name(path_or_hf_repo)
    for target, drafter in DRAFTERS.items():
        if _is_called(name, target):
            return drafter
    for target, drafter in UNRUNNABLE.items():
        if _is_called(name, target):
            raise ValueError(
                f"{target} has a published drafter, {drafter}, but mlx-lm 0.32 has no model file "
                f"for {target} itself, so the pair cannot run."
            )
    raise ValueError(
        f"No drafter is known for {path_or_hf_repo}; give a draft model. Known targets, in any "
        f"quantization: {', '.join(DRAFTERS)}."
    )


def known_target(drafter: str | Path) -> str | None:
    """Return the target that a known drafter was made for; ``None`` for any other drafter."""
    name = model_name(drafter)
    for target, repo in (DRAFTERS | UNRUNNABLE).items():
        if _is_called(name, model_name(repo)):
            return target
    return None


def mismatch_note(model: str | Path, drafter: str | Path) -> str | None:
    """Warn, in one line, that a known drafter was made for a target of another name.

    Args:
        model (str or Path): The target's folder or repository.
        drafter (str or Path): The drafter's folder or repository.

    Returns:
        str or None: ``None`` if there is nothing to warn of.
    """
    target = known_target(drafter)
    if target is None or _is_called(model_name(model), target):
        return None
    return (
        f"{drafter} was made for {target}, but the model is {model}: the output stays exact, but "
        "fewer drafts may be accepted."
    )


def model_name(path_or_hf_repo: str | Path) -> str:
    """Return a model's name without its organization, also for a folder of the hub's cache."""
    path = Path(path_or_hf_repo).expanduser()
    parts = Path(os.path.abspath(path)).parts if path.exists() else path.parts
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.rsplit("--", 1)[-1]
    return parts[-1] if parts else ""


def _is_called(name: str, known: str) -> bool:
    # Meta puts its own name first, or not.
    name = re.sub("^meta-(?=llama-)", "", name, flags=re.IGNORECASE)
    start, rest = name[: len(known)], name[len(known) :]
    return start.lower() == known.lower() and _STORAGE.fullmatch(rest) is not None

"""Build and decode the published size with random weights: Qwen3.8-27B in 4 bits.

    python tools/full_size.py

It needs 24 GB of memory and, on two CPU cores, about half an hour; nothing is downloaded.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from mlx_dflash2.checkpoint.tensors import quantize
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.doctor.counted_reads import counted_bytes
from mlx_dflash2.doctor.plan import Plan
from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.evaluation.machine import environment, num_bytes
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets import bind

RESULTS = Path(__file__).parents[1] / "examples" / "results"

QWEN3_8_27B = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    },
}
QWEN3_8_27B_DRAFTER = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "num_target_layers": 64,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {
        "block_size": 8,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "mask_token_id": 248070,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
BITS, GROUP_SIZE = 4, 64


def build_target(config: dict[str, Any]) -> nn.Module:
    """A target in 4 bits with random weights and float32 scales, which the CPU kernels can use.

    The packed numbers are drawn as they are: no weight is ever unpacked, and no more than one
    module's is in the making.
    """
    architecture = import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=GROUP_SIZE, bits=BITS)
    return fill(model)


def build_drafter(config: dict[str, Any]) -> Drafter:
    """A drafter with random weights, its large matrices in 4 bits."""
    drafter = Drafter(DrafterArgs.from_dict(config))
    quantize(drafter, BITS, GROUP_SIZE)
    return fill(drafter)


def fill(model: nn.Module) -> nn.Module:
    """Give a model random weights of its own shapes, module by module."""
    for _, module in model.named_modules():
        own = {name: value for name, value in module.items() if isinstance(value, mx.array)}
        width = own["weight"].shape[-1] if "weight" in own else 1
        if "scales" in own:
            width = width * 32 // module.bits
        for name in own:
            own[name] = _random(name, own[name], width)
        module.update(own)
        mx.eval(module.parameters())
    model.eval()
    return model


def _random(name: str, like: mx.array, width: int) -> mx.array:
    """Numbers that keep a row's size: weights of deviation ``width ** -0.5``, norms of one."""
    if like.dtype == mx.uint32:
        # Drawn in halves: a whole one goes through a float and has no low bits.
        high, low = (mx.random.randint(0, 2**16, like.shape, mx.uint32) for _ in range(2))
        return high << 16 | low
    # Sixteen equally likely steps have a deviation of 4.6 and a mean of 7.5.
    step = width**-0.5 / 4.6
    if name == "scales":
        return mx.full(like.shape, step)
    if name == "biases":
        return mx.full(like.shape, -7.5 * step)
    if like.ndim == 1:
        return mx.ones(like.shape) if name == "weight" else mx.zeros(like.shape)
    return mx.random.normal(like.shape) * like.shape[-1] ** -0.5


def run(
    target_config: dict[str, Any],
    drafter_config: dict[str, Any],
    prompt: list[int],
    rounds: int = 2,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Build a pair, decode through the ordinary loop, and compare with plain mlx-lm.

    Args:
        target_config, drafter_config (dict): As their config.json.
        prompt (list of int): A few token ids.
        rounds (int): Rounds to run; random drafts are hardly ever accepted.
        say (callable): Told what is going on.

    Returns:
        dict: Sizes and seconds, the estimate of a round's bytes, and the tokens of both ways.
    """
    mx.random.seed(0)
    mx.reset_peak_memory()
    start = time.perf_counter()
    model, drafter = build_target(target_config), build_drafter(drafter_config)
    mx.clear_cache()
    results = {
        "environment": environment(),
        "build_seconds": time.perf_counter() - start,
        "memory": mx.get_active_memory(),
        "target_bytes": num_bytes(model),
        "drafter_parameters": count_parameters(drafter_config),
        "drafter_tensors": len(tree_flatten(Drafter(drafter.args).parameters())),
    }
    say(f"built in {results['build_seconds']:.0f} s, {results['memory'] / 1e9:.2f} GB")
    stats, start = Stats(), time.perf_counter()
    tokens = _decode(model, drafter, prompt, rounds, stats, say)
    results |= {"seconds": time.perf_counter() - start, "rounds": stats.rounds}
    results |= {"drafted": stats.drafted, "accepted": stats.accepted}
    steps = generate_step(mx.array(prompt), model, max_tokens=len(tokens))
    plain = [token for token, _ in steps]
    device = "cpu" if mx.default_device() == mx.cpu else "gpu"
    plan = Plan(bind(model), drafter, device)
    return results | {
        "peak_memory": mx.get_peak_memory(),
        "round_bytes_estimated": plan.round(drafter.block_size, len(prompt)).weights,
        "round_bytes_read": counted_bytes(model, drafter, prompt, drafter.block_size),
        "tokens": tokens,
        "plain_tokens": plain,
        "equal": tokens == plain,
    }


def _decode(
    model: nn.Module,
    drafter: Drafter,
    prompt: list[int],
    rounds: int,
    stats: Stats,
    say: Callable[[str], None],
) -> list[int]:
    """The tokens of the prompt's pass and of some whole rounds."""
    tokens, own, start = [], 0, time.perf_counter()
    # A given width is not adapted: on this machine drafting would be switched off.
    width = drafter.block_size
    steps = dflash_generate_step(
        mx.array(prompt),
        model,
        drafter,
        max_tokens=(rounds + 1) * width,
        verify_width=width,
        stats=stats,
    )
    with closing(steps):
        for token, _, from_draft in steps:
            tokens.append(token)
            # Every pass ends with a token of the target's own.
            own += not from_draft
            say(f"token {token} after {time.perf_counter() - start:.0f} s")
            if own == 1 + rounds:
                break
    return tokens


def count_parameters(drafter_config: dict[str, Any]) -> int:
    """Numbers in a drafter's checkpoint, before any quantization."""
    drafter = Drafter(DrafterArgs.from_dict(drafter_config))
    return sum(value.size for _, value in tree_flatten(drafter.parameters()))


def main(folder: Path = RESULTS, prompt: Sequence[int] = (9707, 11, 1879)) -> None:
    """Run the published pair for two rounds and write ``full_size.json`` to a folder."""
    results = run(QWEN3_8_27B, QWEN3_8_27B_DRAFTER, prompt=list(prompt), rounds=2)
    path = folder / "full_size.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"peak memory {results['peak_memory'] / 1e9:.2f} GB")
    print(f"a round reads {results['round_bytes_read'] / 1e9:.3f} GB of weights", end=", ")
    print(f"estimated {results['round_bytes_estimated'] / 1e9:.3f} GB")
    print(f"tokens {results['tokens']}, equal to plain decoding's: {results['equal']}")


if __name__ == "__main__":
    main()

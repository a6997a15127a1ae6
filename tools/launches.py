"""Counts what a Mac would launch for one draft cycle, from the graph that MLX records.

    python tools/launches.py

No Metal is needed: while a function is exported a custom kernel is one primitive. Views launch
nothing and do not count; a copy that a kernel makes of an input that is not contiguous does not
show. Fails if a figure has grown past the recorded one.
"""

import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

from mlx_dflash2.decode.judge import Judge
from mlx_dflash2.drafter import model as drafter_module
from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.context import DrafterContext
from mlx_dflash2.drafter.model import Drafter, Proposal
from mlx_dflash2.kernels import _common

# Launches by phase, with the kernels and with the plain forms.
RECORDED = {
    "context": (32, 32),
    "layers": (108, 358),
    "head": (2, 2),
    "selector": (6, 85),
    "acceptance": (15, 15),
}
# More than these would be felt: each launch costs the GPU a gap of a few microseconds.
LIMITS = {"draft": 150, "selector": 6, "acceptance": 15}

VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Reshape", "Slice",
    "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip
BLOCK, TAPS, VOCAB, WINDOW = 8, 5, 20000, 2048
CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "is_causal": False,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": WINDOW,
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {
        "block_size": BLOCK,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "mask_token_id": 7,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}


class _Counted(Exception):
    """Ends an export once its graph has been seen: compiled parts cannot be written to a file."""


def count(phase: Callable, *inputs: mx.array) -> Counter:
    """The primitives that launch something when ``phase(*inputs)`` is computed."""
    graph = io.StringIO()

    def traced(*arrays: mx.array):
        mx.export_to_dot(graph, phase(*arrays))
        raise _Counted

    mx.eval(inputs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mx.export_function(str(Path(folder) / "phase.mlxfn"), traced, *inputs)
        except _Counted:
            pass
    names = re.findall(r'label ="([^"]*)", shape=rectangle', graph.getvalue())
    return Counter(name for name in names if name.split()[0] not in VIEWS)


def stand_in(name: str) -> Callable:
    """One launch in the place of an operation that MLX's CPU backend spells out."""

    def launch(x: mx.array, *others, **options) -> mx.array:
        inputs = [y for y in (x, *others, *options.values()) if isinstance(y, mx.array)]
        kernel = mx.fast.metal_kernel(
            name=name,
            input_names=[f"x{i}" for i in range(len(inputs))],
            output_names=["out"],
            source="out[thread_position_in_grid.x] = x0[0];",
        )
        return kernel(
            inputs=inputs,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )[0]

    return launch


def full_context(drafter: Drafter) -> DrafterContext:
    """A context as it is in the middle of a long text: every window full, masks known."""
    context, args = drafter.make_context(), drafter.args
    rows = mx.zeros((1, args.num_key_value_heads, WINDOW, args.head_dim), mx.bfloat16)
    for index, layer in enumerate(drafter.layers):
        context.layers[index].append(rows, rows)
        mask = context.mask(index, BLOCK, layer.self_attn.window, layer.self_attn.causal)
        mx.eval(mask)
    context.offset = WINDOW
    mx.eval(context.state)
    return context


def phases() -> dict[str, Counter]:
    """Launches of each phase of one cycle of a drafter of real depth."""
    drafter = Drafter(DrafterArgs.from_dict(CONFIG))
    drafter.set_dtype(mx.bfloat16)
    drafter.eval()
    H, L = drafter.args.hidden_size, BLOCK - 1
    taps = mx.zeros((1, 4, TAPS * H), mx.bfloat16)
    head = mx.zeros((VOCAB, H), mx.bfloat16)
    mx.eval(drafter.parameters(), head)
    rows = mx.zeros((1, BLOCK, H), mx.bfloat16)
    logits, anchor = mx.zeros((1, L, VOCAB), mx.bfloat16), mx.zeros((1,), mx.uint32)
    selector = drafter.candidate_selector

    def extend(new: mx.array) -> list[mx.array]:
        context = full_context(drafter)
        drafter.extend(context, None, new, context.offset)
        return context.state

    def select(anchor: mx.array, hidden: mx.array, logits: mx.array) -> list[mx.array]:
        proposal = drafter.choose(anchor, hidden, logits)[0]
        return [proposal.tokens, proposal.finite]

    def accept(tokens: mx.array, finite: mx.array, logits: mx.array) -> list[mx.array]:
        return [Judge().at_once(Proposal(tokens, finite), logits, None)[0]]

    gate = count(selector.hidden_projection, rows[:, 1:])
    counted = {
        "layers": count(lambda x: drafter(x, full_context(drafter)), rows),
        "context": count(extend, taps),
        "head": count(lambda x: x @ head.T, rows[:, 1:]) + gate,
        "selector": count(select, anchor, rows[:, 1:], logits) - gate,
        "acceptance": count(
            accept, mx.zeros((L,), mx.uint32), mx.array(True), mx.zeros((BLOCK, VOCAB))
        ),
    }
    return {name: counted[name] for name in RECORDED}


def measure(with_kernels: bool) -> dict[str, Counter]:
    """Launches by phase, as if every kernel could be launched here, or none."""
    runs = patch.object(_common.KernelSet, "runs", lambda *_: with_kernels)
    with ExitStack() as stack:
        stack.enter_context(runs)
        for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(patch.object(mx.fast, name, stand_in(name)))
        stack.enter_context(patch.object(drafter_module, "swiglu", stand_in("swiglu")))
        return phases()


def problems(kernels: dict[str, int], plain: dict[str, int]) -> list[str]:
    """What has grown past the record or the limits."""
    found = []
    for phase, recorded in RECORDED.items():
        for what, now, before in zip(
            ("kernels", "plain forms"), (kernels[phase], plain[phase]), recorded, strict=True
        ):
            if now > before:
                found.append(f"{phase} with {what}: {now} launches, {before} recorded")
    drafting = sum(n for phase, n in kernels.items() if phase != "acceptance")
    for phase, limit in LIMITS.items():
        now = drafting if phase == "draft" else kernels[phase]
        if now > limit:
            found.append(f"{phase}: {now} launches, {limit} allowed")
    return found


def main():
    both = [measure(with_kernels) for with_kernels in (True, False)]
    kernels, plain = ({name: c.total() for name, c in one.items()} for one in both)
    print(f"{'phase':<12} {'kernels':>8} {'plain':>8}   most frequent with kernels")
    for phase, counter in both[0].items():
        common = ", ".join(f"{name} {n}" for name, n in counter.most_common(6))
        print(f"{phase:<12} {kernels[phase]:>8} {plain[phase]:>8}   {common}")
    print(f"{'all':<12} {sum(kernels.values()):>8} {sum(plain.values()):>8}")
    found = problems(kernels, plain)
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

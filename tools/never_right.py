"""Measure what drafting costs where no draft is ever right, against plain mlx-lm.

    python tools/never_right.py [--packed] [--tokens 200]

Both arms decode the embedded target, a few tokens of each in turn, so that other work on the
machine slows both alike. The target is in float32 on the fast BLAS, or as it is stored, in 4 bits,
on MLX's own.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

from mlx_dflash2.blas.load import load_fast_blas

PIECE = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packed", action="store_true", help="4 bits, on MLX's own BLAS")
    parser.add_argument("--tokens", type=int, default=200)
    return parser.parse_args()


def timed(
    arms: dict[str, Iterable[Any]], tokens: int, finish: Callable[[], None]
) -> dict[str, float]:
    """Seconds that each arm takes for so many tokens after its first.

    ``finish`` waits for what an arm has begun of its next token: no arm pays for another one.
    """
    steps = {name: iter(arm) for name, arm in arms.items()}
    for arm in steps.values():
        next(arm)
        finish()
    seconds = dict.fromkeys(arms, 0.0)
    for _ in range(tokens // PIECE):
        for name, arm in steps.items():
            start = time.perf_counter()
            list(islice(arm, PIECE))
            finish()
            seconds[name] += time.perf_counter() - start
    return seconds


def main(args: argparse.Namespace) -> None:
    """Print the ratio of the two times, and what the controller did."""
    # A BLAS counts only if it is loaded before MLX.
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step, generation_stream

    from mlx_dflash2 import Stats, dflash_generate_step, embedded, load_drafter
    from mlx_dflash2.drafter.model import Drafter, Proposal

    class NeverRight(Drafter):
        """The embedded drafter with every draft shifted by one id."""

        def choose(self, *args: Any, **kwargs: Any) -> list[Proposal]:
            proposals = super().choose(*args, **kwargs)
            return [p._replace(tokens=(p.tokens + 1) % self.args.vocab_size) for p in proposals]

    model, tokenizer, *_ = mlx_lm.load(str(embedded.target_path(dense=not args.packed)))
    real = load_drafter(embedded.drafter_path(dense=not args.packed), dtype=mx.float32)
    drafter = NeverRight(real.args)
    drafter.update_modules(real.leaf_modules())
    drafter.eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a long story about a lighthouse keeper."}],
        add_generation_prompt=True,
    )
    count, stats = args.tokens + 1, Stats()
    arms = {
        "plain": generate_step(mx.array(prompt), model, max_tokens=count),
        "drafts": dflash_generate_step(
            mx.array(prompt), model, drafter, max_tokens=count, stats=stats
        ),
    }
    seconds = timed(arms, args.tokens, partial(mx.synchronize, generation_stream))
    print(f"plain {seconds['plain']:.1f} s, drafts {seconds['drafts']:.1f} s for {args.tokens}")
    print(f"ratio {seconds['drafts'] / seconds['plain']:.3f}")
    print(stats.summary())


if __name__ == "__main__":
    options = parse()
    if not options.packed:
        load_fast_blas()
    main(options)

"""Break the decoding loop and the drafter on purpose, and show that the tests notice.

    python tools/mutants.py [NAME ...]

Each mutant changes one line in a copy of the checkout and runs the tests that should turn red.
Fails if one stays green. All of them take about four minutes on two cores.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("mlx_dflash2", "metal", "tests", "tools", "pyproject.toml", "README.md")


class Mutant(NamedTuple):
    """One change: ``old`` stands exactly once in ``file``, below the package."""

    file: str
    old: str
    new: str
    tests: str


LAW = "tests/decode/test_law_of_rounds.py"
MUTANTS = {
    # Random keys
    "one key for the walk and the acceptance": Mutant(
        "decode/judge.py", "_, filter_key, accept_key, draw_key = self._round_keys(self.key)",
        "accept_key, filter_key, _, draw_key = self._round_keys(self.key)", LAW,
    ),
    "one key for filter, acceptance and draw": Mutant(
        "decode/judge.py", "self.key, *self._keys = mx.random.split(key, 5)",
        "self.key, *self._keys = mx.random.split(key, 5); self._keys[1:] = self._keys[1:2] * 3",
        LAW,
    ),
    "the key never moves on": Mutant(
        "decode/judge.py", "self.key, *self._keys = mx.random.split(key, 5)",
        "_, *self._keys = mx.random.split(key, 5)", LAW,
    ),
    # Acceptance
    "drafts without a q count as half certain": Mutant(
        "decode/judge.py", "q = mx.ones(candidates.shape)", "q = mx.ones(candidates.shape) / 2",
        LAW,
    ),
    "the bonus row subtracts the last draft's q": Mutant(
        "decode/accept.py", "q_row = mx.where(row < L, mx.take(q, last, axis=0), 0.0)",
        "q_row = mx.take(q, last, axis=0)", "tests/decode/test_sampling.py",
    ),
    "the residual keeps all of p": Mutant(
        "decode/accept.py", "return mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p)",
        "return p", "tests/decode/test_sampling.py",
    ),
    "a draft stays if p is at all above nothing": Mutant(
        "decode/accept.py", "_leading(uniforms * q_draft < p_draft)", "_leading(p_draft > 0)",
        "tests/decode/test_sampling.py",
    ),
    "greedy drafts after a rejected one count": Mutant(
        "decode/accept.py", "mx.cumprod(agree.astype(mx.int32)).sum()",
        "agree.astype(mx.int32).sum()", "tests/decode/test_accept.py",
    ),
    # Filters
    "XTC ignores its special tokens": Mutant(
        "decode/sampling.py", "mask[..., list(self.xtc_special_tokens)] = False", "pass",
        "tests/decode/test_filters.py",
    ),
    "top-k filters before XTC": Mutant(
        "decode/sampling.py",
        "        if self.xtc_probability > 0.0:\n",
        "        if self.top_k > 0:\n            logprobs = apply_top_k(logprobs, self.top_k)\n"
        "        if self.xtc_probability > 0.0:\n", "tests/decode/test_filters.py",
    ),
    "processors see the drafts of the whole block": Mutant(
        "decode/judge.py",
        "                self._process(logits[i : i + 1], proposal.tokens[:i], history)\n",
        "                self._process(logits[i : i + 1], proposal.tokens, history)\n",
        "tests/decode/test_options.py",
    ),
    # The loop
    "one row too many stays in the caches": Mutant(
        "decode/judge.py", "return 1 + min(self.taken, self.num_accepted)",
        "return 1 + self.num_accepted", "tests/decode/test_state.py",
    ),
    "a last token that is a draft is appended again": Mutant(
        "decode/sequence.py", "if decision.taken == len(decision.tokens) else None",
        "if emitted else None", "tests/decode/test_state.py",
    ),
    "the drafter gets rows one position late": Mutant(
        "decode/loop.py", "positions = [sequence.position for sequence in sequences]",
        "positions = [sequence.position + 1 for sequence in sequences]",
        "tests/decode/test_tokens.py",
    ),
    "a failed pass leaves its rows": Mutant(
        "decode/loop.py", "        transaction.abort()\n        raise", "        raise",
        "tests/decode/batch/test_loop.py",
    ),
    "a cache in use is given to a second generator": Mutant(
        "decode/session.py", "self.caches[:] = [LentCache() for _ in self.working]", "pass",
        "tests/decode/test_cache_in_use.py",
    ),
    "history leaves out the last token": Mutant(
        "decode/sequence.py", "mx.array(emitted, mx.uint32)", "mx.array(emitted[:-1], mx.uint32)",
        "tests/decode/test_options.py",
    ),
    "ids beyond the embedding are embedded": Mutant(
        "decode/loop.py", "(prompt < 0) | (prompt >= vocab_size)", "(prompt < 0)",
        "tests/decode/test_unknown_ids.py",
    ),
    "a drafter never parks": Mutant(
        "decode/controller.py", "if not self.parked and self.drafts > 2 and gain < 1 - MARGIN:",
        "if not self.parked and gain < 0:", "tests/decode/test_controller.py",
    ),
    # Rollback
    "a ring appends its kept rows twice": Mutant(
        "decode/rollback.py", "        self.abort()\n        if keep > 0:",
        "        if keep > 0:", "tests/decode/test_rollback.py",
    ),
    "a recurrent state is replayed one row short": Mutant(
        "decode/rollback.py", "record.replay(keeps[0]) if alone",
        "record.replay(max(1, keeps[0] - 1)) if alone", "tests/decode/test_rollback.py",
    ),
    "a batch's rings keep what was rejected": Mutant(
        "decode/rollback.py", "        if any(surplus):\n", "        if all(surplus):\n",
        "tests/decode/batch/test_rollback.py",
    ),
    "a batch's wrapped ring is masked in its own order": Mutant(
        "decode/rollback.py", "            _put_in_order(cache)\n", "            pass\n",
        "tests/decode/batch/test_rollback.py",
    ),
    # The drafter
    "a context that goes back keeps its rows": Mutant(
        "drafter/context.py", "                layer.drop(self.offset - position)\n",
        "                pass\n", "tests/drafter/test_context_by_hand.py",
    ),
    "a mask is kept when the context grows": Mutant(
        "drafter/context.py", "key = len(self.layers[layer]), block_size, window, causal",
        "key = 0, block_size, window, causal", "tests/drafter/test_context_by_hand.py",
    ),
    "a row beyond the window is seen": Mutant(
        "drafter/context.py", "(rows - keys < window)", "(rows - keys <= window)",
        "tests/drafter/test_context.py",
    ),
    "the residual stream is kept in 16 bits": Mutant(
        "drafter/model.py", "embeddings.astype(mx.float32)", "embeddings.astype(mx.bfloat16)",
        "tests/drafter/test_golden.py",
    ),
    "a padding anchor reads beyond the codebook": Mutant(
        "drafter/selector.py",
        "return self.predecessor_codebook(mx.minimum(ids, self.args.vocab_size - 1))",
        "return self.predecessor_codebook(ids)", "tests/drafter/test_selector.py",
    ),
    "numbers that overflow are not noticed": Mutant(
        "decode/guard.py", "if not finite:", "if False:", "tests/decode/test_fallback.py",
    ),
}  # fmt: skip


def apply(mutant: Mutant, folder: Path) -> str:
    """Change the file of a copy.

    Returns:
        str: What it held before.

    Raises:
        ValueError: if the line is not there exactly once.
    """
    file = folder / "mlx_dflash2" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {text.count(mutant.old)} times: {mutant.old}")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return text


def survives(mutant: Mutant, folder: Path) -> bool:
    """Run a mutant's tests in a copy; true if they stay green."""
    before = apply(mutant, folder)
    try:
        return are_green([mutant.tests], folder)
    finally:
        (folder / "mlx_dflash2" / mutant.file).write_text(before, encoding="utf-8")


def are_green(tests: Sequence[str], folder: Path) -> bool:
    """Run tests in a copy until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"The tests did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main(names: list[str]) -> None:
    """Run the mutants of these names, or all."""
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        sys.exit(f"error: {unknown[0]!r} is not a mutant; there are {', '.join(MUTANTS)}")
    alive = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in PARTS:
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / part)
        names = names or list(MUTANTS)
        # A test that is red without a mutant would be red for each.
        if not are_green(sorted({MUTANTS[name].tests for name in names}), folder):
            sys.exit("error: the tests fail without a mutant")
        for name in tqdm(names, unit="mutant"):
            if survives(MUTANTS[name], folder):
                alive.append(name)
                tqdm.write(f"no test noticed: {name}")
    print(f"{len(names) - len(alive)} of {len(names)} mutants were noticed")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The training loop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn.utils import average_gradients
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..cli.progress import Progress
from ..drafter.model import Drafter
from ..targets import Target
from . import checkpoints
from .batches import Batches
from .log import StepTotals, append, drop_lines
from .objective import Objective
from .processes import any_of, digest, refuse_disagreement
from .start import frozen_parameters
from .vocabulary import Vocabulary


@dataclass(frozen=True)
class Schedule:
    """Steps, rates and precision of a run; a step is an update of the weights.

    Attributes:
        iters: Steps of the whole run.
        learning_rate: After warm-up.
        min_learning_rate: At the end.
        warmup: Share of the steps in which the rate rises.
        weight_decay: AdamW's.
        clip: Largest norm of all gradients together.
        grad_accumulation_steps: Batches per step.
        dtype: Dtype to compute in; weights are kept and updated in float32.
        average: Decay of the running average of the weights, 0 for none.
        seed: Of all random draws.
    """

    iters: int = 1000
    learning_rate: float = 6e-4
    min_learning_rate: float = 0.0
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    grad_accumulation_steps: int = 1
    dtype: str = "float32"
    average: float = 0.0
    seed: int = 0

    def rate(self) -> Callable[[mx.array], mx.array]:
        """Return the learning rate by step: a linear warm-up, then a cosine decay."""
        warm = max(1, round(self.iters * self.warmup))
        top, end = self.learning_rate, self.min_learning_rate
        cosine = optim.cosine_decay(top, max(1, self.iters - warm), end)
        return optim.join_schedules([optim.linear_schedule(top / warm, top, warm), cosine], [warm])


class Diverged(ValueError):
    """The loss or the gradients are not finite."""


class Trainer:
    """A run in progress.

    Args:
        drafter (Drafter): In float32. Its weights are copied, and the copies are trained; the
            drafter itself computes in the schedule's dtype.
        target (Target): Gives embedding and head.
        vocabulary (Vocabulary): The ids that are scored.
        batches (Batches): The batches to train on.
        objective (Objective): The loss.
        schedule (Schedule): Steps, rates and precision.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        vocabulary: Vocabulary,
        batches: Batches,
        objective: Objective,
        schedule: Schedule,
    ) -> None:
        self.drafter, self.target, self.vocabulary = drafter, target, vocabulary
        self.batches, self.objective, self.schedule = batches, objective, schedule
        self.group = mx.distributed.init()
        self.optimizer = optim.AdamW(
            schedule.rate(), weight_decay=schedule.weight_decay, bias_correction=True
        )
        # Modules without parameters are left out, as they are when processes share gradients.
        self.weights: Any = tree_unflatten(tree_flatten(drafter.trainable_parameters()))
        self.optimizer.init(self.weights)
        self.moments = self.optimizer.state
        self.average: Any = self.weights if schedule.average else None
        self.frozen = digest(frozen_parameters(drafter))
        self.done = 0
        self.dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}[schedule.dtype]
        # Frozen weights too: one matrix in float32 makes everything after it float32.
        drafter.update(tree_map(lambda x: x.astype(self.dtype), drafter.parameters()))
        drafter.train()

    @property
    def state(self) -> dict[str, Any]:
        """Everything that a step changes."""
        trees = {"weights": self.weights, "optimizer": self.moments}
        return trees if self.average is None else trees | {"average": self.average}

    def restore(self, saved: checkpoints.Saved) -> None:
        """Resume from a checkpoint, or raise a ``ValueError`` if it is of another drafter."""
        checkpoints.refuse_shapes(saved, self.weights)
        weights = dict(tree_flatten(saved.trees["weights"]))
        # A file does not keep the drafter's order, in which the gradients' norm is summed.
        names = dict(tree_flatten(self.weights))
        self.weights = tree_unflatten([(name, weights[name]) for name in names])
        self.moments = saved.trees["optimizer"]
        if self.average is not None:
            self.average = saved.trees.get("average", self.weights)
        self.done = saved.step

    def step(self) -> dict[str, Any]:
        """Train on the next batches.

        Returns:
            dict: ``loss``, ``norm`` of the gradients, and ``counts`` of the objective.

        Raises:
            Diverged: naming step and batch; the weights are unchanged.
        """
        gradients, first = None, self._first_batch()
        losses, parts = list[mx.array](), list[dict[str, mx.array]]()
        for number in range(first, first + self.schedule.grad_accumulation_steps):
            loss, counts, found = self._gradients(number)
            gradients = found if gradients is None else tree_map(mx.add, gradients, found)
            losses.append(loss)
            parts.append(counts)
            mx.eval(gradients, losses, parts)
        gradients = average_gradients(gradients, self.group)
        gradients = tree_map(lambda g: g / self.schedule.grad_accumulation_steps, gradients)
        gradients, total = optim.clip_grad_norm(gradients, self.schedule.clip)
        norm = cast(float, total.item())
        mean = sum(cast(float, loss.item()) for loss in losses) / len(losses)
        if not math.isfinite(mean) or not math.isfinite(norm):
            raise Diverged(
                f"Step {self.done + 1}, batch {first}: the loss is {mean}, the gradients' norm "
                f"{norm}; lower the learning rate or resume from an earlier checkpoint."
            )
        self._update(gradients)
        counts = tree_map(lambda *numbers: sum(numbers), *parts)
        return {"loss": mean, "norm": norm, "counts": counts}

    def _update(self, gradients: Any) -> None:
        """Update all of the state, or on an interrupt none of it."""
        # The optimizer writes into its state: give it its own containers.
        self.optimizer.state = tree_map(lambda x: x, self.moments)
        weights = self.optimizer.apply_gradients(gradients, self.weights)
        moments, average, done = self.optimizer.state, self.average, self.done + 1
        if average is not None:
            # With the full decay, early averages would mostly be the initial weights.
            decay = min(self.schedule.average, done / (done + 9))
            average = tree_map(lambda a, w: decay * a + (1 - decay) * w, average, weights)
        # Assignments alone: no interrupt can come in between.
        self.weights, self.moments, self.average, self.done = weights, moments, average, done
        mx.eval(self.state)

    def _first_batch(self) -> int:
        return (
            self.done * self.group.size() + self.group.rank()
        ) * self.schedule.grad_accumulation_steps

    def _gradients(self, number: int) -> tuple[mx.array, dict[str, mx.array], Any]:
        batch = self.batches.batch(number)
        key = mx.random.key(self.schedule.seed * 1_000_003 + number)
        vocabulary = self.vocabulary.draw(key)

        def loss_of(weights: Any) -> tuple[mx.array, dict[str, mx.array]]:
            self.drafter.update(tree_map(lambda w: w.astype(self.dtype), weights))
            return self.objective(self.drafter, self.target, vocabulary, batch)

        (loss, counts), gradients = mx.value_and_grad(loss_of)(self.weights)
        return loss, counts, gradients


def fit(
    trainer: Trainer,
    folder: str | Path,
    settings: dict[str, Any],
    *,
    steps_per_report: int = 10,
    save_every: int = 100,
    stop_after: float | None = None,
) -> bool:
    """Train to the end of the schedule, with checkpoints and a log.

    Args:
        trainer (Trainer): New or restored.
        folder (str or Path): For ``checkpoints`` and ``log.jsonl``.
        settings (dict): Kept in the checkpoints.
        steps_per_report, save_every (int): Steps. Default: ``10``, ``100``.
        stop_after (float, optional): Seconds after which to save and stop, in all processes if
            they are over in one. Default: ``None``.

    Returns:
        bool: Whether the schedule's end is reached.

    Raises:
        ValueError: if the processes do not start from the same state.
        Diverged: as :meth:`Trainer.step`; the last good weights are saved.
        KeyboardInterrupt: after saving.
    """
    folder = Path(folder)
    saved_at = -1
    main = trainer.group.rank() == 0
    refuse_disagreement(trainer.done, (trainer.weights, mx.array(trainer.frozen)), trainer.group)

    def save() -> None:
        nonlocal saved_at
        if main and saved_at != trainer.done:
            checkpoints.save(folder / "checkpoints", trainer.done, trainer.state, settings)
        saved_at = trainer.done

    if main:
        drop_lines(folder / "log.jsonl", trainer.done)
    began, totals = time.monotonic(), StepTotals()
    bar = Progress(total=trainer.schedule.iters, initial=trainer.done, desc="fit", disable=not main)
    try:
        while trainer.done < trainer.schedule.iters:
            over = stop_after is not None and time.monotonic() - began > stop_after
            if any_of(over, trainer.group):
                break
            totals.add(trainer.step())
            bar.update()
            if trainer.done % steps_per_report == 0:
                line = totals.line(trainer)
                bar.set_postfix(loss=f"{line['loss']:.3f}", length=f"{line['length']:.2f}")
                if main:
                    append(folder / "log.jsonl", line)
                totals = StepTotals()
            if trainer.done % save_every == 0:
                save()
    finally:
        bar.close()
        save()
    return trainer.done == trainer.schedule.iters


def count_parameters(module: nn.Module) -> int:
    """Count the numbers that are trained."""
    return sum(value.size for value in dict(tree_flatten(module.trainable_parameters())).values())

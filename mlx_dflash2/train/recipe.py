"""How a drafter is trained, as the options say it."""

from argparse import Namespace

from ..drafter.args import DrafterArgs
from ..targets import Target
from .corpus import Corpus
from .objective import Objective
from .trainer import Schedule
from .vocabulary import FullVocabulary, SampledVocabulary, most_frequent


def objective_of(args: Namespace, block_size: int) -> Objective:
    """What is lowered, for a drafter of blocks of so many rows.

    Raises:
        ValueError: if blocks are to be longer in training than when drafting.
    """
    gamma = block_size / 2 if args.gamma is None else args.gamma
    if args.train_block_size is not None and args.train_block_size > block_size:
        raise ValueError(
            f"`train_block_size` is {args.train_block_size} but the drafter's blocks have "
            f"{block_size} rows."
        )
    return Objective(
        loss=args.loss,
        gamma=None if args.d_pace else gamma,
        selector_weight=args.selector_weight,
        detach_selector=args.detach_selector,
        checkpoint=args.grad_checkpoint,
        block_size=args.train_block_size,
    )


def vocabulary_of(
    args: Namespace, target: Target, drafter: DrafterArgs, corpus: Corpus
) -> FullVocabulary | SampledVocabulary:
    """What is scored."""
    vocabulary = FullVocabulary(target, drafter)
    if not args.vocab_sample:
        return vocabulary
    frequent = most_frequent(corpus.tokens, args.vocab_sample, vocabulary.vocab_size)
    return SampledVocabulary(target, drafter, frequent, args.negatives)


def schedule_of(args: Namespace) -> Schedule:
    """Steps, rates and what is computed in."""
    return Schedule(
        iters=args.iters,
        learning_rate=args.learning_rate,
        min_learning_rate=args.min_learning_rate,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        clip=args.clip,
        accumulate=args.grad_accumulation_steps,
        dtype=args.dtype,
        average=args.average,
        seed=args.seed,
    )

"""Make options and pairs of parsed arguments."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.defaults import CPU_PREFILL_STEP_SIZE, PREFILL_STEP_SIZE
from ..decode.options import GenerationOptions, LogitsProcessor
from ..decode.sampling import Sampling, make_logits_processors, make_sampler
from ..kernels import switch_off
from ..kernels.race import race_here
from ..pairs.find import PairSources
from ..pairs.load import Pair, load_pair, pending_downloads
from .console import note
from .dense import check_dense, unpack
from .draft_vocab import frequent_tokens
from .together import ranks

SAMPLING = (
    "temp",
    "top_p",
    "min_p",
    "min_tokens_to_keep",
    "top_k",
    "xtc_probability",
    "xtc_threshold",
)
PROCESSORS = (
    "logit_bias",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
)
OPTIONS = (
    "max_tokens",
    "block_size",
    "verify_width",
    "seed",
    "max_kv_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "stop",
    "check_ranks",
)


def generation_options(args: argparse.Namespace) -> GenerationOptions:
    """Make the options of a generation, before any weights are read.

    Raises:
        ValueError: in one line, naming the option that is out of range.
    """
    return GenerationOptions.for_text(
        sampler=make_sampler(**_named(args, SAMPLING)),
        logits_processors=make_logits_processors(**_named(args, PROCESSORS)),
        prefill_step_size=prefill_step_size(args.prefill_step_size),
        **_named(args, OPTIONS),
    )


def prefill_step_size(given: int | None) -> int:
    """Return how many prompt tokens to process at a time: as given, or as the device needs."""
    if given is not None:
        return given
    return CPU_PREFILL_STEP_SIZE if mx.default_device() == mx.cpu else PREFILL_STEP_SIZE


def fit_to_tokenizer(options: GenerationOptions, tokenizer: TokenizerWrapper) -> GenerationOptions:
    """Add the tokens that XTC sampling spares."""
    sampler = options.sampler
    if isinstance(sampler, Sampling):
        special = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)
        sampler = replace(sampler, xtc_special_tokens=special)
    return replace(options, sampler=sampler)


def make_constraint(
    args: argparse.Namespace, pair: Pair, vocab_size: int
) -> Sequence[LogitsProcessor]:
    """Make the constraint of the arguments, if there is one.

    Args:
        args (argparse.Namespace): With those of :func:`add_grammar_arguments`.
        pair (Pair): The pair.
        vocab_size (int): The target's number of tokens.

    Raises:
        ImportError: if llguidance is not installed.
        ValueError: if the grammar does not compile, or the vocabulary does not fit.
    """
    files = {"json_schema": args.json_schema, "grammar": args.grammar}
    texts = {kind: file.read_text() for kind, file in files.items() if file is not None}
    if args.regex is not None:
        texts["regex"] = args.regex
    if not texts:
        return []
    try:
        from ..decode.grammar import Grammar, GrammarVocabulary
    except ImportError as error:
        raise ImportError(
            "--json-schema, --regex and --grammar need llguidance: install mlx-dflash2[structured]."
        ) from error
    vocabulary = GrammarVocabulary(pair.tokenizer, vocab_size)
    return [Grammar(vocabulary, vocabulary.compile(*item)) for item in texts.items()]


def read_pair(
    sources: PairSources,
    args: argparse.Namespace,
    tokenizer_config: dict[str, Any] | None = None,
) -> Pair:
    """Print the notes about a pair, and read its weights.

    Args:
        sources (PairSources): From :func:`mlx_dflash2.pairs.find.find_pair`.
        args (argparse.Namespace): With those of :func:`add_model_arguments`.
        tokenizer_config (dict, optional): More settings of the tokenizer.
    """
    check_dense(args)
    for text in (*sources.notes, *pending_downloads(sources)):
        note(str(text))
    all_ranks = ranks()
    trust = {"trust_remote_code": args.trust_remote_code}
    pair = load_pair(
        sources,
        adapter_path=args.adapter_path,
        tokenizer_config=(tokenizer_config or {}) | trust,
        model_config={"quantize_activations": args.quantize_activations},
        lazy=args.dense,
        ranks=all_ranks if all_ranks.size > 1 else None,
        **trust,
    )
    if args.dense:
        unpack(*pair.models)
    for token in args.extra_eos_token:
        pair.tokenizer.add_eos_token(token)
    if args.draft_vocab is not None:
        pair.drafter.frequent_tokens = frequent_tokens(args.draft_vocab, pair.tokenizer)
    if args.no_kernels:
        switch_off()
    # What a race finds may differ between ranks, whose bits have to be the same.
    if all_ranks.size > 1:
        return pair
    with wired_limit(pair.model):
        race_here(pair.models, pair.most_rows, note)
    return pair


def cache_metadata(pair: Pair, args: argparse.Namespace) -> dict[str, str]:
    """Return what a prompt cache's file says about its target, as mlx_lm.generate reads it."""
    # The file may be used from another directory.
    folder = Path(pair.name).expanduser()
    name = str(folder.absolute()) if folder.is_dir() else pair.name
    config = json.dumps({"trust_remote_code": args.trust_remote_code})
    return {"model": name, "tokenizer_config": config}


def _named(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}

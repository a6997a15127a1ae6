"""The options of a generation as one object, which commands and library functions share."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any, Self

import mlx.core as mx
from mlx_lm import sample_utils

from .defaults import KV_GROUP_SIZE, MAX_TOKENS, PREFILL_STEP_SIZE, QUANTIZED_KV_START
from .kv_quantization import KVQuantization
from .sampling import check_seed
from .text import stop_strings

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
_INTEGERS = (
    "max_tokens",
    "seed",
    "block_size",
    "verify_width",
    "max_kv_size",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
)


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate: options whose ranges are checked when the object is made.

    The fields are arguments of :func:`dflash_generate_step`, and ``stop`` of
    :func:`stream_generate`. Whether an option suits a drafter, a target or a cache is checked
    where that is known.

    Attributes:
        kv_quantization (KVQuantization): The three options about quantized caches.

    Raises:
        ValueError: naming the option that is out of range, in one line.
    """

    max_tokens: int = MAX_TOKENS
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    seed: int | None = None
    block_size: int | None = None
    verify_width: int | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = PREFILL_STEP_SIZE
    kv_bits: int | None = None
    kv_group_size: int = KV_GROUP_SIZE
    quantized_kv_start: int = QUANTIZED_KV_START
    stop: tuple[str, ...] = ()
    kv_quantization: KVQuantization = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_tokens < -1:
            raise ValueError(
                f"`max_tokens` is {self.max_tokens} but has to be -1 (no limit) or more."
            )
        if self.prefill_step_size < 1:
            raise ValueError(
                f"`prefill_step_size` is {self.prefill_step_size} but has to be 1 or more."
            )
        check_seed(self.seed)
        quantization = KVQuantization(self.kv_bits, self.kv_group_size, self.quantized_kv_start)
        # The dataclass is frozen, also for its own initialization.
        object.__setattr__(self, "kv_quantization", quantization)

    def _check_types(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name, None)
            if option.name not in _INTEGERS or (value is None and option.default is None):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"`{option.name}` is {value!r} but has to be an integer.")
        if self.sampler is not None and not callable(self.sampler):
            raise TypeError(f"`sampler` is {self.sampler!r} but has to be from make_sampler.")
        processors = self.logits_processors
        listed = processors is None or isinstance(processors, list | tuple)
        if not listed or not all(map(callable, processors or ())):
            raise TypeError("`logits_processors` has to be a list of functions.")

    @classmethod
    def for_text(cls, *, stop: str | Sequence[str] | None = None, **options: Any) -> Self:
        """Make the options of an answer in text, which has at least one token.

        Args:
            stop (str or list of str, optional): Texts that end the answer.
            options: The other fields.

        Raises:
            ValueError: as the class, or for ``max_tokens`` 0.
        """
        refuse_unknown(options, [option.name for option in fields(cls) if option.init])
        if options.get("max_tokens") == 0:
            raise ValueError("`max_tokens` is 0 but has to be non-zero (-1 for no limit).")
        return cls(stop=stop_strings(stop), **options)

    @property
    def token_limit(self) -> float:
        """Return the most tokens to generate; infinity for no limit."""
        return float("inf") if self.max_tokens == -1 else self.max_tokens


def refuse_unknown(names: Iterable[str], known: Container[str]) -> None:
    """Refuse options that do not exist here, and say where they belong.

    Raises:
        TypeError: naming the first one.
    """
    for name in names:
        if name in known:
            continue
        for argument, make in (
            ("sampler", sample_utils.make_sampler),
            ("logits_processors", sample_utils.make_logits_processors),
        ):
            if name in signature(make).parameters:
                raise TypeError(
                    f"`{name}` is not an option here; give {argument}={make.__name__}({name}=…)."
                )
        if name == "num_draft_tokens":
            raise TypeError(f"`{name}` is not an option here; give `block_size`, one row more.")
        raise TypeError(f"`{name}` is not an option here.")

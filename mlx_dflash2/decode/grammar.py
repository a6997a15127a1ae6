"""Answers that follow a JSON schema, a regular expression or a grammar, by llguidance."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .constraint import Constraint

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "grammar"
_MAKERS: dict[str, Callable[[str], str]] = {
    JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
    REGEX: LLMatcher.grammar_from_regex,
    LARK: LLMatcher.grammar_from_lark,
}


class GrammarVocabulary:
    """A target's tokens as llguidance knows them; to be made once, which takes a second.

    Args:
        tokenizer (TokenizerWrapper): The target's tokenizer.
        size (int): The target's number of tokens.

    Raises:
        ValueError: if the tokenizer's tokens cannot be told, or are more than the target's.
    """

    def __init__(self, tokenizer: TokenizerWrapper, size: int):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("Grammars need a tokenizer of the tokenizers library.")
        known = max(tokenizer.get_vocab().values()) + 1
        if known > size:
            raise ValueError(f"The tokenizer has {known} tokens but the target has {size}.")
        self.size = size
        self.eos_token_ids = frozenset(i for i in tokenizer.eos_token_ids if 0 <= i < size)
        if not self.eos_token_ids:
            raise ValueError("Grammars need an EOS token, and the tokenizer has none.")
        self.tokens = LLTokenizer(backend.to_str(), size, sorted(self.eos_token_ids))

    def compile(self, kind: str, text: str) -> str:
        """Check a grammar, and put it into the form that :class:`Grammar` takes.

        Args:
            kind (str): ``json_schema``, ``regex`` or ``grammar``, which is Lark's form.
            text (str): The grammar.

        Raises:
            ValueError: saying what is wrong with it, in one line.
        """
        try:
            grammar = _MAKERS[kind](text)
            problem = LLMatcher.validate_grammar(grammar, self.tokens)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ValueError(f"The {kind} does not compile: {' '.join(problem.split())}")
        return grammar


class Grammar(Constraint):
    """Lets an answer be what a grammar allows, and end where the grammar may end.

    Args:
        vocabulary (GrammarVocabulary): The target's tokens.
        grammar (str): From :meth:`GrammarVocabulary.compile`.
        after (sequence of int): Tokens that end what comes before, such as thoughts; until then
            everything is allowed. Default: none, so that the grammar holds from the beginning.
    """

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str, after: Sequence[int] = ()):
        self.vocab_size, self.eos_token_ids = vocabulary.size, vocabulary.eos_token_ids
        self.matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0)
        self._after = tuple(after)
        self._place = _Place(holds=not self._after)
        ends = np.zeros(32 * ((self.vocab_size + 31) // 32), np.uint8)
        ends[list(self.eos_token_ids)] = 1
        self._ends = np.packbits(ends, bitorder="little").view(np.uint32)
        self._check()

    def forced(self, most: int) -> list[int]:
        """Tokens that have to come next, at most so many; empty if there is a choice."""
        if not self._place.holds or self._place.ended or self.matcher.is_stopped():
            return []
        return self.matcher.compute_ff_tokens()[:most]

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many drafts may follow one after the other; none follows an EOS token."""
        count = 0
        with self._trial():
            for token in drafts:
                if self._place.ended or not self._allows(token):
                    break
                self._step(token)
                count += 1
        return count

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Which tokens may follow the accepted ones, and each of some allowed drafts."""
        rows = [self._mask()]
        with self._trial():
            for token in drafts:
                self._step(token)
                rows.append(self._mask())
        return np.stack(rows)

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on to the place behind tokens that were emitted."""
        for token in tokens:
            self._step(token)
        self._place = replace(self._place, consumed=0)

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Come back to this place afterwards."""
        place = self._place
        try:
            yield
        finally:
            self.matcher.rollback(self._place.consumed - place.consumed)
            self._place = place

    def _step(self, token: int) -> None:
        place = self._place
        if token in self.eos_token_ids or place.ended:
            self._place = replace(place, ended=True)
        elif not place.holds:
            tail = (*place.tail, token)[-len(self._after) :]
            self._place = replace(place, tail=tail, holds=tail == self._after)
        elif self.matcher.consume_token(token):
            self._place = replace(place, consumed=place.consumed + 1)
        else:
            self._check()

    def _allows(self, token: int) -> bool:
        if not self._place.holds:
            return True
        if token in self.eos_token_ids:
            return self.matcher.is_accepting()
        return self.matcher.validate_tokens([token]) == 1

    def _mask(self) -> np.ndarray:
        if self._place.ended or self.problem is not None:
            return self._ends
        if not self._place.holds:
            return np.full_like(self._ends, 2**32 - 1)
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[: self._ends.size]
        self._check()
        return self._ends if self.problem is not None else mask

    def _check(self) -> None:
        """Give up, with a warning, if the matcher has; nothing brings it back."""
        if self.problem is None and self.matcher.is_error():
            self.problem = " ".join(self.matcher.get_error().split())
            warnings.warn(f"The grammar ends the answer: {self.problem}.", stacklevel=2)


@dataclass(frozen=True)
class _Place:
    """Where in an answer a grammar is.

    ``holds`` from the end of what comes before it, of which ``tail`` are the last tokens;
    ``ended`` after an EOS token; ``consumed`` tokens of the matcher since the last accepted one.
    """

    holds: bool
    tail: tuple[int, ...] = ()
    ended: bool = False
    consumed: int = 0

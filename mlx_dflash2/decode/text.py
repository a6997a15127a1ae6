"""Encode prompts, and decode tokens to text up to a stop string."""

import copy
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import mlx.core as mx
from jinja2 import TemplateError
from mlx_lm.generate import GenerationResponse, TextStateMachine
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper


def encode_prompt(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    """Encode a prompt as token ids [S].

    Text that starts with the BOS token does not get a second one.

    Raises:
        TypeError, ValueError: in one line, if it holds something else than token ids.
    """
    if isinstance(prompt, mx.array):
        return prompt
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    elif isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise TypeError(f"`prompt` is {prompt!r} but has to be text or token ids.")
    ids: list[Any] = list(prompt)
    for place, token in enumerate(ids):
        # Lists of lists are told by the shape that they make.
        if isinstance(token, list | tuple):
            continue
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"`prompt` holds {token!r} at place {place} but has to hold token ids.")
        if not 0 <= token < 2**32:
            raise ValueError(f"`prompt` holds {token} at place {place}, which is not a token id.")
    return mx.array(ids, dtype=mx.uint32)


def wrap_tokenizer(tokenizer: TokenizerWrapper | Any) -> TokenizerWrapper:
    """Wrap a tokenizer of transformers as mlx-lm does, if it is not wrapped.

    Raises:
        TypeError: if it is not a tokenizer.
    """
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "get_vocab"):
        raise TypeError(
            f"`tokenizer` is a {type(tokenizer).__name__} but has to be a tokenizer, from load."
        )
    return TokenizerWrapper(tokenizer)


def check_prompt(prompt: mx.array) -> None:
    """Refuse an array that is not a row of token ids.

    Raises:
        TypeError, ValueError: in one line.
    """
    if not isinstance(prompt, mx.array):
        kind = type(prompt).__name__
        raise TypeError(f"`prompt` is a {kind} but has to be an mx.array of token ids.")
    if prompt.size == 0:
        raise ValueError("`prompt` is empty but has to have at least one token.")
    if prompt.ndim != 1:
        raise ValueError(f"`prompt` is of shape {prompt.shape} but has to be one row of token ids.")
    if not mx.issubdtype(prompt.dtype, mx.integer):
        raise ValueError(f"`prompt` is of dtype {prompt.dtype} but has to hold integers.")


def chat_prompt(
    tokenizer: TokenizerWrapper,
    prompt: str,
    *,
    system_prompt: str | None = None,
    prefill_response: str | None = None,
    use_template: bool = True,
    template_config: dict[str, Any] | None = None,
    suffix_only: bool = False,
) -> list[int]:
    """Encode one user message, in the model's chat template if it has one.

    Args:
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompt (str): The user's message.
        system_prompt (str, optional): A system message before it.
        prefill_response (str, optional): The beginning of the answer.
        use_template (bool): Whether to use the chat template. Default: ``True``.
        template_config (dict, optional): More arguments of the template.
        suffix_only (bool): Leave out the template's text before the message, which a prompt
            cache covers. Default: ``False``.

    Returns:
        list of int: Token ids.

    Raises:
        ValueError: if an argument of the template is given where no template is used, the
            template refuses the prompt, or the prompt contains lone surrogates.
    """
    if any(0xD800 <= ord(character) < 0xE000 for character in prompt):
        # Python decodes bytes of the command line or stdin that are not UTF-8 to surrogates.
        raise ValueError("The prompt is not valid UTF-8.")
    if not (use_template and tokenizer.has_chat_template):
        given = {
            "system_prompt": system_prompt,
            "prefill_response": prefill_response,
            "chat_template_config": template_config,
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"`{name}` is given but no chat template is used.")
        return tokenizer.encode(prompt, add_special_tokens=True)
    messages = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    if prefill_response is not None:
        messages.append({"role": "assistant", "content": prefill_response})
    text = _render(tokenizer, messages, template_config or {})
    if suffix_only:
        # As in mlx-lm: the text before a placeholder for the message is the cached prefix.
        messages[-1]["content"] = "<query>"
        text = text[_render(tokenizer, messages, template_config or {}).index("<query>") :]
    return tokenizer.encode(text, add_special_tokens=False)


def unfinished_prompt(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    """Encode the beginning of a user's message, which another message goes on from.

    Raises:
        ValueError: if the template refuses the prompt.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt, add_special_tokens=True)
    text = _render(tokenizer, [{"role": "user", "content": prompt}], {}, continues=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _render(
    tokenizer: TokenizerWrapper,
    messages: list[dict[str, str]],
    template_config: dict[str, Any],
    continues: bool = False,
) -> str:
    continues = continues or messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=continues,
            add_generation_prompt=not continues,
            **template_config,
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"The chat template does not take this prompt: {error}") from error


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one stop string, several or none as a tuple.

    Raises:
        ValueError: if one is empty or is not a string.
    """
    if stop is None:
        return ()
    single = isinstance(stop, str) or not isinstance(stop, Iterable)
    stops: tuple[Any, ...] = (stop,) if single else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"`stop` holds {text!r} but has to hold non-empty strings.")
    return stops


class StopStrings:
    """Cuts a stream of text before the first stop string, wherever segments begin and end.

    Text that may become a stop string is held back until the next text decides.

    Args:
        stops (tuple of str): From :func:`stop_strings`.

    Attributes:
        found (bool): Whether a stop string is complete.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.given = bool(stops)
        machine = TextStateMachine({"normal": [(text, None) for text in stops]} if stops else None)
        self._state = machine.make_state()
        self.found = False

    def feed(self, text: str) -> str:
        """Take in a piece of text, and return the text that can be shown now."""
        if self.found:
            return ""
        self._state, shown, name = TextStateMachine.step(self._state, text)
        self.found = name is None
        return shown

    def would_end(self, text: str) -> bool:
        """Return whether more text would complete a stop string."""
        return not self.found and TextStateMachine.step(self._state, text)[2] is None

    def flush(self) -> str:
        """Return text that was held back and did not become a stop string."""
        return "" if self.found else TextStateMachine.flush(self._state)[1]


class TextStream:
    """Turns the tokens of an answer into text, up to a stop string.

    Args:
        tokenizer (TokenizerWrapper): The target's tokenizer.
        stops (StopStrings): What ends the answer.

    Attributes:
        ended (bool): Whether a stop string is complete, even if none of it can be shown yet.
    """

    def __init__(self, tokenizer: TokenizerWrapper, stops: StopStrings):
        self.detokenizer, self.stops = tokenizer.detokenizer, stops
        self.ended = False

    def add(self, token: int) -> str:
        """What can be shown once a token is known."""
        self.detokenizer.add_token(token)
        text = self.stops.feed(self.detokenizer.last_segment)
        self.ended = self.stops.found
        if self.stops.given and not self.ended:
            self.ended = self.stops.would_end(_held_back(self.detokenizer))
        return text

    def finish(self) -> str:
        """What was held back until now."""
        self.detokenizer.finalize()
        return self.stops.feed(self.detokenizer.last_segment) + self.stops.flush()


def responses(
    steps: Generator[tuple[int, mx.array, bool], None, None],
    tokenizer: TokenizerWrapper,
    prompt_size: int,
    max_tokens: int,
    stops: StopStrings,
) -> Generator[GenerationResponse, None, None]:
    """Decode a stream of tokens to mlx-lm's responses, up to an EOS token, a stop or the end.

    Args:
        steps (generator): Tokens, their log probabilities [V], and whether they were drafted.
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompt_size (int): Tokens of the prompt.
        max_tokens (int): The most tokens that ``steps`` gives.
        stops (StopStrings): Texts that end the answer.
    """
    stream = TextStream(tokenizer, stops)
    tic, prompt_tps = time.perf_counter(), 0.0

    def respond(text: str, finish_reason: str | None = None) -> GenerationResponse:
        token, logprobs, from_draft = step
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=prompt_size,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - tic),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
        )

    text = ""
    for count, step in enumerate(steps, start=1):
        if count == 1:
            prompt_tps = prompt_size / (time.perf_counter() - tic)
            tic = time.perf_counter()
        if step[0] in tokenizer.eos_token_ids:
            break
        text = stream.add(step[0])
        if stream.ended or count == max_tokens:
            break
        yield respond(text)
        text = ""
    # Close before the last response: a caller may stop there, and expects settled caches.
    steps.close()
    text += stream.finish()
    stopped = stops.found or step[0] in tokenizer.eos_token_ids
    yield respond(text, "stop" if stopped else "length")


def decode_text(tokenizer: TokenizerWrapper, tokens: Iterable[int]) -> str:
    """Decode tokens to the text that :func:`responses` gives for them."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def _held_back(detokenizer: StreamingDetokenizer) -> str:
    """Text of the tokens so far that a detokenizer shows only after the next token."""
    detokenizer = copy.copy(detokenizer)
    detokenizer.finalize()
    return detokenizer.last_segment

"""Between text and tokens: prompts in, decoded segments out."""

import time
from collections.abc import Generator, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper


def encode_prompt(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    """Token ids [S] of a prompt; text that starts with the BOS token gets no second one."""
    if isinstance(prompt, mx.array):
        return prompt
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    return mx.array(prompt, dtype=mx.uint32)


def check_prompt(prompt: mx.array, max_tokens: int, prefill_step_size: int):
    """Refuse what cannot be a prompt, a budget or a chunk.

    Raises:
        ValueError: in one line, naming the argument.
    """
    if prompt.ndim != 1 or prompt.size == 0:
        raise ValueError(f"`prompt` has to be one row of token ids but has shape {prompt.shape}.")
    if not mx.issubdtype(prompt.dtype, mx.integer):
        raise ValueError(f"`prompt` has to hold integers but holds {prompt.dtype}.")
    if max_tokens < -1:
        raise ValueError(f"`max_tokens` has to be -1 (no limit) or more but is {max_tokens}.")
    if prefill_step_size < 1:
        raise ValueError(f"`prefill_step_size` has to be 1 or more but is {prefill_step_size}.")


def chat_prompt(
    tokenizer: TokenizerWrapper,
    prompt: str,
    *,
    system_prompt: str | None = None,
    prefill_response: str | None = None,
    use_template: bool = True,
    template_config: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of one user message, in the model's chat template if it has one.

    Args:
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompt (str): The user's message.
        system_prompt (str, optional): A system message before it.
        prefill_response (str, optional): How the answer begins.
        use_template (bool): Whether to use the chat template. Default: ``True``.
        template_config (dict, optional): More arguments of the template.

    Raises:
        ValueError: if an argument of the template is given where no template is used.
    """
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
    continues = prefill_response is not None
    if continues:
        messages.append({"role": "assistant", "content": prefill_response})
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        **(template_config or {}),
    )
    return tokenizer.encode(text, add_special_tokens=False)


def responses(
    steps: Iterable[tuple[int, mx.array, bool]],
    tokenizer: TokenizerWrapper,
    prompt_size: int,
    max_tokens: int,
) -> Generator[GenerationResponse, None, None]:
    """Decode a stream of tokens into mlx-lm's responses, up to an EOS token or the last token."""
    detokenizer = tokenizer.detokenizer
    tic, prompt_tps = time.perf_counter(), 0.0

    def respond(finish_reason: str | None = None) -> GenerationResponse:
        token, logprobs, from_draft = step
        return GenerationResponse(
            text=detokenizer.last_segment,
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

    for count, step in enumerate(steps, start=1):
        if count == 1:
            prompt_tps = prompt_size / (time.perf_counter() - tic)
            tic = time.perf_counter()
        if step[0] in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(step[0])
        if count == max_tokens:
            break
        yield respond()
    detokenizer.finalize()
    yield respond("stop" if step[0] in tokenizer.eos_token_ids else "length")

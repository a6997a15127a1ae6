"""Two turns of a chat; the second processes only what is new to the prompt cache."""

from mlx_lm.models.cache import make_prompt_cache

from mlx_dflash2 import Stats, embedded, load, load_drafter, stream_generate

model, tokenizer = load(str(embedded.target_path()))
drafter = load_drafter(embedded.drafter_path())
prompt_cache = make_prompt_cache(model)

messages: list[dict[str, str]] = []
cached: list[int] = []
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    # The cache covers the last prompt and every token of its answer, the EOS included.
    assert prompt[: len(cached)] == cached
    stats, answer = Stats(), ""
    for response in stream_generate(
        model,
        tokenizer,
        prompt[len(cached) :],
        max_tokens=12,
        draft_model=drafter,
        prompt_cache=prompt_cache,
        verify_width=4,
        stats=stats,
    ):
        answer += response.text
        prompt.append(response.token)
    cached = prompt
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}")
    print(f"({stats.prompt_tokens} prompt tokens processed, {stats.cached_tokens} from the cache)")

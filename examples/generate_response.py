"""A complete response in one call."""

from mlx_dflash2 import Stats, embedded, generate, load, load_drafter

# Or the names of repositories, such as "mlx-community/Qwen3.8-27B-4bit".
model, tokenizer = load(str(embedded.target_path()))
drafter = load_drafter(embedded.drafter_path())

messages = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

stats = Stats()
text = generate(
    model, tokenizer, prompt, draft_model=drafter, max_tokens=12, verify_width=4, stats=stats
)
print(text)
print(f"{stats.accepted} of {stats.drafted} drafts accepted in {stats.rounds} rounds")

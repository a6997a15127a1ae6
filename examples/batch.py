"""Several prompts at once: one target pass verifies a block of each."""

from mlx_dflash2 import Stats, batch_generate, embedded, load, load_drafter

model, tokenizer = load(str(embedded.target_path()))
drafter = load_drafter(embedded.drafter_path())

prompts: list[list[int]] = []
for country in ("France", "Japan"):
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    prompts.append(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )

stats = Stats()
response = batch_generate(
    model, tokenizer, prompts, max_tokens=12, draft_model=drafter, verify_width=4, stats=stats
)
for text in response.texts:
    print(text)
print(f"{stats.generation_tokens} tokens in {stats.passes} passes")

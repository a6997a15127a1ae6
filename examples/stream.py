"""Text as it comes; what the drafter proposed is in brackets."""

from mlx_dflash2 import embedded, load, load_drafter, stream_generate

model, tokenizer = load(str(embedded.target_path()))
drafter = load_drafter(embedded.drafter_path())

prompt, response = "One, two, three, four,", None
for response in stream_generate(
    model, tokenizer, prompt, max_tokens=12, draft_model=drafter, verify_width=4
):
    text = f"[{response.text}]" if response.from_draft else response.text
    print(text, end="", flush=True)
if response is not None:
    print(f"\n{response.generation_tokens} tokens, {response.finish_reason}")

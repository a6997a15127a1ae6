"""A pair for a Mac with 32 GB: Qwen3.8-27B in 4 bits, and its drafter."""

import sys

from mlx_dflash2 import CopyProposer, Stats, load, load_drafter, stream_generate

target, draft_model = sys.argv[1:] or (
    "mlx-community/Qwen3.8-27B-4bit",
    "z-lab/Qwen3.8-27B-DFlash2",
)
model, tokenizer = load(target)
# In 4 bits the drafter is faster, and the tokens are the target's all the same.
drafter = load_drafter(draft_model, bits=4)

messages = [{"role": "user", "content": "Why is the sky blue?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
stats = Stats()
for response in stream_generate(
    model, tokenizer, prompt, max_tokens=64, draft_model=CopyProposer(drafter), stats=stats
):
    print(response.text, end="", flush=True)
print(f"\n{stats.summary()}")

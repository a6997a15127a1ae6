"""Ask a running mlx_dflash2.server with the openai package, and read how many drafts were right."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = OpenAI(base_url=url, api_key="none")

messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(
    model="default_model",
    messages=messages,  # type: ignore[arg-type]
    max_tokens=16,
    temperature=0,
)
print(answer.choices[0].message.content)

usage = answer.usage
if usage is not None and usage.completion_tokens_details is not None:
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    rejected = usage.completion_tokens_details.rejected_prediction_tokens
    print(f"{accepted} drafts accepted, {rejected} rejected")

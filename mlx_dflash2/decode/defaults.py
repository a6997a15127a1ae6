"""Defaults of options, for functions and flags alike; mlx-lm's own where it has the option."""

# Tokens to generate.
MAX_TOKENS = 256
GENERATE_MAX_TOKENS = 100
CHAT_MAX_TOKENS = 256
BATCH_MAX_TOKENS = 128

# Prompt tokens to process at a time, and sequences to decode side by side.
PREFILL_STEP_SIZE = 2048
# A command on the CPU backend takes smaller steps: Ctrl-C waits for the end of one.
CPU_PREFILL_STEP_SIZE = 64
COMPLETION_BATCH_SIZE = 32

# Copies of the text as drafts: none, beside a drafter, or instead of one.
COPY_DRAFTS = ("off", "with", "only")
COPY_DRAFTS_DEFAULT = "with"

# Quantized key-value caches: numbers that share a scale, and the first token to quantize at.
KV_GROUP_SIZE = 64
QUANTIZED_KV_START = 5000

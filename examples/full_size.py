"""The published size with random weights, through the ordinary loop: Qwen3.8-27B in 4 bits.

It needs 24 GB of memory and, on two CPU cores, about half an hour; nothing is downloaded.
"""

import json
from pathlib import Path

from mlx_dflash2.benchmark import full_size

results = full_size.run(
    full_size.QWEN3_8_27B, full_size.QWEN3_8_27B_DRAFTER, prompt=[9707, 11, 1879], rounds=2
)
path = Path(__file__).parent / "results" / "full_size.json"
path.write_text(json.dumps(results, indent=1) + "\n")

print(f"peak memory {results['peak_memory'] / 1e9:.2f} GB")
print(f"a round reads {results['round_bytes_read'] / 1e9:.3f} GB of weights", end=", ")
print(f"estimated {results['round_bytes_estimated'] / 1e9:.3f} GB")
print(f"tokens {results['tokens']}, equal to plain decoding's: {results['equal']}")

"""What selector and convolution bring: matched drafters for the embedded target.

Give it a folder with the data and taps of `mlx_dflash2.train data taps`; two CPU cores take about
half an hour, once MLX has a fast BLAS.
"""

import sys
from pathlib import Path

from mlx_dflash2.train import ablation
from mlx_dflash2.train.arguments import parse
from mlx_dflash2.train.run import Run

folder = Path(sys.argv[1])
options = [
    f"--data={folder / 'data'}", f"--taps={folder / 'taps'}", "--dequantize", "--block-size=8",
    "--target-layer-ids", "1", "10", "19", "28", "--mask-token-id=4", "--selector-rank=128",
    "--factored", "--vocab-sample=4096", "--batch-size=4", "--anchors=48", "--iters=300",
    "--learning-rate=8e-4", "--labels=soft",
]  # fmt: skip
drafters = ablation.train(folder / "ablation", options, layers=2)
run = Run(parse([*options, f"--output-path={folder / 'ablation'}"]))
found = ablation.measure(drafters, run, num_prompts=22, max_tokens=64)
print(ablation.table(found))
ablation.save(found, Path(__file__).parent / "results")

r"""What selector and convolution bring: matched drafters for the embedded target.

It goes on where it stopped. Give it a folder with texts and taps, such as this command makes:

    mlx_dflash2.train data taps --output-path FOLDER --dequantize --labels soft \
        --target-layer-ids 1 10 19 28 --mask-token-id 4 --num-layers 2 --block-size 8 \
        --num-prompts 10000 --own-prompts 8000 --max-tokens 144
"""

import sys
from pathlib import Path

from mlx_dflash2.train import ablation
from mlx_dflash2.train.arguments import parse
from mlx_dflash2.train.data import generate
from mlx_dflash2.train.prompts import built_in
from mlx_dflash2.train.run import Run

if len(sys.argv) != 2:
    sys.exit("usage: python examples/ablation.py FOLDER")
folder = Path(sys.argv[1])
options = (
    f"--data {folder / 'data'} --taps {folder / 'taps'} --dequantize --labels soft --factored "
    "--block-size 8 --target-layer-ids 1 10 19 28 --mask-token-id 4 --selector-rank 128 "
    "--rope-theta 10000 --vocab-sample 4096 --batch-size 6 --anchors 48 --train-block-size 5 "
    "--gamma 2 --learning-rate 8e-4 --average 0.98 --iters 2500"
).split()
start = "--iters 260 --min-learning-rate 4e-4".split()

drafters = ablation.train(folder / "ablation", options, layers=2, start=start)
run = Run(parse([*options, "--output-path", str(folder / "ablation")]))
prompts = built_in("held_out", seed=0, count=110)
held_out = generate(
    *run.loaded, prompts, folder / "held_out", name=run.name, max_tokens=96, batch_size=110
)
found = ablation.measure(drafters, run, held_out, num_decoded=22, max_tokens=48)
print(ablation.table(found))
ablation.save(found, Path(__file__).parent / "results")

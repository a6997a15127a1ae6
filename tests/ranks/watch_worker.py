"""One rank that goes wrong in the way that its argument names; the other waits for it."""

import os
import signal
import sys
import time

import mlx.core as mx

from mlx_dflash2.cli.console import run
from mlx_dflash2.cli.together import ranks, together


def main() -> None:
    fault = sys.argv[1]
    with together():
        group = ranks()
        print("started", file=sys.__stdout__, flush=True)
        if group.rank == 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "error":
                raise ValueError("the disk is full.")
            if fault == "interrupted":
                raise KeyboardInterrupt
            if fault == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
        mx.eval(mx.distributed.all_sum(mx.ones(4), stream=mx.cpu))
        if fault == "none":
            time.sleep(group.rank)


if __name__ == "__main__":
    run(main)

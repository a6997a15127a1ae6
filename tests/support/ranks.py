"""Two processes on the loopback interface, started as `mlx.launch` starts them."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path


def start(folder: Path, *commands: list, **how) -> list[subprocess.Popen]:
    """Start a Python command in each rank, such as ``["-m", "mlx_dflash2.generate"]``."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(commands))]))
    started = []
    for rank, command in enumerate(commands):
        environment = os.environ | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": "tests"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        command = [sys.executable, *map(str, command)]
        started.append(subprocess.Popen(command, env=environment, text=True, **pipes, **how))
    return started


def finish(processes: list[subprocess.Popen], seconds: float = 100, text: str | None = None):
    """The status, output and errors of each rank; ``text`` goes to rank 0's stdin."""
    deadline = time.monotonic() + seconds
    texts = [text] + [None] * (len(processes) - 1)
    try:
        said = [
            p.communicate(t, timeout=deadline - time.monotonic())
            for p, t in zip(processes, texts, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *pair) for p, pair in zip(processes, said, strict=True)]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]

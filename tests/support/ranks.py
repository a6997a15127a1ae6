"""Two processes on the loopback interface, started as `mlx.launch` starts them."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(folder: Path, *commands: list, within: list[Path] = ()) -> list[subprocess.Popen]:
    """Start a Python command in each rank, such as ``["-m", "mlx_dflash2.generate"]``.

    ``within`` has a working directory for each rank. A single command is not distributed.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(commands))]))
    started = []
    for rank, command in enumerate(commands):
        path = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if len(commands) > 1:
            environment |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        command = [sys.executable, *map(str, command)]
        cwd = within[rank] if within else ROOT
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=cwd, text=True, errors="replace", **pipes
            )
        )
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

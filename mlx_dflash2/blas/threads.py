"""How many threads a BLAS should have on this machine."""

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# MLX sets it for each process of a distributed run; they may share the machine.
RANK = "MLX_RANK"


def num_threads() -> int:
    """Return a number of threads that leaves a processor to others.

    OpenBLAS's threads wait for each other by spinning. Where one of them has to share its
    processor with another program, all of them wait for it, and a product takes many times as
    long. So there is one for each physical core, but one processor fewer than there are.
    """
    if RANK in os.environ:
        return 1
    processors = os.sched_getaffinity(0)
    available = min(len(processors), _quota())
    return max(1, min(_num_cores(processors), available - 1))


def _num_cores(processors: set[int]) -> int:
    """Count the physical cores of some logical processors."""
    cores = set()
    for number in processors:
        topology = TOPOLOGY / f"cpu{number}" / "topology"
        try:
            cores.add((topology / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(number))
    return len(cores)


def _quota() -> int:
    """Return the processors that a container may use, a large number without a limit."""
    try:
        limit, period = QUOTA.read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return 1 << 16

"""A run on a machine without clang says once, at its end, what to install."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support import WHAT_THE_BENCH_NEEDS


def test_the_run_ends_with_what_to_install(tmp_path):
    tests = Path(__file__).with_name("test_bench_compile.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", tests],
        cwd=tests.parents[2],
        env={k: v for k, v in os.environ.items() if k != "CI"} | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    skipped = re.search(r"(\d+) skipped in", done.stdout)[1]
    said = [line for line in done.stdout.splitlines() if WHAT_THE_BENCH_NEEDS in line]
    assert said == [f"{skipped} tests were skipped: {WHAT_THE_BENCH_NEEDS}."]

"""One thread for each physical core, and one processor left to others."""

import os

import pytest

from mlx_dflash2.blas import threads


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Pretends to be on a machine: the siblings of each processor, and a container's limit."""

    def make(siblings, quota="max 100000"):
        for number, text in siblings.items():
            folder = tmp_path / f"cpu{number}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(text)
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
        monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings), raising=False)
        monkeypatch.delenv(threads.RANK, raising=False)

    return make


ALONE = {number: str(number) for number in range(8)}
IN_PAIRS = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}


@pytest.mark.parametrize(
    "siblings, quota, expected",
    [
        (ALONE, "max 100000", 7),
        (IN_PAIRS, "max 100000", 4),
        ({0: "0", 1: "1"}, "max 100000", 1),
        ({0: "0"}, "max 100000", 1),
        (ALONE, "300000 100000", 2),
        (ALONE, "50000 100000", 1),
        (IN_PAIRS, "600000 100000", 4),
        (ALONE, "nonsense", 7),
    ],
)
def test_number(machine, siblings, quota, expected):
    machine(siblings, quota)
    assert threads.num_threads() == expected


def test_processes_of_one_run_share_the_machine(machine, monkeypatch):
    machine(ALONE)
    monkeypatch.setenv(threads.RANK, "0")
    assert threads.num_threads() == 1


def test_a_machine_that_tells_nothing(machine, monkeypatch, tmp_path):
    machine(IN_PAIRS)
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path / "nowhere")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "nowhere")
    assert threads.num_threads() == 7

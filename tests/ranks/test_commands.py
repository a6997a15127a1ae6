"""Commands in two processes: rank 0 speaks, and no rank outlives another."""

import sys
import time

import pytest
from support.drafters import V2
from support.ranks import finish, start
from support.saved_models import save_drafter, save_target

pytestmark = pytest.mark.timeout(300)
WORKER = "tests/ranks/watch_worker.py"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return save_target(folder / "target"), save_drafter(folder / "drafter")


def command(pair, *options) -> list:
    target, drafter = pair
    return ["-m", "mlx_dflash2.generate", "--model", target, "--draft-model", drafter, *options]


OPTIONS = ("--prompt", "-", "--max-tokens", 12, "--temp", 1, "--seed", 3, "--check-ranks")


def test_generate_prints_once_what_one_process_prints(pair, tmp_path):
    """The prompt comes from rank 0 alone, and so do the options."""
    both = start(tmp_path, command(pair, *OPTIONS), command(pair, *OPTIONS[:3], 3))
    (status, out, err), other = finish(both, text="abcd efgh")
    assert status == 0 and "Generation: 12 tokens" in err, err
    assert other == (0, "", "")
    [alone] = finish(start(tmp_path, command(pair, *OPTIONS[:-1])), text="abcd efgh")
    assert out == alone[1] and out.strip()


def test_another_drafter_on_one_rank_ends_both(pair, tmp_path):
    other = save_drafter(tmp_path / "drafter", V2 | {"rms_norm_eps": 1e-5})
    folders = tmp_path / "a", tmp_path / "b"
    for folder, drafter in zip(folders, (pair[1], other), strict=True):
        folder.mkdir()
        (folder / "drafter").symlink_to(drafter)
    # The same arguments name another drafter in each rank's own folder.
    options = command((pair[0], "drafter"), "--max-tokens", 4)
    for status, out, err in finish(start(tmp_path, options, options, within=folders)):
        assert (status, out) == (1, "")
        assert "error: The ranks differ in the drafter: rank 0 has " in err


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("killed", "error: rank 1 of 2 ended without a word; this is rank 0."),
        ("error", "error: rank 1 of 2 ended: the disk is full.; this is rank 0."),
        ("interrupted", "error: rank 1 of 2 ended: interrupted; this is rank 0."),
        ("frozen", "error: rank 1 of 2 has said nothing for 6 seconds; this is rank 0."),
    ],
)
def test_a_rank_that_ends_takes_the_others_along(tmp_path, fault, told):
    first, second = start(tmp_path, [WORKER, fault], [WORKER, fault])
    try:
        assert second.stdout.readline() == "started\n"
        begin = time.monotonic()
        _, err = first.communicate(timeout=10)
        assert time.monotonic() - begin < 10
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, err.splitlines()[-1]) == (1, told)


def test_ranks_end_one_after_the_other(tmp_path):
    both = finish(start(tmp_path, [WORKER, "none"], [WORKER, "none"]))
    assert [status for status, _, _ in both] == [0, 0], both


def test_mlx_launch_shows_the_one_answer(pair, tmp_path):
    launch = "from mlx._distributed_utils.launch import main; main()"
    options = ["-c", launch, "-n", 2, "--backend", "ring", "--", sys.executable]
    [(status, out, err)] = finish(
        start(tmp_path, [*options, *command(pair, "--max-tokens", 4, "--verbose", "False")])
    )
    assert status == 0 and len(out.strip().splitlines()) == 1, (out, err)

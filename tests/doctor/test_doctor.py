"""The doctor command: what it prints of a machine and of a pair, and what it refuses."""

import io
import json
import os
import subprocess
import sys

import mlx.core as mx
import pytest
from support.commands import main_of
from support.saved_models import save_drafter, save_pair

from mlx_dflash2.doctor import environment
from mlx_dflash2.evaluation.machine import fingerprint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


def main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
    main_of("doctor")()
    return capsys.readouterr().out.splitlines()


def test_environment(monkeypatch, capsys, tmp_path):
    lines = main(monkeypatch, capsys, "--json", tmp_path / "doctor.json")
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["lines"] == lines and written["kind"] == "mlx_dflash2.doctor"
    facts = {line.split(":")[0] for line in lines}
    assert {"chip", "memory", "system", "versions", "Metal kernels", "disk", "hub cache"} <= facts
    assert any(f"mlx {mx.__version__}" in line for line in lines)
    assert not [line for line in lines if line.startswith("!")]


def test_versions_outside_the_tested_range_are_problems(monkeypatch, capsys):
    monkeypatch.setattr(environment, "version_problem", lambda: "mlx 0.99.0 and others")
    assert "! mlx 0.99.0 and others" in main(monkeypatch, capsys)


def test_plan_reads_no_weights(folders, monkeypatch, capsys):
    """Every array of the files is still to be loaded when the plan is made."""
    load, arrays = mx.load, []

    def noted(*args, **kwargs):
        found = load(*args, **kwargs)
        arrays.extend(found.values())
        return found

    monkeypatch.setattr(mx, "load", noted)
    lines = main(
        monkeypatch, capsys, "--model", folders[0], "--draft-model", folders[1],
        "--bandwidth", "100", "--acceptance-length", "4",
    )  # fmt: skip
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    assert len(arrays) > 50 and graph.getvalue().count('"Load"') == len(arrays)
    assert lines[0].startswith("fit: the drafter (DFlash 2) taps layers [1, 3] of 4")
    assert lines[1] == "block: 8 rows with the anchor; window: 16"
    starts = ("memory:", "bytes of a plain step", "bytes of a round", "ceiling at", "verdict:")
    assert [start for start in starts if any(line.startswith(start) for line in lines)] == list(
        starts
    )
    assert lines[-1].startswith("verdict: ") and "verify width" in lines[-1]


def test_a_round_on_every_chip(folders, monkeypatch, capsys):
    lines = main(
        monkeypatch, capsys, "--model", folders[0], "--draft-model", folders[1], "--chips",
        "--acceptance-length", "4",
    )  # fmt: skip
    assert "not measured" in lines[0] and [line.split(":")[0] for line in lines[1:4]] == [
        "M1", "M1 Pro", "M1 Max",
    ]  # fmt: skip
    assert all("with this package's" in line and "tokens/s" in line for line in lines[1:])


def test_unknown_chips_need_a_bandwidth(folders, monkeypatch, capsys):
    lines = main(monkeypatch, capsys, "--model", folders[0], "--draft-model", folders[1])
    assert any("give --bandwidth" in line for line in lines)
    assert lines[-1].startswith("verdict: ")


def test_pairs_that_do_not_fit_are_refused_in_one_line(folders, monkeypatch, capsys, tmp_path):
    other = save_drafter(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_target_layers": 6}))
    for draft_model, part in ((other, "num_target_layers"), (folders[0], "not a DFlash drafter")):
        with pytest.raises(SystemExit) as error:
            main(monkeypatch, capsys, "--model", folders[0], "--draft-model", draft_model)
        assert part in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--bandwidth", "100"], "--bandwidth has an effect only with a pair"),
        (["--anchors", "9"], "--anchors has an effect only with --trace"),
        (["--draft-bits", "4"], "--draft-bits has an effect only with a pair"),
        (["--repeats", "2"], "--repeats has an effect only with --kernels"),
        (["--kernels", "--trace"], "--trace has no effect with --kernels"),
        (["--trace", "--context", "9"], "--context has an effect only with a pair"),
        (["--trace", "--anchors", "0"], "--anchors is 0"),
        (["--chips"], "--chips has an effect only with a pair"),
        (["--race", "--trace"], "--trace has no effect with --race"),
        (["--kernels", "--race"], "--race has no effect with --kernels"),
        (["--race", "--context", "9"], "--context has an effect only with a pair"),
        (["--draft-model", "{}", "--model", "{}", "--acceptance-length", "9"], "from 1 to 8"),
    ],
)
def test_flags_have_an_effect_or_are_refused(folders, monkeypatch, capsys, arguments, part):
    places = iter((folders[1], folders[0]))
    arguments = [next(places) if argument == "{}" else argument for argument in arguments]
    with pytest.raises(SystemExit) as error:
        main(monkeypatch, capsys, *arguments)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_trace_of_a_random_pair(folders, monkeypatch, capsys):
    lines = main(
        monkeypatch, capsys, "--trace", "--model", folders[0], "--draft-model", folders[1],
        "--suites", folders[2], "--max-tokens", "20", "--anchors", "12",
    )  # fmt: skip
    assert lines[0].startswith("anchors: ") and lines[-1].startswith("verdict: ")
    assert any(line.startswith("acceptance length: best tokens") for line in lines)


def test_runs_as_a_module_without_warning():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mlx_dflash2.doctor", "--help"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0 and "usage: mlx_dflash2.doctor" in done.stdout
    assert not done.stderr


def test_fingerprints_tell_weights_of_one_shape_apart(folders, tmp_path):
    one, other = folders[1], save_drafter(tmp_path / "other")
    assert fingerprint(one) == fingerprint(one) and len(fingerprint(one)) == 16
    weights = mx.load(str(other / "model.safetensors"))
    weights["norm.weight"] = weights["norm.weight"] + 1
    before = fingerprint(other)
    mx.save_safetensors(str(other / "model.safetensors"), weights)
    assert fingerprint(other) != before

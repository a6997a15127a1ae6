"""The benchmark command on a tiny pair: what it writes, and that the figures add up."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from support.commands import main_of
from support.drafters import V1
from support.saved_models import save_drafter, save_pair
from support.tiny import DENSE, make_drafter, make_model, plain_tokens

from mlx_dflash2.benchmark import command, results, summary
from mlx_dflash2.benchmark.arms import Arm, BenchSettings
from mlx_dflash2.benchmark.measure import Bench, Sample, rounds_of
from mlx_dflash2.benchmark.quick import Lengths, make_prompts
from mlx_dflash2.benchmark.report import report
from mlx_dflash2.benchmark.tables import markdown, terminal
from mlx_dflash2.decode.clock import PHASES
from mlx_dflash2.evaluation import parity
from mlx_dflash2.evaluation.prompts import Prompt


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return *save_pair(folder), folder


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    main_of("benchmark")()


@pytest.fixture(scope="module")
def run(folders):
    """One run with every kind of arm: what it printed, and its JSON."""
    target, drafter, prompts, folder = folders
    arguments = [
        "--model", target, "--draft-model", drafter, "--suites", prompts, "--max-tokens", "12",
        "--trials", "2", "--temps", "0", "1", "--verify-widths", "8", "3", "--no-selector",
        "--draft-bits", "8", "--draft-lm", target, "--recall", "--recall-stride", "2",
        "--json", folder / "run.json", "--plots", folder / "plots",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *text, **_: lines.append(" ".join(map(str, text))))
        main(patch, *arguments)
    return "\n".join(lines), json.loads((folder / "run.json").read_text())


def test_every_arm_is_in_tables_and_json(run):
    text, results = run
    for arm in ("plain", "mlx-lm draft model", "DFlash 2 width 8", "DFlash 2 8-bit width 3"):
        for label in (arm, f"{arm}, T=1"):
            assert f"| {label} |" in text and label in results["overall"]
    # It drafts the same tokens at every temperature.
    assert "DFlash 2 without selector width 8" in results["overall"]
    assert "DFlash 2 without selector width 8, T=1" not in results["overall"]
    assert list(results["suites"]) == ["early", "late"]
    arms = len(results["overall"])
    assert len(results["samples"]) == arms * 3 * 2


def test_greedy_tokens_are_plain_mlx_lms(run, folders):
    _, results = run
    model, tokenizer = mlx_lm.load(str(folders[0]))
    messages = [{"role": "user", "content": "abcd"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    for sample in results["samples"]:
        if "T=" not in sample["arm"] and sample["prompt"] == 0:
            tokens = sample["tokens"]
            assert tokens == plain_tokens(model, prompt, len(tokens))
    verdicts = [entry["verdict"] for found in results["parity"].values() for entry in found]
    assert verdicts and set(verdicts) == {"identical"}


def test_counters_of_the_runs_add_up(run):
    _, results = run
    for sample in results["samples"]:
        assert len(sample["tokens"]) == 12
        stats = sample["stats"]
        if stats:
            assert stats["prefills"] + stats["accepted"] + stats["bonus"] == 12
            assert stats["rounds"] > 1 and stats["drafted"] > 0
            assert sample["accepted"] == stats["accepted"]
        assert 0 < sample["prompt_time"] + sample["decode_time"] <= sample["total_time"]
        assert sample["memory"] > 0


@pytest.mark.parametrize("drafted, rounds", [
    ("", 0), ("o", 1), ("ooo", 3), ("dddo", 1), ("dddodd", 2), ("dd", 1), ("dodood", 4),
])  # fmt: skip
def test_rounds_of_mlx_lm_s_speculation(drafted, rounds):
    """Of drafts and the target's own tokens; an answer may end in a draft, or have none."""
    found = rounds_of([token == "d" for token in drafted])
    assert found == rounds
    runs = [sample("lm", 0, 12, 1.0, rounds=12), sample("lm", 1, 12, 1.0, accepted=9, rounds=3)]
    assert summary.summarize(runs, [])["acceptance_pooled"] == 24 / 15


def test_draft_lm_that_is_the_target_is_always_right(run):
    _, results = run
    arm = results["overall"]["mlx-lm draft model"]
    assert arm["acceptance_pooled"] == pytest.approx(4.0)


def test_phases_and_host_reads(run):
    text, results = run
    for label, seconds in results["phases"].items():
        assert set(seconds) == set(PHASES) and all(value >= 0 for value in seconds.values())
        assert seconds["draft"] > 0 and seconds["verify"] > 0
        assert results["overall"][label]["host_reads_per_round"] == 1
    assert "disturbs what it measures" in text


def test_recall_of_a_random_drafter(run):
    text, results = run
    found = results["recall"]["DFlash 2"]
    assert len(found["recall_best"]) == len(found["recall_candidates"]) == 7
    assert 1 <= found["acceptance_best"] <= found["acceptance_oracle"]
    assert 1 <= found["acceptance_path"] <= found["acceptance_oracle"]
    assert "| Recall@8 (oracle) |" in text and "Recall@1 |" in text


def test_results_say_what_they_were_measured_on(run):
    _, results = run
    environment = results["environment"]
    assert environment["versions"]["mlx"] == mx.__version__ and environment["memory"] > 1e9
    assert environment["chip"] and environment["os"]
    prints = [model["fingerprint"] for model in results["models"].values()]
    assert prints[0] == prints[2] != prints[1] and len(prints) == 3
    assert results["settings"]["max_tokens"] == 12 and results["prompts"]["count"] == 3


def test_plots_are_pictures(run, folders):
    names = {path.name for path in (folders[3] / "plots").glob("*.png")}
    assert {"acceptance_by_position.png", "speedup.png", "round_time.png"} <= names
    assert any(name.startswith("recall_") for name in names)
    for path in (folders[3] / "plots").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_two_runs_are_compared_or_refused(run, folders, monkeypatch, capsys):
    folder = folders[3]
    results = run[1]
    faster = json.loads(json.dumps(results))
    faster["overall"]["DFlash 2 width 8"]["decode_tps"] *= 2
    faster["environment"]["versions"]["mlx"] = "9.9"
    (folder / "faster.json").write_text(json.dumps(faster))
    main(monkeypatch, "compare", folder / "run.json", folder / "faster.json")
    text = capsys.readouterr().out
    assert "| environment.versions.mlx |" in text and "| 9.9 |" in text
    row = next(r for r in text.splitlines() if "DFlash 2 width 8 | decode_tps" in r)
    assert row.endswith("| 2.00 × |")
    for change in ({"prompts": {"sha256": "0"}}, {"settings": {"max_tokens": 1}}, {"overall": {}}):
        (folder / "other.json").write_text(json.dumps(results | change))
        with pytest.raises(SystemExit) as error:
            main(monkeypatch, "compare", folder / "run.json", folder / "other.json")
        message = str(error.value)
        assert "cannot be compared" in message and "\n" not in message
    (folder / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="does not hold results"):
        main(monkeypatch, "compare", folder / "other.json", folder / "run.json")


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--trials", "0"], "--trials is 0"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--suites", "gsm8l"], "suites are built-in, editing, reading, gsm8k"),
        (["--dflash1-model", "/no/such"], "/no/such"),
        (["--thinking", "on"], "enable_thinking"),
        (["--verify-widths", "9"], "from 2 to 8"),
        (["--num-draft-tokens", "2"], "only with --draft-lm"),
        (["--recall", "--temps", "1"], "0 among --temps"),
        (["--recall-stride", "2"], "only with --recall"),
        (["--temps", "0", "--top-p", "0.9"], "only with a temperature above 0"),
        (["--draft-lm", "/no/such"], "/no/such"),
        (["--dflash1-model", "drafter"], "drafter is a DFlash 2."),
        (["--recall", "--max-tokens", "7"], "--max-tokens is 7 but has to be 8 or more"),
        (["--seed", "-1"], "--seed is -1 but has to be from 0"),
        (["--temps", "-1"], "temp"),
        (["--temps", "1", "--top-p", "2"], "--top-p"),
    ],
)
def test_refusals_take_one_line(folders, monkeypatch, arguments, part):
    arguments = [folders[1] if argument == "drafter" else argument for argument in arguments]
    with pytest.raises(SystemExit) as error:
        main(monkeypatch, "--model", folders[0], "--draft-model", folders[1], *arguments)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_runs_as_a_module_without_warning():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mlx_dflash2.benchmark", "compare", "--help"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0 and "usage: mlx_dflash2.benchmark compare" in done.stdout
    assert not done.stderr


@pytest.fixture(scope="module")
def model():
    return make_model(DENSE)


PROMPT = list(range(5, 25))


def test_parity_names_the_first_difference(model):
    plain = plain_tokens(model, PROMPT, 8)
    wrong = [*plain[:3], (plain[3] + 1) % 512, *plain[4:]]
    found = parity.compare_tokens(model, PROMPT, plain, wrong, 8)
    assert (found.verdict, found.index) == ("different", 3)
    assert (found.plain, found.found) == (plain[3], wrong[3])
    assert found.gap > 2 * found.noise
    assert parity.compare_tokens(model, PROMPT, plain, plain, 8).verdict == "identical"
    short = parity.compare_tokens(model, PROMPT, plain, plain[:5], 8)
    assert (short.verdict, short.index, short.found) == ("different", 5, None)


def test_parity_calls_a_tie_only_what_the_audit_does(model):
    """The two best tokens get one and the same row of the head."""
    plain = plain_tokens(model, PROMPT, 4)
    twin = (plain[2] + 1) % 512
    table = model.model.embed_tokens.weight
    tied = make_model(DENSE)
    tied.model.embed_tokens.weight = mx.put_along_axis(
        table, mx.full((1, 64), twin), table[plain[2]][None], axis=0
    )
    plain = plain_tokens(tied, PROMPT, 4)
    index = next(i for i, token in enumerate(plain) if token in (plain[2], twin))
    other = twin if plain[index] != twin else plain[2]
    found = parity.compare_tokens(tied, PROMPT, plain, [*plain[:index], other], 8)
    assert (found.verdict, found.index, found.gap) == ("tie", index, 0.0)
    third = next(t for t in range(512) if t not in (plain[index], twin, other))
    found = parity.compare_tokens(tied, PROMPT, plain, [*plain[:index], third], 8)
    assert found.verdict == "different"


def sample(arm, prompt, tokens, decode_time, stats=None, accepted=0, rounds=0):
    tokens = list(range(tokens))
    return Sample(arm, "s", prompt, 0, tokens, 5, 0.5, decode_time, 1 + decode_time, accepted, 7,
                  rounds, stats or {})  # fmt: skip


def test_summary_by_hand():
    def stats(rounds, accepted, bonus, drafted_at, accepted_at):
        return {"prefills": 1, "rounds": rounds, "accepted": accepted, "bonus": bonus,
                "drafted_at": drafted_at, "accepted_at": accepted_at,
                "host_reads": rounds + 1}  # fmt: skip

    runs = [
        sample("d", 0, 11, 1.0, stats(2, 8, 2, [2, 2], [2, 1])),
        sample("d", 1, 11, 5.0, stats(8, 2, 8, [8, 8], [2, 0])),
    ]
    plain = [sample("plain", 0, 11, 2.0), sample("plain", 1, 11, 2.5)]
    found = summary.summarize(runs, plain)
    assert found["acceptance_per_request"] == (10 / 2 + 10 / 8) / 2
    assert found["acceptance_pooled"] == 20 / 10
    assert found["acceptance_by_position"] == [4 / 10, 1 / 10]
    # Ratios of totals, not means of ratios.
    assert found["decode_tps"] == 20 / 6 and found["prompt_tps"] == 10
    assert found["speedup"] == pytest.approx((20 / 6) / (20 / 4.5))
    assert found["speedup_spread"] == pytest.approx([0.5, 2.0])
    low, high = found["speedup_interval"]
    assert 0.5 <= low <= found["speedup"] <= high <= 2.0
    assert found["round_seconds"] == 6 / 10
    assert found["host_reads_per_round"] == 1 and found["memory"] == 7
    assert math.isclose(found["total_tps"], 22 / 8)
    assert summary.summarize(plain, plain)["acceptance_pooled"] is None


def test_a_dflash_1_drafter_is_an_arm_of_its_own(folders, monkeypatch, tmp_path, capsys):
    older = save_drafter(tmp_path / "older", V1 | {"block_size": 4})
    (tmp_path / "one.jsonl").write_text('"w7 w8"\n')
    main(
        monkeypatch, "--model", folders[0], "--draft-model", folders[1], "--dflash1-model", older,
        "--suites", tmp_path / "one.jsonl", "--max-tokens", "9", "--temps", "0",
        "--json", tmp_path / "run.json",
    )  # fmt: skip
    results = json.loads((tmp_path / "run.json").read_text())
    assert list(results["overall"]) == ["plain", "DFlash 2", "DFlash 1"]
    assert len(results["overall"]["DFlash 1"]["acceptance_by_position"]) == 3
    assert results["parity"]["DFlash 1"][0]["verdict"] == "identical"
    assert set(results["models"]) == {"target", "drafter", "DFlash 1"}
    assert "| DFlash 1 |" in capsys.readouterr().out


@pytest.mark.slow
def test_embedded_pair_with_a_small_budget(monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    (tmp_path / "one.jsonl").write_text('"What is 17 plus 25?"\n')
    arguments = ["--suites", tmp_path / "one.jsonl", "--max-tokens", "24", "--temps", "0"]
    main(monkeypatch, *arguments, "--no-selector", "--recall", "--json", path)
    results = json.loads(path.read_text())
    verdicts = [entry["verdict"] for found in results["parity"].values() for entry in found]
    assert verdicts == ["identical"] * 2
    assert results["overall"]["DFlash 2"]["acceptance_pooled"] > 1.2
    found = results["recall"]["DFlash 2"]
    assert found["recall_candidates"][0] >= found["recall_best"][0] > 0.2
    assert found["acceptance_oracle"] > found["acceptance_path"] > 1.2


def test_answers_of_one_token_are_reported(folders, monkeypatch, tmp_path, capsys):
    """They have no round."""
    main(
        monkeypatch, "--model", folders[0], "--draft-model", folders[1], "--suites", folders[2],
        "--max-tokens", "1", "--temps", "0", "--draft-lm", folders[0],
        "--json", tmp_path / "x.json", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert "| DFlash 2 | " in capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["overall"]["DFlash 2"]["acceptance_pooled"] is None


def test_recall_of_short_answers_is_left_out_and_said(model):
    drafter = make_drafter()
    prompt = Prompt("s", "", (1, 2, 3))
    bench = Bench(model, None, {"DFlash 2": drafter}, [Arm("plain")], [prompt], BenchSettings())
    run = sample("plain", 0, 7, 1.0)
    with pytest.warns(UserWarning, match="No recall of DFlash 2: every answer is shorter"):
        assert results._recall(bench, [run], 1, lambda _: None) == {}


def test_a_draft_lm_of_other_tokens_is_refused(folders):
    other = SimpleNamespace(vocab_size=513)
    with pytest.raises(ValueError, match=r"^--draft-lm: its tokenizer has 508 tokens, .* 513; .*$"):
        command._draft_lm(SimpleNamespace(draft_lm=str(folders[0]), dense=False), other)


def test_a_pass_of_mlx_lm_s_speculation_has_its_rows(model):
    assert Arm("lm", draft_lm=model, num_draft_tokens=5).rows == 6 and Arm("plain").rows == 1


def test_what_flags_change_about_the_models_reaches_the_json(run, folders, monkeypatch, tmp_path):
    assert run[1]["settings"]["num_draft_tokens"] == 3 and run[1]["settings"]["adapter"] is None
    for change in ({"adapter": "1"}, {"extra_eos_token": ["a"]}, {"quantize_activations": True}):
        changed = run[1] | {"settings": run[1]["settings"] | change}
        (tmp_path / "other.json").write_text(json.dumps(changed))
        with pytest.raises(SystemExit, match=f"settings.{next(iter(change))} is "):
            main(monkeypatch, "compare", folders[3] / "run.json", tmp_path / "other.json")


def test_settings_reach_the_json(run):
    assert run[1]["settings"]["temps"] == [0.0, 1.0]
    assert set(asdict(command.BenchSettings())) <= set(run[1]["settings"])


def test_a_single_run_has_no_interval():
    runs, plain = [sample("d", 0, 11, 1.0)], [sample("plain", 0, 11, 2.0)]
    found = summary.summarize(runs, plain)
    assert found["speedup"] == 2 and found["runs"] == 1
    assert found["speedup_interval"] is None and found["speedup_spread"] is None


def test_intervals_narrow_with_more_runs():
    widths = []
    for count in (4, 64):
        runs = [sample("d", i, 11, 1.0 + i % 4) for i in range(count)]
        plain = [sample("plain", i, 11, 2.0) for i in range(count)]
        low, high = summary.summarize(runs, plain)["speedup_interval"]
        assert low < 20 / 25 < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_a_disturbed_machine_is_flagged(run):
    results = json.loads(json.dumps(run[1]))
    calm = markdown(report(results))
    results["overall"]["DFlash 2 width 8"]["decode_tps_spread"] = [1.0, 2.1]
    text = markdown(report(results))
    assert "differ more than twofold" in text and ") !" in text
    assert ("differ more than twofold" in calm) == (") !" in calm)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_report_fits_the_terminal(run, width):
    text = terminal(report(run[1]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "| " not in text and "DFlash 2 width 8" in text.replace("\n", " ")


class Stop:
    """Presses Ctrl-C in one of the runs."""

    def __init__(self, monkeypatch, number):
        self.number, self.count, original = number, 0, Bench._run_one

        def run_one(bench, arm, prompt, index, *args):
            self.count += index >= 0
            if self.count == self.number:
                raise KeyboardInterrupt
            return original(bench, arm, prompt, index, *args)

        monkeypatch.setattr(Bench, "_run_one", run_one)


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    folders, monkeypatch, tmp_path, capsys
):
    file = tmp_path / "run.json"
    arguments = ["--model", folders[0], "--draft-model", folders[1], "--suites", folders[2],
                 "--max-tokens", "6", "--temps", "0", "--json", file]  # fmt: skip
    with monkeypatch.context() as patch:
        Stop(patch, 6)
        with pytest.raises(SystemExit) as left:
            main(patch, *arguments)
    assert left.value.code == 130
    results = json.loads(file.read_text())
    assert not results["complete"] and len(results["samples"]) == 4
    out, _ = capsys.readouterr()
    assert "INTERRUPTED: 4 runs only" in out and "| DFlash 2 |" in out

    with pytest.raises(
        SystemExit, match=r"unfinished run whose settings\.max_tokens was 6 but is 7"
    ):
        main(monkeypatch, *[7 if a == "6" else a for a in arguments])
    again = Stop(monkeypatch, -1)
    main(monkeypatch, *arguments)
    assert again.count == 2 and "Going on after 4 of 6 runs" in capsys.readouterr().err
    finished = json.loads(file.read_text())
    assert finished["complete"] and finished["samples"][:4] == results["samples"]
    assert finished["parity"] and finished["phases"]
    # A finished run is not gone on from.
    main(monkeypatch, *arguments)
    assert again.count == 2 + 6


def test_ctrl_c_before_the_first_prompt_writes_nothing(folders, monkeypatch, tmp_path):
    Stop(monkeypatch, 1)
    with pytest.raises(SystemExit) as left:
        main(monkeypatch, "--model", folders[0], "--draft-model", folders[1], "--suites",
             folders[2], "--max-tokens", "6", "--json", tmp_path / "run.json")  # fmt: skip
    assert left.value.code == 130 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("batch", ["1", "3"])
def test_the_quick_answer(folders, monkeypatch, capsys, batch):
    pair = ("--model", folders[0], "--draft-model", folders[1])
    main(monkeypatch, *pair, "-p", "20", "-g", "9", "-n", "2", "-b", batch)
    out, err = capsys.readouterr()
    trials = [line for line in err.splitlines() if line.startswith("Trial ")]
    assert [line.split(":")[0] for line in trials] == [
        f"Trial {number}, {arm}" for number in (1, 2) for arm in ("plain", "drafts")
    ]
    plain, drafts, ratio = out.splitlines()
    assert plain.startswith("Medians, plain:  prompt_tps=") and "tokens_a_round=1.00" in plain
    assert drafts.startswith("Medians, drafts:  ") and "peak_memory=" in drafts
    speeds = [float(re.search(r"generation_tps=([\d.]+)", line)[1]) for line in (plain, drafts)]
    assert float(re.search(r"[\d.]+", ratio)[0]) == pytest.approx(speeds[1] / speeds[0], abs=0.006)


def test_prompts_of_the_quick_answer_have_their_length(saved_pair):
    prompts = make_prompts(saved_pair, Lengths(700, 4, 3))
    assert [len(prompt) for prompt in prompts] == [700] * 3
    assert prompts[0] != prompts[1] != prompts[2]


@pytest.mark.parametrize("arguments", [["--suites", "built-in", "x"], ["--recall"], ["-m", "9"]])
def test_what_the_quick_answer_does_not_use_is_refused(folders, monkeypatch, arguments):
    with pytest.raises(SystemExit, match="has no effect with -p, -g, -b or -n"):
        main(monkeypatch, "--model", folders[0], "--draft-model", folders[1], "-p", "8", *arguments)

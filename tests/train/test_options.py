"""The options of a training run: command line, config file, defaults."""

import pytest

from mlx_dflash2.train.options import STAGES, parse


def test_options_of_the_command_line_come_before_the_config_s(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("iters: 7\nbatch-size: 3\nlearning_rate: 1.0e-3\nonly: [conv]\n")
    args = parse(["fit", "--config", str(config), "--batch-size", "9"])
    assert (args.iters, args.batch_size, args.learning_rate) == (7, 9, 1e-3)
    assert args.only == ["conv"] and args.stage == ["fit"]
    assert args.anchors == parse([]).anchors


def test_stages_run_in_their_order():
    assert parse(["fit", "data"]).stage == ["data", "fit"]
    assert parse([]).stage == list(STAGES) == ["data", "taps", "fit", "export", "eval"]


def test_stages_may_come_from_the_config(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("stage: [taps, data]\n")
    assert parse(["-c", str(config)]).stage == ["data", "taps"]
    assert parse(["eval", "-c", str(config)]).stage == ["eval"]


@pytest.mark.parametrize("text, field, value", [
    ("learning_rate: 1e-3", "learning_rate", 1e-3),
    ("learning_rate: 1", "learning_rate", 1.0),
    ("iters: '30'", "iters", 30),
    ("only: conv,selector", "only", ["conv", "selector"]),
    ("only: [conv, selector]", "only", ["conv", "selector"]),
    ("eval-temp: 0.5", "eval_temp", [0.5]),
    ("target-layer-ids: [1, 2]", "target_layer_ids", [1, 2]),
    ("stage: fit", "stage", ["fit"]),
    ("causal: true", "causal", True),
    ("causal: false", "causal", False),
    ("target-layer-ids: 3", "target_layer_ids", [3]),
    ("eval-temp: [0, 0.5]", "eval_temp", [0.0, 0.5]),
    ("output_path: 007", "output_path", "007"),
    ("prompts: off", "prompts", "off"),
    ("gamma: null", "gamma", None),
    ("thinking: off", "thinking", "off"),
    ("bits: 4", "bits", 4),
    ("data: texts", "data", "texts"),
])  # fmt: skip
def test_a_config_s_value_is_as_the_command_line_s(text, field, value, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(text)
    found = getattr(parse(["--config", str(config)]), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text, message", [
    ("iterations: 3", r"`iterations` in .*run\.yaml is not an option of mlx_dflash2\.train\."),
    ("config: more.yaml", r"`config` in .*run\.yaml is not an option of mlx_dflash2\.train\."),
    ("- iters", r".*run\.yaml does not hold options by name\."),
    ("iters: [", r".*run\.yaml is not valid YAML: .*\."),
    ("loss: mse", r"`loss` in .*run\.yaml is 'mse': invalid choice: 'mse' \(.*ce.*lk.*\)\."),
    ("bits: 5", r"`bits` in .*run\.yaml is '5': invalid choice: 5 \(choose from 4, 8\)\."),
    ("iters: many", r"`iters` in .*run\.yaml is 'many': invalid int value: 'many'\."),
    ("iters: 2.5", r"`iters` in .* is '2\.5': invalid int value: '2\.5'\."),
    ("iters: [2, 3]", r"`iters` in .*run\.yaml is \['2', '3'\]: it has to be one value\."),
    ("iters: {a: 2}", r"`iters` in .*run\.yaml is {.*}: it has to be a value or a list of .*\."),
    ("clip: high", r"`clip` in .*run\.yaml is 'high': invalid float value: 'high'\."),
    ("causal: 1", r"`causal` in .*run\.yaml is '1': it has to be true or false\."),
    ("iters: .inf", r"`iters` in .*run\.yaml is '\.inf': invalid int value: '\.inf'\."),
    ("iters: true", r"`iters` in .*run\.yaml is 'true': invalid int value: 'true'\."),
    ("data: [a, b]", r"`data` in .*run\.yaml is \['a', 'b'\]: it has to be one value\."),
    ("iters:", r"`iters` in .*run\.yaml is '': it has to have a value\."),
    ("top_p: null", r"`top_p` in .*run\.yaml is 'null': it has to have a value\."),
    ("loss: null", r"`loss` in .*run\.yaml is 'null': it has to have a value\."),
    ("eval_temp: null", r"`eval_temp` in .*run\.yaml is 'null': it has to have a value\."),
    ("eval_temp: []", r"`eval_temp` in .*run\.yaml is \[\]: it has to be a value or a list .*\."),
    ("causal: null", r"`causal` in .*run\.yaml is 'null': it has to have a value\."),
    ("output_path: null", r"`output_path` in .*run\.yaml is 'null': it has to have a value\."),
    ("stage: train", r"`stage` is 'train' but has to be one of data, .*\."),
])  # fmt: skip
def test_configs_are_refused_in_one_line(text, message, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(text)
    with pytest.raises(ValueError, match=rf"^{message}$"):
        parse(["--config", str(config)])


def test_what_was_given_is_known_even_if_it_is_the_default(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("loss: ce\ngamma: null\nfactored: false\n")
    assert parse(["fit", "-c", str(config), "--iters", "1000", "--causal"]).given == {
        "config", "loss", "iters", "causal", "factored"
    }  # fmt: skip
    assert parse([]).given == set()


def test_a_missing_config_and_an_unknown_stage_are_refused_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^There is no config file [^\n]*$"):
        parse(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match=r"^`stage` is 'train' but has to be one of data, [^\n]*$"):
        parse(["train"])


def test_a_flag_of_the_command_line_comes_before_a_false_one_of_the_config(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("causal: false\n")
    assert parse(["-c", str(config), "--causal"]).causal is True


def test_what_the_command_line_cannot_take_ends_with_the_usage(capsys):
    for arguments in (["--iters", "many"], ["--loss", "mse"], ["--none"]):
        with pytest.raises(SystemExit, match="2"):
            parse(arguments)
        assert capsys.readouterr().err.startswith("usage: mlx_dflash2.train")

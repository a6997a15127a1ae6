"""An answer of the generate command follows a schema, a regular expression or a grammar."""

import json
import re
import sys

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}},
    "required": ["good"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: "bee" ("," "hill")~2'


@pytest.mark.parametrize("width", [(), ("--verify-width", "1"), ("--temp", "1", "--seed", "3")])
def test_answers_follow_what_is_given(width, invoke, tmp_path):
    """With drafts and without, greedy and drawn."""
    (tmp_path / "schema").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar").write_text(LARK)

    def answer(*words):
        status, out, err = invoke("-m", "60", *width, *map(str, words))
        assert status == 0, err
        return out.removesuffix("\n")

    assert set(json.loads(answer("--json-schema", tmp_path / "schema"))) == {"good"}
    assert re.fullmatch("(ab|cd){4}x", answer("--regex", "(ab|cd){4}x"))
    assert answer("--grammar", tmp_path / "grammar") == "bee,hill,hill"


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["--regex", "("], 1, "error: The regex does not compile: "),
        (["--json-schema", "nowhere"], 2, "there is no file nowhere"),
        (["--regex", "a", "--grammar", "b"], 2, "not allowed with argument"),
    ],
)
def test_refusals_take_one_line(words, status, message, invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").write_text(LARK)
    found, out, err = invoke(*words)
    assert found == status and not out and message in err.splitlines()[-1]


def test_a_schema_that_is_no_json(invoke, tmp_path):
    (tmp_path / "schema").write_text("nonsense")
    status, out, err = invoke("--json-schema", str(tmp_path / "schema"))
    assert status == 1 and not out
    assert err.splitlines()[-1].startswith("error: The json_schema does not compile: ")


def test_without_llguidance(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_dflash2.decode.grammar", None)
    status, out, err = invoke("--regex", "a")
    assert status == 1 and not out and "mlx-dflash2[structured]" in err.splitlines()[-1]

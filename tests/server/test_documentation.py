"""The page about the server names what there is."""

import inspect
import re
from pathlib import Path

from mlx_dflash2.server import handler, limits, schema
from mlx_dflash2.server.options import setup_arg_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text()
WORDS = set(re.findall(r"[\w./*-]+", PAGE))


def test_routes():
    routes = {*handler.CHATS, *handler.TEXTS, *handler.PLACES}
    assert routes <= WORDS, routes - WORDS


def test_fields_of_requests():
    """Every field that is read is in the table, or among those that are refused."""
    source = inspect.getsource(schema)
    fields = set(re.findall(r'fields\.(?:take|number)\(\s*"(\w+)"', source)) - {"stream_options"}
    assert len(fields) > 20 and fields <= WORDS, fields - WORDS
    assert set(schema._UNSUPPORTED) <= WORDS


def test_fields_of_answers(served):
    answer = served.ask({"prompt": "abc", "max_tokens": 3}, "/v1/completions")
    names = {f"timings.{name}" for name in answer["timings"]}
    names |= {
        f"usage.{name}.{field}"
        for name, details in answer["usage"].items()
        if isinstance(details, dict)
        for field in details
    }
    assert len(names) > 10 and names <= WORDS, names - WORDS


def test_metrics(served):
    found = re.findall(r"^# TYPE mlx_dflash2_(\w+) \w+$", served.request("/metrics")[2], re.M)
    names = {name for name in found if not name.endswith("_created")}
    assert len(names) > 15 and names <= WORDS, names - WORDS


def test_flags_of_the_page_are_the_parser_s():
    flags = {flag for action in setup_arg_parser()._actions for flag in action.option_strings}
    own = {"--json-schema", "--regex", "--grammar"}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= flags | own


def test_bounds():
    assert f"{limits.MAX_BODY_BYTES // 2**20} MiB" in PAGE and limits.MAX_BODY_BYTES % 2**20 == 0
    assert (
        f"{limits.BODY_SECONDS:.0f} seconds" in PAGE
        and f"{limits.DRAIN_SECONDS:.0f}\nseconds" in PAGE
    )
    assert limits.SOCKET_SECONDS == limits.BODY_SECONDS
    assert f"up to {schema.MOST_STOPS} texts" in PAGE

"""Metal spelling -> what clang's C++ mode can parse. Line structure is kept."""

import re

from .tokens import Tokens

_FLOAT = re.compile(r"((?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?)([A-Za-z_]\w*)?$")
_STATEMENT_START = ("", ";", "{", "}", "]", ")", ":")
_LOOP = "switch (__MslLoop __msl_loop{}; 0) default: "


def rewrite(text: str, count_loops: bool = False) -> str:
    """Rewrite a kernel or a header.

    With ``count_loops`` every loop counts its iterations at run time, so that a simdgroup
    operation or barrier is matched between threads only in the same iteration of every loop.
    """
    tokens = Tokens.of(text)
    out = list(tokens.all)
    variables = 0
    for position, index in enumerate(tokens.code):
        token = tokens.at(position)
        if match := _FLOAT.match(token):
            out[index] = _float_literal(match[1], (match[2] or "").lower())
        elif token == "vec" and tokens.at(position + 1) == "<":
            if tokens.at(tokens.close(position + 1) + 1) == "(":
                out[index] = "__msl_make"
        elif is_threadgroup_variable(tokens, position):
            out[index] = f"__MSL_THREADGROUP_VARIABLE({variables})"
            variables += 1
        elif token == "template" and tokens.at(position + 1) == "[":
            _drop_instantiation_attributes(tokens, position, out)
    if count_loops:
        _count_loops(tokens, out)
    return "".join(out)


def _float_literal(number: str, suffix: str) -> str:
    """Unsuffixed literals are float in Metal, double in C++."""
    if suffix == "h":
        return number + "f16"
    if suffix == "bf":
        return f"((bfloat){number}f)"
    return number + (suffix or "f")


def is_threadgroup_variable(tokens: Tokens, position: int) -> bool:
    """Does the token at ``position`` begin a threadgroup variable, not a pointer into one?"""
    if tokens.at(position) != "threadgroup" or tokens.at(position - 1) not in _STATEMENT_START:
        return False
    depth = 0
    for ahead in range(position + 1, len(tokens.code)):
        token = tokens.at(ahead)
        depth += (token == "<") - (token == ">")
        if depth == 0 and token in ("*", "&", "("):
            return False
        if depth == 0 and token in (";", "[", ",", "="):
            return True
    return False


def _drop_instantiation_attributes(tokens: Tokens, position: int, out: list[str]) -> None:
    """``template [[host_name("x")]] [[kernel]] decltype(...)`` -> ``template decltype(...)``."""
    position += 1
    while tokens.at(position) != "decltype":
        out[tokens.code[position]] = ""
        position += 1


def _count_loops(tokens: Tokens, out: list[str]) -> None:
    tails = set()
    for index, token in enumerate(tokens.all):
        if re.match(r"\s*#\s*pragma\s+(unroll|clang loop)", token) or "PRAGMA_UNROLL" in token:
            out[index] = ""  # a pragma must stand right before its loop
    for position, index in enumerate(tokens.code):
        token = tokens.at(position)
        if token == "do" and tokens.at(position + 1) == "{":
            out[index] = _LOOP + token
            tails.add(tokens.close(position + 1) + 1)
        elif token == "while" and tokens.at(position + 1) == "(":
            _tick(tokens, position + 1, tokens.close(position + 1), out)
            if position not in tails:
                out[index] = _LOOP + token
        elif token == "for" and tokens.at(position + 1) == "(":
            _count_for(tokens, position, out)


def _count_for(tokens: Tokens, position: int, out: list[str]) -> None:
    depth, semicolons = 0, []
    for inside in range(position + 1, tokens.close(position + 1)):
        token = tokens.at(inside)
        depth += (token in "([{") - (token in ")]}")
        if token == ";" and depth == 1:
            semicolons.append(inside)
    if len(semicolons) != 2:
        return
    first, second = semicolons
    out[tokens.code[position]] = _LOOP + "for"
    if second == first + 1:
        out[tokens.code[first]] += " __msl_tick()"
    else:
        _tick(tokens, first, second, out)


def _tick(tokens: Tokens, before: int, after: int, out: list[str]) -> None:
    """Put the counter in front of the condition between two tokens."""
    out[tokens.code[before]] += " __msl_tick() && ("
    out[tokens.code[after]] = ")" + out[tokens.code[after]]

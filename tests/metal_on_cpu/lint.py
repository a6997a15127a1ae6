"""What Apple's compiler refuses and clang's C++ mode would take."""

import re

from .rewrite import is_threadgroup_variable
from .tokens import Tokens

# Refused by `#pragma GCC poison`, so that the compiler reports the place.
POISONED = (
    "virtual new delete throw try catch goto dynamic_cast typeid thread_local double register "
    "asm __asm__ noexcept std printf malloc assert"
)
_SCALARS = (
    "float half bfloat int uint short ushort char uchar long ulong bool size_t int8_t uint8_t "
    "int16_t uint16_t int32_t uint32_t int64_t uint64_t float16_t bfloat16_t void"
).split()
_TEMPLATES = ("vec", "simdgroup_matrix", "array")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")
_INITIALIZER = "initializer on a threadgroup variable (does not reliably run: assign, then barrier)"


def lint(text: str, is_header: bool = False) -> list[str]:
    """Findings in a kernel body or a header, each with its line."""
    tokens = Tokens.of(text)
    types = set(_SCALARS) | {f"{name}{n}" for name in _SCALARS for n in (2, 3, 4)}
    types |= set(re.findall(r"\b(?:typename|struct)\s+(\w+)", text))
    findings, depth = [], 0 if is_header else 1
    for position in range(len(tokens.code)):
        token = tokens.at(position)
        depth += (token == "{") - (token == "}")
        found = []
        if is_threadgroup_variable(tokens, position):
            found = _threadgroup_variable(tokens, position, is_header)
        elif token == "static" and depth > 0:
            found = _static(tokens, position)
        elif token == "[":
            found = _lambda(tokens, position)
        elif token == "(":
            found = _function_pointer(tokens, position)
        elif token in types or token == "auto":
            found = _pointer(tokens, position, position + 1)
        elif token in _TEMPLATES and tokens.at(position + 1) == "<":
            found = _pointer(tokens, position, tokens.close(position + 1) + 1)
        findings += [f"line {tokens.line(position)}: {what}" for what in found]
    return findings


def _threadgroup_variable(tokens: Tokens, position: int, is_header: bool) -> list[str]:
    found = ["threadgroup variable declared outside a kernel function"] if is_header else []
    ahead = position
    while tokens.at(ahead) not in ("", ";", "="):
        ahead += 1
    return found + ([_INITIALIZER] if tokens.at(ahead) == "=" else [])


def _static(tokens: Tokens, position: int) -> list[str]:
    ahead = [tokens.at(position + i) for i in range(6)]
    if {"const", "constexpr", "constant"} & set(ahead):
        return []
    return ["static local variables must be constant"]


def _lambda(tokens: Tokens, position: int) -> list[str]:
    starts = tokens.at(position - 1) in ("=", "(", ",", "return", "{", ";")
    if starts and tokens.at(position + 1) in ("&", "=", "]"):
        return ["lambda expression"]
    return []


def _function_pointer(tokens: Tokens, position: int) -> list[str]:
    ahead = [tokens.at(position + i) for i in range(1, 5)]
    if ahead[0] == "*" and _IDENTIFIER.match(ahead[1]) and ahead[2:] == [")", "("]:
        return ["pointer to function"]
    return []


def _pointer(tokens: Tokens, position: int, behind: int) -> list[str]:
    """A type at ``position`` that ends before ``behind`` and has a mark of a pointer there."""
    mark, name = tokens.at(behind), tokens.at(behind + 1)
    if mark not in ("*", "&") or not (_IDENTIFIER.match(name) or name == ")"):
        return []
    before = position - 1
    while tokens.at(before) in ("const", "volatile", "::", "metal"):
        before -= 1
    if tokens.at(before) in ("", ";", "{", "}", "(", ",", "<"):
        return [f"pointer type must have an explicit address space: '{tokens.at(position)} {mark}'"]
    return []

"""Splits Metal text into tokens, so that the rewriting steps need not know C++'s grammar."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    [ \t]*\#[ \t]*(?:line|include|pragma|if|ifdef|ifndef|else|elif|endif|undef|error|define)\b
        (?:\\\n|[^\n])*
    | //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | \s+
    | [A-Za-z_]\w*
    | (?:0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\w*
    | :: | -> | <<= | >>= | [-+*/%&|^<>=!]= | && | \|\| | \+\+ | -- | << | .
    """,
    re.S | re.X,
)
_SILENT = ("//", "/*", "#")


@dataclass
class Tokens:
    """All tokens of a text, and the indices of those that matter to the compiler."""

    all: list[str]
    lines: list[int]
    code: list[int]

    @classmethod
    def of(cls, text: str) -> "Tokens":
        """Split a text; joining ``all`` gives it back."""
        tokens, lines, line = _TOKEN.findall(text), [], 1
        for token in tokens:
            lines.append(line)
            line += token.count("\n")
        code = [
            i
            for i, token in enumerate(tokens)
            if not token.isspace() and not (token.lstrip().startswith(_SILENT) and token != "#")
        ]
        return cls(tokens, lines, code)

    def at(self, position: int) -> str:
        """The token at a position in ``code``; empty outside."""
        return self.all[self.code[position]] if 0 <= position < len(self.code) else ""

    def line(self, position: int) -> int:
        """The line of the token at a position in ``code``."""
        return self.lines[self.code[position]]

    def close(self, position: int) -> int:
        """The position of the bracket that closes the one at ``position``."""
        opening, depth = self.at(position), 0
        closing = {"(": ")", "{": "}", "[": "]", "<": ">"}[opening]
        while position < len(self.code):
            depth += (self.at(position) == opening) - (self.at(position) == closing)
            if depth == 0:
                return position
            position += 1
        raise ValueError(f"no {closing} for {opening}")

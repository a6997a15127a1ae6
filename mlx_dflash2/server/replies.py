"""Answers in OpenAI's form, whole or in chunks."""

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .job import REASONING, Outcome, Piece, TokenLogprobs
from .schema import Request

TOOL = "tool"
# What mlx-lm's parsers raise for a call that is cut short or malformed.
PARSE_ERRORS = (AttributeError, LookupError, SyntaxError, TypeError, ValueError)


class ToolCalls:
    """Tool calls as they come out of an answer, parsed by the model's own parser.

    Args:
        parser (callable, optional): mlx-lm's, of the text of a call and the request's tools.
        tools (list, optional): The request's tools.
    """

    def __init__(self, parser: Callable[..., Any] | None, tools: list[dict[str, Any]] | None):
        self.parser, self.tools, self.count = parser, tools, 0

    def parse(self, text: str) -> list[dict[str, Any]] | None:
        """Calls of one section, or ``None`` if it cannot be understood."""
        if self.parser is None:
            return None
        try:
            found = self.parser(text, self.tools)
            found = found if isinstance(found, list) else [found]
            calls = [self._call(dict(call)) for call in found]
        except PARSE_ERRORS:
            return None
        self.count += len(calls)
        return calls

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": call.get("id") or f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False),
            },
        }


class Reply:
    """Puts one answer together.

    Args:
        request (Request): What was asked for.
        model (str): The name that the target is called by.
        fingerprint (str): Of the software.
        tokenizer (TokenizerWrapper): The target's tokenizer.
    """

    def __init__(self, request: Request, model: str, fingerprint: str, tokenizer: TokenizerWrapper):
        self.request, self.tokenizer = request, tokenizer
        prefix, kind = (
            ("chatcmpl", "chat.completion") if request.chat else ("cmpl", "text_completion")
        )
        self.frame = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.tools = ToolCalls(tokenizer.tool_parser, request.tools)
        self.parts: dict[str, Any] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.offset = 0
        self._state, self._tool_text = "", ""

    def add(self, piece: Piece) -> None:
        """Take in what a round has added."""
        self.logprobs += piece.logprobs
        for state, text in piece.segments:
            if self._state == TOOL and state != TOOL:
                self._end_tool()
            self._state = state
            if state == TOOL:
                self._tool_text += text
            elif text:
                name = "reasoning" if state == REASONING else "content"
                self.parts[name] = self.parts.get(name, "") + text

    def end(self, outcome: Outcome) -> str:
        """Take in the end, and tell its reason in OpenAI's words."""
        if self._state == TOOL:
            self._end_tool()
        if outcome.finish_reason == "stop" and self.tools.count:
            return "tool_calls"
        return outcome.finish_reason

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """The answer in one."""
        reason = self.end(outcome)
        choice = self._choice(reason, "message", {"role": "assistant", "content": None})
        return self.frame | {
            "choices": [choice],
            "usage": usage(outcome),
            "timings": timings(outcome),
        }

    def chunk(self, outcome: Outcome | None = None) -> dict[str, Any] | None:
        """What was added since the last chunk; ``None`` if that is nothing to be sent."""
        reason = None if outcome is None else self.end(outcome)
        if reason is None and not self.parts and not self.logprobs:
            return None
        if reason is None and not self.parts and self.request.chat and self._state == TOOL:
            # Tool calls are sent whole, and the log probabilities of their tokens with them.
            return None
        choice = self._choice(reason, "delta", {})
        tail = {} if outcome is None else {"timings": timings(outcome)}
        return self.frame | {"choices": [choice]} | tail

    def opening(self) -> dict[str, Any]:
        """The chunk that begins a chat's answer."""
        delta = {"role": "assistant", "content": ""}
        return self.frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def usage_chunk(self, outcome: Outcome) -> dict[str, Any]:
        """The chunk with the counts, where the client asked for one."""
        return self.frame | {"choices": [], "usage": usage(outcome)}

    def _end_tool(self) -> None:
        text, self._tool_text, self._state = self._tool_text, "", ""
        first = self.tools.count
        calls = self.tools.parse(text)
        if calls is None:
            # Better seen than lost.
            self.parts["content"] = self.parts.get("content", "") + text
            return
        if self.request.stream:
            calls = [call | {"index": first + i} for i, call in enumerate(calls)]
        self.parts.setdefault("tool_calls", []).extend(calls)

    def _choice(self, reason: str | None, name: str, message: dict[str, Any]) -> dict[str, Any]:
        parts, self.parts = self.parts, {}
        found, self.logprobs = self.logprobs, []
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        text = parts.get("content", "")
        if self.request.chat:
            choice[name] = message | parts
            if found:
                choice["logprobs"] = {"content": [self._chat_logprobs(x) for x in found]}
        else:
            choice["text"] = text
            if found:
                choice["logprobs"] = self._text_logprobs(found)
        return choice

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _chat_logprobs(self, found: TokenLogprobs) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._text_of(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        top = [entry(*pair) for pair in found.top]
        return entry(found.token, found.logprob) | {"top_logprobs": top}

    def _text_logprobs(self, found: list[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._text_of(x.token) for x in found]
        offsets = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [x.logprob for x in found],
            "top_logprobs": [{self._text_of(t): p for t, p in x.top} for x in found],
            "text_offset": offsets,
        }


def usage(outcome: Outcome) -> dict[str, Any]:
    """Counts of tokens, with OpenAI's own names for drafts."""
    stats = outcome.stats
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }


def timings(outcome: Outcome) -> dict[str, Any]:
    """Times and drafts under llama.cpp's names, and why drafting or the schema stopped."""
    stats = outcome.stats
    prompt, answer = outcome.prompt_tokens - outcome.cached_tokens, outcome.completion_tokens
    found: dict[str, Any] = {
        "cache_n": outcome.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": 1000 * outcome.prompt_time,
        "prompt_per_second": _rate(prompt, outcome.prompt_time),
        "predicted_n": answer,
        "predicted_ms": 1000 * outcome.generation_time,
        "predicted_per_second": _rate(max(0, answer - 1), outcome.generation_time),
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "rounds": stats.rounds,
        "acceptance_length": stats.acceptance_length,
    }
    if outcome.fallback is not None:
        found["draft_stopped"] = outcome.fallback
    if outcome.problem is not None:
        found["schema_stopped"] = outcome.problem
    return found


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0

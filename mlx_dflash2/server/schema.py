"""What a request may hold: each field checked once, before anything else sees it."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError, invalid

MOST_STOPS, LONGEST_STOP = 16, 1024
MOST_TOP_LOGPROBS = 20
# Arguments of `apply_chat_template` that are not the template's own.
_NOT_FOR_TEMPLATES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
    "truncation",
}
# Fields of OpenAI's that would change the answer, and the values that do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}


@dataclass(frozen=True)
class Defaults:
    """What the command line says about requests, and what the pair allows.

    ``draft_names`` are the names of the drafter; ``max_draft_tokens`` and ``vocab_size`` are the
    pair's. The others are values of fields that a request leaves out.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    vocab_size: int
    max_draft_tokens: int
    draft_names: frozenset[str]
    drafts: bool = True
    adapter: str | None = None


@dataclass
class Request:
    """A request whose fields have been checked."""

    chat: bool
    model: str | None
    max_tokens: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]] | None = None
    role_mapping: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    processors: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    json_schema: str | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    verify_width: int | None = None

    @property
    def request_type(self) -> str:
        """The same as ``chat`` in mlx-lm's words."""
        return "chat" if self.chat else "text"


def parse_request(body: Any, chat: bool, defaults: Defaults) -> Request:
    """Check the body of a request.

    Args:
        body: The decoded JSON.
        chat (bool): Whether it is a chat, or a text to be continued.
        defaults (Defaults): Of this server.

    Raises:
        ApiError: naming the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "The body has to be a JSON object.")
    fields = Fields(body)
    fields.refuse_unsupported()
    if fields.take("adapters", str) not in (None, defaults.adapter):
        raise invalid(
            "adapters", "`adapters` has to be the adapter that the server was started with."
        )
    stream_options = fields.take("stream_options", dict) or {}
    most = fields.number("max_completion_tokens", None, 1, kind=int)
    return Request(
        chat=chat,
        model=fields.take("model", str),
        max_tokens=most or fields.number("max_tokens", defaults.max_tokens, 1, kind=int),
        **(_chat_fields(fields) if chat else {"prompt": _prompt(fields, defaults.vocab_size)}),
        **_logprobs(fields, chat),
        sampling=_sampling(fields, defaults),
        processors=_processors(fields, defaults.vocab_size),
        seed=fields.number("seed", None, 0, 2**64 - 1, int),
        json_schema=_json_schema(fields),
        stop=_stop(fields),
        stream=fields.take("stream", bool) or False,
        include_usage=Fields(stream_options).take("include_usage", bool) or False,
        verify_width=_verify_width(fields, defaults),
    )


class Fields:
    """The fields of an object; ``null`` stands for one that is left out."""

    def __init__(self, body: dict[str, Any]):
        self.body = body

    def take(self, name: str, *kinds: type) -> Any:
        """A field of one of some types, ``None`` where it is left out."""
        value = self.body.get(name)
        if value is None or type(value) in kinds:
            return value
        names = {str: "a string", bool: "a boolean", dict: "an object", list: "an array"}
        names |= {int: "an integer", float: "a number"}
        wanted = " or ".join(names[kind] for kind in kinds)
        raise invalid(name, f"`{name}` has to be {wanted}.")

    def number(
        self,
        name: str,
        default: Any,
        low: float,
        high: float = math.inf,
        kind: type = float,
    ) -> Any:
        """A number from ``low`` to ``high``."""
        kinds = (int,) if kind is int else (float, int)
        value = self.take(name, *kinds)
        if value is None:
            return default
        # Larger integers do not even become floats.
        if not low <= value <= min(high, 2.0**64) or value < -(2.0**64):
            limit = f"from {low} to {high}" if high < math.inf else f"{low} or more"
            limit = "finite" if low == -math.inf else limit
            raise invalid(name, f"`{name}` is {value} but has to be {limit}.")
        return value

    def refuse_unsupported(self) -> None:
        """Raise for fields whose effect a client would miss."""
        for name, harmless in _UNSUPPORTED.items():
            value = self.body.get(name)
            if value is not None and value not in harmless:
                raise invalid(name, f"`{name}` is not supported.", "unsupported_parameter")


def _sampling(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    top_k = fields.number("top_k", defaults.top_k, 0, kind=int)
    if top_k >= defaults.vocab_size:
        raise invalid("top_k", f"`top_k` is {top_k} but has to be below {defaults.vocab_size}.")
    return {
        "temp": fields.number("temperature", defaults.temperature, 0),
        "top_p": fields.number("top_p", defaults.top_p, 0, 1),
        "top_k": top_k,
        "min_p": fields.number("min_p", defaults.min_p, 0, 1),
        "xtc_probability": fields.number("xtc_probability", 0.0, 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", 0.1, 0, 0.5),
    }


def _processors(fields: Fields, vocab_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"logit_bias": _logit_bias(fields, vocab_size)}
    for name, low in (("repetition", 0.0), ("presence", -math.inf), ("frequency", -math.inf)):
        options[f"{name}_penalty"] = fields.number(f"{name}_penalty", 0.0, low)
        options[f"{name}_context_size"] = fields.number(f"{name}_context_size", 20, 0, kind=int)
    return options


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float] | None:
    given = fields.take("logit_bias", dict)
    if not given:
        return None
    biases = Fields(given)
    for key in given:
        if not key.isascii() or not key.isdigit() or int(key) >= vocab_size:
            raise invalid(
                "logit_bias",
                f"`logit_bias` names token {key!r} but has to name tokens from 0 to "
                f"{vocab_size - 1}.",
            )
    return {int(key): float(biases.number(key, 0.0, -math.inf)) for key in given}


def _stop(fields: Fields) -> list[str]:
    stop = fields.take("stop", str, list)
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MOST_STOPS:
        raise invalid(
            "stop", f"`stop` has {len(stops)} strings but at most {MOST_STOPS} are allowed."
        )
    for text in stops:
        if type(text) is not str or not 0 < len(text) <= LONGEST_STOP:
            raise invalid("stop", f"`stop` has to hold strings of 1 to {LONGEST_STOP} characters.")
    return stops


def _json_schema(fields: Fields) -> str | None:
    """The schema that an answer has to follow, as JSON."""
    given = fields.take("response_format", dict)
    if given is None:
        return None
    kind, described = given.get("type"), given.get("json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    if kind != "json_schema":
        raise invalid(
            "response_format",
            f"`response_format.type` is {kind!r} but has to be 'text', 'json_object' or "
            "'json_schema'.",
        )
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise invalid(
            "response_format", "`response_format.json_schema.schema` has to be an object."
        )
    return json.dumps(schema)


def _logprobs(fields: Fields, chat: bool) -> dict[str, Any]:
    """OpenAI's two forms: a boolean and ``top_logprobs``, or in completions a number."""
    wanted = fields.take("logprobs", bool, int)
    if wanted is None or type(wanted) is bool:
        # mlx-lm's clients say -1 for none.
        top = fields.number("top_logprobs", 0, -1, MOST_TOP_LOGPROBS, int)
    elif chat:
        raise invalid("logprobs", "`logprobs` has to be a boolean.")
    else:
        top = fields.number("logprobs", 0, 0, MOST_TOP_LOGPROBS, int)
        wanted = True
    return {"logprobs": bool(wanted) or top > 0, "top_logprobs": max(0, top)}


def _verify_width(fields: Fields, defaults: Defaults) -> int | None:
    """Rows to verify, where the request says it: 1 does not draft."""
    drafts = fields.take("draft", bool)
    if "draft_model" in fields.body:
        name = fields.take("draft_model", str)
        if name is not None and name not in defaults.draft_names:
            raise ApiError(
                404,
                f"The draft model {name!r} is not served.",
                param="draft_model",
                code="model_not_found",
            )
        drafts = False if name is None else drafts
    count = fields.number("num_draft_tokens", None, 0, defaults.max_draft_tokens, int)
    if count is None and drafts is None:
        drafts = defaults.drafts
    if drafts is False:
        return 1
    return None if count is None else count + 1


def _prompt(fields: Fields, vocab_size: int) -> str | list[int]:
    prompt = fields.take("prompt", str, list)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not prompt:
        raise invalid("prompt", "`prompt` is missing or empty.", "missing_required_parameter")
    if isinstance(prompt, str):
        return prompt
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(
                "prompt",
                "`prompt` has to be a string, or an array of token ids from 0 to "
                f"{vocab_size - 1}; several prompts are not supported.",
            )
    return prompt


def _chat_fields(fields: Fields) -> dict[str, Any]:
    messages = fields.take("messages", list)
    if not messages:
        raise invalid("messages", "`messages` is missing or empty.", "missing_required_parameter")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    mapping = fields.take("role_mapping", dict)
    if mapping and not all(type(text) is str for text in mapping.values()):
        raise invalid("role_mapping", "`role_mapping` has to map roles to strings.")
    kwargs = fields.take("chat_template_kwargs", dict)
    for name in sorted(_NOT_FOR_TEMPLATES & set(kwargs or ())):
        raise invalid("chat_template_kwargs", f"`chat_template_kwargs` may not set {name!r}.")
    return {
        "messages": messages,
        "tools": _tools(fields),
        "role_mapping": mapping,
        "chat_template_kwargs": kwargs,
    }


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict) or type(message.get("role")) is not str:
        raise invalid(where, f"`{where}` has to be an object with a `role`.")
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or type(part.get("text")) is not str:
            raise invalid(
                f"{where}.content",
                f"`{where}.content` holds a part of type {kind!r} but only text is supported.",
            )
    if content is not None and not isinstance(content, list | str):
        raise invalid(f"{where}.content", f"`{where}.content` has to be a string or an array.")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", f"`{where}.tool_calls` has to be an array.")
    for call in calls or ():
        _check_tool_call(f"{where}.tool_calls", call)


def _check_tool_call(where: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or type(function.get("name")) is not str:
        raise invalid(where, f"`{where}` has to hold objects with a `function` and its `name`.")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        _guarded(where, lambda: json.loads(arguments))


def _guarded(where: str, read: Callable[[], Any]) -> None:
    try:
        read()
    except (ValueError, RecursionError) as error:
        raise invalid(where, f"`{where}` holds arguments that are not valid JSON.") from error


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = fields.take("tools", list)
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or type(function.get("name")) is not str:
            raise invalid("tools", "`tools` has to hold objects with a `function` and its `name`.")
    choice = fields.take("tool_choice", str, dict)
    if choice == "none":
        return None
    if choice not in (None, "auto"):
        raise invalid(
            "tool_choice",
            "`tool_choice` has to be 'auto' or 'none'.",
            "unsupported_parameter",
        )
    return tools or None

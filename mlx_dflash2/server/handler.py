"""The routes, and one client's conversation with them."""

import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from queue import Empty
from typing import Any

from mlx_lm.server import APIHandler

from . import metrics
from .access import Access
from .connection import decode_json, is_gone, linger, read_body
from .errors import ApiError
from .generator import Generator
from .job import Job, Outcome, Piece
from .limits import SOCKET_SECONDS, Queue
from .pair import DEFAULT_MODEL
from .replies import Reply
from .schema import Defaults, parse_request

# How often a waiting connection looks whether its client is still there, and says that it is.
LOOK_SECONDS, KEEPALIVE_SECONDS = 0.25, 5.0
CHATS = ("/v1/chat/completions", "/chat/completions")
TEXTS = ("/v1/completions", "/completions")
PLACES = ("/health", "/v1/models", "/models", "/metrics")


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Handler(APIHandler):
    """Answers one request.

    Args:
        response_generator (Generator): Answers jobs.
        access (Access): Who may talk to the server.
        queue (Queue): Who may be inside.
        defaults (Defaults): Of the requests' fields.
        system_fingerprint (str): Of the software.
    """

    server_version, sys_version = "mlx_dflash2", ""
    # Of a line that is no request at all; before it, answers have no headers.
    default_request_version = "HTTP/1.0"
    timeout = SOCKET_SECONDS
    response_generator: Generator

    def __init__(
        self,
        response_generator: Generator,
        *args: Any,
        access: Access,
        queue: Queue,
        defaults: Defaults,
        system_fingerprint: str,
        **kwargs: Any,
    ):
        self.access, self.queue, self.defaults = access, queue, defaults
        self.begun = False
        super().__init__(response_generator, *args, system_fingerprint=system_fingerprint, **kwargs)

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    def do_OPTIONS(self) -> None:
        """Tell a web page whether it may send its request."""
        self._answer(lambda: self._send(HTTPStatus.NO_CONTENT, b""), needs_key=False)

    def do_GET(self) -> None:
        """Answer what can be asked without a body."""
        routes: dict[str, Callable[[], None]] = {
            "/health": self.handle_health_check,
            "/v1/models": self.handle_models_request,
            "/models": self.handle_models_request,
            "/metrics": self.handle_metrics,
        }
        found = routes.get(self.route)
        if found is None and self.route.startswith("/v1/models/"):
            found = self.handle_model_request
        if found is None:
            found = self._refuse_route((*CHATS, *TEXTS), "POST")
        self._answer(found, needs_key=self.route != "/health")

    def do_POST(self) -> None:
        """Answer a request to generate."""
        if self.route in CHATS + TEXTS:
            self._answer(self.handle_generation)
        else:
            self._answer(self._refuse_route(PLACES, "GET"))

    def handle_generation(self) -> None:
        """Generate, and send the answer whole or in chunks."""
        headers = self.headers
        body = read_body(
            self.rfile, headers.get("Content-Length"), headers.get("Transfer-Encoding")
        )
        request = parse_request(decode_json(body), self.route in CHATS, self.defaults)
        provider = self.response_generator.model_provider
        provider.check_model(request.model)
        logging.debug("Request: %s", body.decode())
        with self.queue.place():
            job = self.response_generator.prepare(request, lambda: is_gone(self.connection))
            name = request.model if request.model not in (None, DEFAULT_MODEL) else provider.name
            reply = Reply(request, name, self.system_fingerprint, provider.tokenizer)
            self.response_generator.submit(job)
            try:
                self._stream(job, reply) if request.stream else self._send_whole(job, reply)
            finally:
                job.cancel()

    def handle_health_check(self) -> None:
        """Say whether requests are answered."""
        healthy = self.response_generator.is_healthy and self.queue.open
        status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        self._send_json({"status": "ok" if healthy else "unavailable"}, status)

    def handle_models_request(self) -> None:
        """List the model."""
        self._send_json({"object": "list", "data": [self._model()]})

    def handle_model_request(self) -> None:
        """Tell about the model under one of its names."""
        provider = self.response_generator.model_provider
        provider.check_model(self.route.removeprefix("/v1/models/"))
        self._send_json(self._model())

    def handle_metrics(self) -> None:
        """Tell what has been counted."""
        text = self.response_generator.metrics.text()
        self._send(HTTPStatus.OK, text, {"Content-Type": metrics.CONTENT_TYPE})

    def _model(self) -> dict[str, Any]:
        provider = self.response_generator.model_provider
        return {
            "id": provider.name,
            "object": "model",
            "created": self.created,
            "owned_by": "mlx_dflash2",
            "draft_model": provider.draft_names[0],
            "context_length": provider.context_length,
        }

    def _refuse_route(self, others: tuple[str, ...], method: str) -> Callable[[], None]:
        def refuse() -> None:
            if self.route in others:
                raise ApiError(405, f"{self.route} takes {method}.", headers={"Allow": method})
            raise ApiError(404, "There is no such route.")

        return refuse

    def _answer(self, respond: Callable[[], None], needs_key: bool = True) -> None:
        """Respond, or say what is wrong."""
        try:
            self.access.check(self.headers, needs_key)
            respond()
        except ApiError as error:
            self._send_error(error)
        except (ClientGone, OSError):
            # What was generated until now is in the prompt cache.
            self.close_connection = True
            logging.info("The client of %s hung up.", self.route)

    def _send_error(self, error: ApiError) -> None:
        if self.begun:
            self._send_event(error.body())
            return
        self._send_json(error.body(), error.status, error.headers)
        linger(self.connection)

    def _send_json(self, content: Any, status: int = HTTPStatus.OK, headers: Any = ()) -> None:
        data = json.dumps(content).encode()
        self._send(status, data, {"Content-Type": "application/json", **dict(headers)})

    def _send(self, status: int, data: bytes, headers: Any = ()) -> None:
        self._begin(status, {"Content-Length": str(len(data)), **dict(headers)})
        self.wfile.write(data)
        self.wfile.flush()

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.begun = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()

    def _set_cors_headers(self) -> None:
        headers = getattr(self, "headers", None)
        origin = None if headers is None else headers.get("Origin")
        if origin is not None and self.access.allows_origin(origin):
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS")
            self.send_header("Access-Control-Allow-Headers", "Authorization, Content-Type")
        self.send_header("Vary", "Origin")

    def _next_event(self, job: Job) -> Piece | Outcome | None:
        """What a job has to say; ``None`` if it has been silent for a while."""
        for _ in range(int(KEEPALIVE_SECONDS / LOOK_SECONDS)):
            if is_gone(self.connection):
                raise ClientGone
            try:
                event = job.events.get(timeout=LOOK_SECONDS)
            except Empty:
                if not self.response_generator.is_healthy:
                    raise ApiError(500, "The generation has stopped working.") from None
                continue
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, BaseException):
                raise ApiError(500, f"The generation failed: {event}") from event
            return event
        return None

    def _send_whole(self, job: Job, reply: Reply) -> None:
        while True:
            event = self._next_event(job)
            if isinstance(event, Outcome):
                content = reply.whole(event)
                logging.debug("Answer: %s", content)
                return self._send_json(content)
            if event is not None:
                reply.add(event)

    def _stream(self, job: Job, reply: Reply) -> None:
        while True:
            event = self._next_event(job)
            if not self.begun:
                self._begin_stream(reply)
            if event is None:
                self._write(b": keepalive\n\n")
            elif isinstance(event, Outcome):
                return self._end_stream(event, reply)
            else:
                reply.add(event)
                if (chunk := reply.chunk()) is not None:
                    self._send_event(chunk)

    def _begin_stream(self, reply: Reply) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self._begin(HTTPStatus.OK, headers)
        if reply.request.chat:
            self._send_event(reply.opening())

    def _end_stream(self, outcome: Outcome, reply: Reply) -> None:
        self._send_event(reply.chunk(outcome))
        if reply.request.include_usage:
            self._send_event(reply.usage_chunk(outcome))
        self._write(b"data: [DONE]\n\n")

    def _send_event(self, content: Any) -> None:
        logging.debug("Event: %s", content)
        self._write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Say what is wrong with a request that does not reach a route."""
        text = message or HTTPStatus(code).phrase
        self.close_connection = True
        self._send_error(ApiError(code, text))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Count the request, and log a line about it without what it says."""
        status = code.value if isinstance(code, HTTPStatus) else code
        route = self.route if hasattr(self, "path") else None
        known = route if route in (*CHATS, *TEXTS, *PLACES) else "other"
        self.response_generator.metrics.count_request(known, int(status))
        logging.info("%s %r %s", getattr(self, "command", None), route, status)

    def log_error(self, format: str, *args: Any) -> None:
        """Log nothing more: the message may hold parts of the request."""

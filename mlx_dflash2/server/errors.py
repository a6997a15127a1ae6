"""Errors that a client sees, in OpenAI's form."""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is answered by an error.

    Args:
        status (int): The HTTP status.
        message (str): One line for the client.
        param (str, optional): The field of the request that is at fault.
        code (str, optional): A name that programs can compare.
        headers (mapping): More headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = HTTPStatus(status), message, param, code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """An error of one field of a request."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)

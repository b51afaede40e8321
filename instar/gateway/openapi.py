"""The gateway's OpenAPI description, which is derived from its routes and wire types."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from instar import __version__
from instar.gateway.auth import GATEWAY_KEY_HEADER, SDK_KEY_HEADERS
from instar.gateway.base import SESSION_HEADER, TokenCount
from instar.gateway.dialects.base import Dialect
from instar.gateway.pipeline.parse import SESSION_HEADERS
from instar.types import Json

PREFIXES = ("/v1", "/s/{session}/v1")
"""The prefixes of the routes that agents use. The second one selects a session."""
_JSON = "application/json"
_CALL_HEADERS = (SESSION_HEADER, "idempotency-key", "x-stainless-retry-count", *SESSION_HEADERS)
_ERROR_DESCRIPTIONS = {
    "4XX": "The request was rejected.",
    "502": "The engine or the provider failed.",
    "503": "The engine, the provider or the store is not available; retry later.",
    "504": "The model did not reply in time.",
}

_STRING: Json = {"type": "string"}
_STRING_OR_NULL: Json = {"type": ["string", "null"]}
_ERROR_FIELDS: Json = {"message": _STRING, "type": _STRING, "param": _STRING_OR_NULL, "code": _STRING_OR_NULL}
_ERROR_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "error": {"type": "object", "properties": _ERROR_FIELDS, "required": ["message", "type"]},
        "type": {"const": "error"},
    },
    "required": ["error"],
}
"""The schema of errors in all dialects. Only Anthropic's errors have a ``type`` next to ``error``."""


class ApiRoute(Route):
    """A route of the control API. The first line of the handler's docstring is the route's summary."""

    def __init__(
        self,
        path: str,
        handler: Callable[..., Awaitable[Response]],
        response_type: type,
        *,
        body_type: type | None = None,
        query: Sequence[str] = (),
        is_public: bool = False,
        method: Literal["GET", "POST", "DELETE"] | None = None,
    ) -> None:
        """Create a route, by default a GET route, or a POST route if ``body_type`` is set. A POST handler
        gets the body type as its first argument. ``query`` lists the query parameters. A public route needs
        no key."""
        self.response_type = response_type
        self.body_type = body_type
        self.query = query
        self.is_public = is_public
        self.method = method or ("GET" if body_type is None else "POST")
        self.summary = (inspect.getdoc(handler) or "").partition("\n")[0]
        endpoint: Callable[[HttpRequest], Awaitable[Response]]
        endpoint = handler if body_type is None else partial(handler, body_type)
        super().__init__(path, endpoint, methods=[self.method])


def describe_api(routes: Sequence[BaseRoute], dialects: Sequence[Dialect]) -> Json:
    control_routes = [route for route in routes if isinstance(route, ApiRoute)]
    types = {TokenCount, *(route.response_type for route in control_routes)}
    types |= {route.body_type for route in control_routes if route.body_type is not None}
    types |= {dialect.decoder.type for dialect in dialects} | {dialect.response_type for dialect in dialects}
    ordered = sorted(types, key=lambda type_: (type_.__name__, type_.__module__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    references = dict(zip(ordered, schemas, strict=True))
    for dialect in dialects:
        name = references[dialect.decoder.type]["$ref"].rpartition("/")[2]
        _add_ranges(components[name]["properties"], dialect.ranges)
    paths: dict[str, Json] = {}
    for route in control_routes:
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _describe_route(path, route, references)
    for dialect in dialects:
        for prefix in PREFIXES:
            for path in filter(None, (dialect.path, dialect.count_path)):
                path = prefix + path
                paths[path] = {"post": _describe_call(path, dialect, references)}
    key_headers = [GATEWAY_KEY_HEADER, *sorted(SDK_KEY_HEADERS - {"authorization"})]
    keys = {name: {"type": "apiKey", "in": "header", "name": name} for name in key_headers}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Instar gateway", "version": __version__},
        "security": [{"bearer": []}, *({name: []} for name in keys)],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR_SCHEMA},
            "parameters": {name: _describe_parameter("header", name) for name in _CALL_HEADERS},
            "responses": {
                f"Error{status}": _describe_response(text, {_JSON: {"$ref": "#/components/schemas/Error"}})
                for status, text in _ERROR_DESCRIPTIONS.items()
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, **keys},
        },
    }


def _describe_route(path: str, route: ApiRoute, references: Mapping[type, Json]) -> Json:
    content = {_JSON: references[route.response_type]}
    # 2XX, because some routes respond with 200, some with 201, and feedback with either.
    success = _describe_response("The request succeeded.", content)
    operation = _describe_operation(route.method, path, route.summary, route.query)
    operation["responses"] = {"2XX": success, **_describe_failures(("4XX", "502", "503"))}
    if route.body_type is not None:
        operation["requestBody"] = _describe_body(references[route.body_type])
    if route.is_public:
        operation["security"] = []
    return operation


def _describe_call(path: str, dialect: Dialect, references: Mapping[type, Json]) -> Json:
    if dialect.count_path and path.endswith(dialect.count_path):
        summary = f"Count the tokens of a {dialect.name} API request."
        success = _describe_response("The number of tokens.", {_JSON: references[TokenCount]})
    else:
        summary = f"Call a model with the {dialect.name} API."
        content: dict[str, Json] = {_JSON: references[dialect.response_type], dialect.stream_content_type: {}}
        success = _describe_response("The reply, which is streamed on request.", content)
    operation = _describe_operation("POST", path, summary)
    operation["parameters"] += [{"$ref": f"#/components/parameters/{name}"} for name in _CALL_HEADERS]
    operation["requestBody"] = _describe_body(references[dialect.decoder.type])
    operation["responses"] = {"200": success, **_describe_failures(_ERROR_DESCRIPTIONS)}
    return operation


def _describe_operation(method: str, path: str, summary: str, query: Sequence[str] = ()) -> dict[str, Any]:
    parameters = [_describe_parameter("path", name) for name in re.findall(r"{(\w+)}", path)]
    return {
        "operationId": method.lower() + re.sub(r"\W+", "_", path).rstrip("_"),
        "summary": summary,
        "parameters": [*parameters, *(_describe_parameter("query", name) for name in query)],
    }


def _describe_parameter(location: str, name: str) -> Json:
    return {"name": name, "in": location, "required": location == "path", "schema": _STRING}


def _describe_body(schema: Json) -> Json:
    return {"required": True, "content": {_JSON: {"schema": schema}}}


def _describe_response(text: str, content: Mapping[str, Json]) -> Json:
    return {"description": text, "content": {name: {"schema": schema} for name, schema in content.items()}}


def _describe_failures(statuses: Iterable[str]) -> Json:
    return {status: {"$ref": f"#/components/responses/Error{status}"} for status in statuses}


def _add_ranges(properties: dict[str, Json], ranges: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in ranges.items():
        for schema in properties[name].get("anyOf", [properties[name]]):
            if schema.get("type") in ("integer", "number"):
                schema["minimum"] = low
                if high != math.inf:
                    schema["maximum"] = high

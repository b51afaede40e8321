"""Authentication, requests and error responses of Tinker's protocol.

Clients whose keys do not have Tinker's format, such as MinT's `sk-` keys, exchange the key for a token. The
token is signed with the key, so the server does not store it, and it remains valid after a restart.

Tinker's clients retry 408, 409, 429 and 5xx for minutes, and raise 404 and 422 immediately. Retrying does not
help when a sequence id is taken, so the server sends 422 instead of 409.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from instar.http.auth import hash_key
from instar.protocol.base import ProtocolError
from instar.protocol.http import KeyStore, ProtocolRouter, json_response, parse_json, read_body
from instar.protocol.tinker.results import PROTOBUF
from instar.types import Json

BODY_TIMEOUT_SECONDS = 60.0
KEY_HEADER = "X-API-Key"
KEY_PREFIX = "tml-"
"""Tinker's own clients accept only keys with this prefix."""
TOKEN_TTL_SECONDS = 3600.0
_JWT_PREFIX = "eyJ"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TinkerRequest:
    http: Request
    owner: str
    body: bytes

    def parse(self, message_type: type[T]) -> T:
        return parse_json(self.body, message_type)

    def path_param(self, name: str) -> str:
        return str(self.http.path_params[name])

    def query_int(self, name: str, default: int) -> int:
        text = self.http.query_params.get(name, str(default))
        if not text.isdecimal():
            raise ProtocolError(f"{name} must be a non-negative integer, got {text!r}")
        return int(text)

    @property
    def has_tinker_key(self) -> bool:
        """True if the key has Tinker's prefix or is a token. Other keys must be exchanged for a token."""
        return self.http.headers.get(KEY_HEADER, "").startswith((KEY_PREFIX, _JWT_PREFIX))

    @property
    def is_protobuf(self) -> bool:
        return self.http.headers.get("content-type", "").startswith(PROTOBUF)

    @property
    def idempotency_key(self) -> str | None:
        return self.http.headers.get("x-idempotency-key")


TinkerRouter = ProtocolRouter[TinkerRequest]


def create_router(key_store: KeyStore, max_body: int) -> TinkerRouter:
    async def parse_request(http_request: Request, owner: str) -> TinkerRequest:
        if http_request.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(
                "compressed request bodies are not supported; send the body without Content-Encoding", 415
            )
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                return TinkerRequest(http_request, owner, await read_body(http_request, max_body))
        except TimeoutError as error:
            raise ProtocolError(
                f"the request body did not arrive within {BODY_TIMEOUT_SECONDS:g} s; send it again", 408
            ) from error

    return TinkerRouter(key_store, parse_request, _error_response)


def _error_response(error: ProtocolError) -> Response:
    status = 422 if error.status == 409 else error.status
    return json_response({"detail": str(error), "category": error.category}, status)


class TinkerKeyStore(KeyStore):
    def __init__(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        super().__init__(keys, KEY_HEADER)
        self._owner_keys = {hash_key(key): key.encode("utf-8", "surrogatepass") for key in keys}

    def issue_token(self, owner: str) -> str:
        """Return a JWT that is accepted in place of the owner's key until it expires."""
        claims = {
            "iss": "instar",
            "sub": f"tml:user:{owner[:16]}",
            "org_id": "instar",
            "owner": owner,
            "exp": time.time() + TOKEN_TTL_SECONDS,
        }
        signing_input = f"{_encode_jwt_part({'alg': 'HS256', 'typ': 'JWT'})}.{_encode_jwt_part(claims)}"
        return f"{signing_input}.{self._sign(owner, signing_input)}"

    def _find_owner(self, key: str) -> str | None:
        owner = super()._find_owner(key)
        if owner is None and key.startswith(_JWT_PREFIX):
            return self._verify_token(key)
        return owner

    def _verify_token(self, token: str) -> str | None:
        signing_input, _, signature = token.rpartition(".")
        claims = _decode_jwt_part(signing_input.partition(".")[2])
        owner, expires_at = claims.get("owner"), claims.get("exp")
        if not isinstance(owner, str) or owner not in self._owner_keys or not isinstance(expires_at, float):
            return None
        is_signed = hmac.compare_digest(self._sign(owner, signing_input).encode(), signature.encode())
        return owner if is_signed and time.time() < expires_at else None

    def _sign(self, owner: str, signing_input: str) -> str:
        message = signing_input.encode("utf-8", "surrogatepass")
        digest = hmac.new(self._owner_keys[owner], message, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _encode_jwt_part(value: Json) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(value)).decode().rstrip("=")


def _decode_jwt_part(text: str) -> Json:
    """Decode a base64url-encoded JSON object. Return {} if the text is anything else."""
    try:
        value = orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

"""Tests for `HttpClient` against a real server, and for the functions that check keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

from instar.http.auth import find_key_hash, has_bearer_token, hash_key
from instar.http.client import HttpClient, NoResponse

SECRET = "sk-secret"


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), headers={"X-Key": request.headers.get("X-Key", "")})


async def unavailable(_: web.Request) -> web.Response:
    return web.Response(status=503, text="come back later", headers={"Retry-After": "7"})


async def redirect(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": "/echo"})


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
async def url() -> AsyncGenerator[str]:
    app = web.Application()
    for handler in (echo, unavailable, redirect, hang):
        app.router.add_post(f"/{handler.__name__}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture(params=[15.0, 0.0])
async def client(request: pytest.FixtureRequest) -> AsyncGenerator[HttpClient]:
    client = HttpClient(headers={"X-Key": SECRET}, keep_alive=request.param, secret=SECRET)
    yield client
    await client.close()


async def test_post_returns_the_complete_response(client: HttpClient, url: str) -> None:
    response = await client.post(f"{url}/echo", b"x" * 200_000)
    assert (response.status, response.body) == (200, b"x" * 200_000)
    assert response.is_success


async def test_post_to_a_busy_server_returns_its_retry_after(client: HttpClient, url: str) -> None:
    response = await client.post(f"{url}/unavailable", b"")
    assert (response.status, response.retry_after, response.excerpt(4)) == (503, 7.0, "come")
    assert not response.is_success


async def test_post_does_not_follow_redirects(client: HttpClient, url: str) -> None:
    assert (await client.post(f"{url}/redirect", b"")).status == 302


async def test_post_past_its_timeout_raises_no_response(client: HttpClient, url: str) -> None:
    with pytest.raises(NoResponse, match=r"within 0\.05 s"):
        await client.post(f"{url}/hang", b"", timeout=0.05)


async def test_post_with_a_response_over_max_bytes_raises_no_response(client: HttpClient, url: str) -> None:
    with pytest.raises(NoResponse, match="longer than 100 bytes"):
        await client.post(f"{url}/echo", b"x" * 101, max_bytes=100)


async def test_post_to_a_closed_port_raises_no_response(client: HttpClient) -> None:
    with pytest.raises(NoResponse):
        await client.post("http://127.0.0.1:9", b"")


def test_redact_removes_the_secret(client: HttpClient) -> None:
    assert client.redact(f"bad key {SECRET}") == "bad key ***"


def test_find_key_hash_returns_the_hash_of_a_known_key_only() -> None:
    hashes = [hash_key("one"), hash_key("two")]
    assert find_key_hash("two", hashes) == hash_key("two")
    assert find_key_hash("three", hashes) is None
    assert find_key_hash("\udcff", hashes) is None


def test_has_bearer_token_accepts_only_the_exact_token() -> None:
    assert has_bearer_token([(b"authorization", b"Bearer abc")], "abc")
    assert not has_bearer_token([(b"authorization", b"Bearer abcd")], "abc")
    assert not has_bearer_token([], "abc")

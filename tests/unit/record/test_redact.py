"""Texts that are redacted, and texts that are not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from instar.config import RedactConfig
from instar.errors import ConfigError
from instar.record.redact import SECRET_PATTERNS, Redactor
from instar.types import Message, Tool, ToolCall

EXAMPLES: dict[str, list[str]] = {
    "api-key": ["sk-proj-" + "aB3_" * 12, "sk-ant-api03-" + "x1-Y" * 20, "sk-" + "a1B2" * 12],
    "aws-key": ["AKIA" + "QWERTY12ASDF3456", "ASIA" + "ABCDEFGH12345678"],
    "github-token": ["ghp_" + "a1B2c3" * 6, "ghs_" + "Z9y8x7" * 6, "github_pat_" + "11AB_cd" * 8],
    "gitlab-token": ["glpat-" + "abcDEF12_-" * 2],
    "google-key": ["AIza" + "SyA1b2C3d" * 3 + "abcdefgh"],
    "huggingface-token": ["hf_" + "AbCdEfGh" * 4],
    "npm-token": ["npm_" + "a1B2c3" * 6],
    "slack-token": ["xoxb-" + "123456789012-abcDEF"],
    "stripe-key": ["sk_live_" + "a1B2" * 6, "rk_live_" + "a1B2" * 6],
    "jwt": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"],
    "private-key": [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabc=\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\ncut off he",
    ],
    "url-password": ["://ann:hunter22"],
}
CONTEXTS = ["{}", "key={}", 'export KEY="{}"\n', "({})", "a {} b", "x\n{}\ny", "`{}`,", '{{"k":"{}"}}']
REDACTOR = Redactor()


def test_redactor_patterns_all_have_an_example() -> None:
    assert set(EXAMPLES) == {secret.name for secret in SECRET_PATTERNS}


@pytest.mark.parametrize(
    ("name", "secret"), [(name, secret) for name, secrets in EXAMPLES.items() for secret in secrets]
)
def test_redactor_removes_secrets(name: str, secret: str) -> None:
    for context in CONTEXTS:
        text = context.format(secret + "@host/db" if name == "url-password" else secret)
        clean = REDACTOR.redact_text(text)
        assert f"[redacted {name}]" in clean
        hidden = secret.removeprefix("://") if name == "url-password" else secret[:40]
        assert hidden not in clean
        assert REDACTOR.redact_text(clean) == clean


def test_redactor_removes_several_secrets_from_one_text() -> None:
    secrets = [
        examples[0] for name, examples in EXAMPLES.items() if name not in ("private-key", "url-password")
    ]
    clean = REDACTOR.redact_text(" and ".join(secrets * 2))
    assert not any(secret in clean for secret in secrets)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain words",
        "task-list sk-ip the risk-assessment-of-something-quite-long-here",
        "see https://example.com:8080/a@b and git@github.com:a/b.git",
        "AKIA is a prefix, and MAKIAQWERTY12ASDF34567 is a word",
        "a PRIVATE matter",
        "hf_hub_download(repo_id, filename) and npm_config_registry",
        "-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----",
        "eyJ is how base64 of a brace begins",
        "sk-" + "word-" * 3,
    ],
)
def test_redactor_keeps_text_that_is_not_a_secret(text: str) -> None:
    assert REDACTOR.redact_text(text) is text
    message = Message(role="user", content=text)
    assert REDACTOR.redact_message(message) is message


API_KEY = EXAMPLES["api-key"][0]


@pytest.mark.parametrize(
    "message",
    [
        Message(role="user", content=API_KEY),
        Message(role="assistant", content="", reasoning=f"it is {API_KEY}"),
        Message(role="user", content="x", name=API_KEY),
        Message(role="tool", content="x", tool_call_id=API_KEY),
        *(
            Message(
                role="assistant", content="", tool_calls=[ToolCall(id="1", name="f", arguments=arguments)]
            )
            for arguments in (
                json.dumps({"key": API_KEY}),
                json.dumps({API_KEY: 1}),
                json.dumps({"a": [{"b": f"export K={API_KEY}\n"}]}),
                '{"key": "' + API_KEY.replace("s", "\\u0073", 1) + '"}',
                "{broken " + API_KEY,
            )
        ),
        Message(role="assistant", content="", tool_calls=[ToolCall(id="1", name=API_KEY, arguments="{}")]),
    ],
)
def test_redactor_searches_every_part_of_a_message(message: Message) -> None:
    clean = REDACTOR.redact_message(message)
    assert clean is not message
    dumped = json.dumps(clean)
    assert API_KEY not in dumped
    assert API_KEY.replace("s", "\\\\u0073", 1) not in dumped
    for call in clean.get("tool_calls", ()):
        if "broken" not in call["arguments"]:
            json.loads(call["arguments"])


def test_redactor_finds_passwords_after_escaped_slashes() -> None:
    arguments = r'{"url": "postgres:\/\/ann:hunter22@db\/x"}'
    message = Message(
        role="assistant", content="", tool_calls=[ToolCall(id="1", name="f", arguments=arguments)]
    )
    assert "hunter22" not in json.dumps(REDACTOR.redact_message(message))


def test_redactor_searches_tools() -> None:
    def make_tool(**parts: Any) -> Tool:
        return Tool(**{"name": "f", "description": "d", "parameters": {"type": "object"}, **parts})

    clean = (make_tool(),)
    assert REDACTOR.redact_tools(clean) is clean
    for tool_with_secret in (
        make_tool(description=f"use {API_KEY}"),
        make_tool(parameters={"properties": {"k": {"default": API_KEY}}}),
        make_tool(parameters={"properties": {API_KEY: {}}}),
        make_tool(parameters={"enum": [1, None, [API_KEY]]}),
    ):
        redacted = REDACTOR.redact_tools((make_tool(), tool_with_secret))
        assert API_KEY not in json.dumps(redacted)
        assert redacted[0] == make_tool()


def test_redactor_applies_configured_patterns() -> None:
    redactor = Redactor.from_config(RedactConfig(patterns=[r"\b\d{3}-\d{2}-\d{4}\b", r"(?i)project \w+"]))
    assert redactor.redact_text("Project Apollo, 078-05-1120") == "[redacted], [redacted]"
    assert API_KEY not in redactor.redact_text(API_KEY)
    arguments = json.dumps({"q": "Größe"})
    call = ToolCall(id="1", name="f", arguments=arguments)
    umlaut_redactor = Redactor.from_config(RedactConfig(patterns=["Größe"]))
    assert "\\u00f6" in arguments
    clean = umlaut_redactor.redact_message(Message(role="assistant", content="", tool_calls=[call]))
    assert json.loads(clean.get("tool_calls", [call])[0]["arguments"]) == {"q": "[redacted]"}


def test_redactor_keeps_secrets_if_configured() -> None:
    redactor = Redactor.from_config(RedactConfig(secrets=False, patterns=["xyz"]))
    assert redactor.redact_text(f"{API_KEY} xyz") == f"{API_KEY} [redacted]"


def test_invalid_pattern_error_includes_config_path() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.redact\.patterns\[1\]"):
        Redactor.from_config(RedactConfig(patterns=["fine", "("]))


def test_redactor_ignores_empty_matches() -> None:
    assert Redactor.from_config(RedactConfig(patterns=["x*"])).redact_text("abc") == "abc"


@pytest.mark.parametrize(
    "text",
    [
        "://" * 60_000,
        "sk-" * 60_000,
        "eyJ" * 60_000,
        "eyJ" + "a" * 200_000,
        "-----BEGIN " + "A" * 200_000 + "PRIVATE",
        "-----BEGIN PRIVATE KEY-----" * 8_000,
        "://a:" * 40_000,
        "github_pat_" * 20_000,
    ],
)
def test_redactor_takes_linear_time(text: str) -> None:
    start = time.perf_counter()
    REDACTOR.redact_text(text)
    assert time.perf_counter() - start < 1.0

"""The run's own model as a judge. It is called through the gateway, and its answers are not trained on."""

from __future__ import annotations

import msgspec
from yarl import URL

from instar.config.judge import JudgeRewardConfig
from instar.errors import ConfigError, ScoreError
from instar.gateway.base import OpenedSession, OpenSession
from instar.rewards.base import JUDGE_AGENT, ScoringContext
from instar.rewards.judge.endpoint import (
    JudgeEndpoint,
    JudgeHttpClient,
    JudgeReply,
    build_chat_request,
    parse_chat_response,
)
from instar.types import UNTRAINABLE, Call, Json, SessionStatus, Tag

JUDGE_MODEL_NAME = JUDGE_AGENT
"""The model name in a judge's calls. The gateway accepts any name and records it."""
REASON = "a judge's question"


def is_judge_call(call: Call) -> bool:
    return call.model == JUDGE_MODEL_NAME


class RunModelEndpoint(JudgeEndpoint):
    """A judge endpoint that asks each question in a new live session. The session is tagged untrainable
    before the call and abandoned after it, so that it is neither trained on nor scored."""

    def __init__(self, config: JudgeRewardConfig, context: ScoringContext) -> None:
        if not context.base_url:
            raise ConfigError("reward.endpoint: given 'self', but there is no gateway of a run to ask")
        self._config = config.model_copy(update={"model": JUDGE_MODEL_NAME})
        self._context = context
        self._http = JudgeHttpClient(config.timeout, context.api_key, use_proxy=False)

    async def ask(self, system: str, user: str, schema: Json) -> JudgeReply:
        session = await self._open_session()
        store = self._context.store
        await store.add_tags([Tag(session.session_id, UNTRAINABLE, reason=REASON, author="judge")])
        try:
            raw = await self._http.post(
                URL(session.base_url.rstrip("/") + "/chat/completions"),
                _headers(session.api_key),
                build_chat_request(self._config, system, user, None),
            )
        finally:
            await store.end_session(session.session_id, SessionStatus.ABANDONED, REASON)
        return parse_chat_response(raw)

    async def _open_session(self) -> OpenedSession:
        body = msgspec.to_builtins(OpenSession(metadata={"judge": self._config.name or self._config.rubric}))
        root = self._context.base_url.rstrip("/").removesuffix("/v1")
        raw = await self._http.post(URL(f"{root}/sessions"), _headers(self._context.api_key), body)
        try:
            return msgspec.json.decode(raw, type=OpenedSession)
        except msgspec.DecodeError as error:
            raise ScoreError(
                f"the gateway opened no session for the judge: {error}", retryable=True
            ) from error

    async def close(self) -> None:
        await self._http.close()


def _headers(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}

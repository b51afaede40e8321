"""The run's own model as a judge: asked through the gateway like any agent, and not learnt from."""

from __future__ import annotations

import msgspec
from yarl import URL

from instar.config.judge import JudgeRewardConfig
from instar.errors import ConfigError, ScoreError
from instar.gateway.base import OpenedSession, OpenSession
from instar.rewards.base import JUDGE_AGENT, Surroundings
from instar.rewards.judge.wire import Endpoint, Http, Reply, chat_body, read_chat
from instar.types import UNTRAINABLE, Call, Json, SessionStatus, Tag

OWN_MODEL = JUDGE_AGENT
"""The model that such a call asks for: the gateway answers any name, and the record tells what it was."""
REASON = "a judge's question"


def asked_by_a_judge(call: Call) -> bool:
    return call.model == OWN_MODEL


class OwnModel(Endpoint):
    """Each question is a live session of its own. It is tagged as not to be trained on before it is asked,
    and abandoned when it is answered: neither trained on nor scored."""

    def __init__(self, config: JudgeRewardConfig, run: Surroundings) -> None:
        if not run.base_url:
            raise ConfigError("reward.endpoint: given 'self'; there is no gateway of a run here to ask")
        self._config = config.model_copy(update={"model": OWN_MODEL})
        self._run = run
        self._http = Http(config.timeout, run.api_key, proxied=False)

    async def ask(self, system: str, user: str, schema: Json) -> Reply:
        session = await self._open()
        store = self._run.store
        await store.add_tags([Tag(session.session_id, UNTRAINABLE, reason=REASON, author="judge")])
        try:
            raw = await self._http.post(
                URL(session.base_url.rstrip("/") + "/chat/completions"),
                _headers(session.api_key),
                chat_body(self._config, system, user, None),
            )
        finally:
            await store.end_session(session.session_id, SessionStatus.ABANDONED, REASON)
        return read_chat(raw)

    async def _open(self) -> OpenedSession:
        body = msgspec.to_builtins(OpenSession(metadata={"judge": self._config.name or self._config.rubric}))
        root = self._run.base_url.rstrip("/").removesuffix("/v1")
        raw = await self._http.post(URL(f"{root}/sessions"), _headers(self._run.api_key), body)
        try:
            return msgspec.json.decode(raw, type=OpenedSession)
        except msgspec.DecodeError as error:
            raise ScoreError(f"the gateway opened no session for the judge: {error}", again=True) from error

    async def close(self) -> None:
        await self._http.close()


def _headers(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}

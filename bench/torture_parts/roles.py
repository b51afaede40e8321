"""The roles of a simulated run: the real trainer, rollout, scoring and session services on top of fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from instar.config import RunConfig
from instar.engines.base import EngineInfo
from instar.errors import EngineUnavailable, InstarError, LeaseLost
from instar.gateway.auth import Action, Caller
from instar.gateway.base import ApiError, CompleteSession, FailSession, OpenedSession, OpenSession
from instar.gateway.context import GatewayContext, RunIdentity
from instar.gateway.pipeline.record import Recorder
from instar.gateway.pipeline.resolve import SessionResolver
from instar.gateway.session_service import SessionService
from instar.gateway.session_states import SessionStates
from instar.gateway.submissions import CallBody, SubmissionService, parse_submission
from instar.http.retry import RetryPolicy
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.rewards.runner import ScoringRunner
from instar.rewards.scoring import InlineScoring
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.runner import RolloutRunner
from instar.rollout.slots import RolloutServices
from instar.rollout.tasks import TaskSet
from instar.sync.files import FileSync
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher
from instar.types import Task
from torture_parts.fakes import (
    VOCAB_SIZE,
    EngineClient,
    SimulatedAgent,
    SimulatedBackend,
    SimulatedEngine,
    SimulatedScorer,
)
from torture_parts.simulated_store import RUN, SimulatedStore
from torture_parts.world import Process, Role, World, current_process

ROLE_NAMES = ("engine", "gateway", "rewards", "rollout", "trainer")
FINISHING_ROLES = ("rollout", "trainer")
RETRY_TIMEOUT_SECONDS = 600.0
ENGINE = EngineInfo("simulated", "simulated", VOCAB_SIZE, max_context=100_000, artifacts=())


@dataclass(frozen=True)
class Components:
    """The classes that implement a run. A planted bug replaces one of them."""

    trainer_class: type[Trainer] = Trainer
    runner_class: type[RolloutRunner] = RolloutRunner
    session_service_class: type[SessionService] = SessionService
    recorder_class: type[Recorder] = Recorder
    submission_service_class: type[SubmissionService] = SubmissionService
    scoring_runner_class: type[ScoringRunner] = ScoringRunner
    store_class: type[SimulatedStore] = SimulatedStore
    backend_class: type[SimulatedBackend] = SimulatedBackend


@dataclass(frozen=True)
class Acknowledgement:
    """A response that a client received. Its call, or the end of its session, must be in the store."""

    session_id: str
    call_id: str | None = None
    """None if the response acknowledges the end of the session."""
    client_key: str | None = None


@dataclass(frozen=True)
class RunSetup:
    config: RunConfig
    turns: int
    scores_in_background: bool
    agent_can_fail: bool
    components: Components
    open_store: Callable[[World], SimulatedStore]
    acknowledge: Callable[[Acknowledgement], None]
    resources: ExitStack
    """The open files of all processes. They are closed at the end of the schedule."""


def create_role(setup: RunSetup, world: World, name: str) -> Role:
    classes: dict[str, type[Any]] = {
        "engine": EngineRole,
        "gateway": GatewayRole,
        "rewards": RewardsRole,
        "rollout": RolloutRole,
        "trainer": TrainerRole,
    }
    return classes[name](setup, world)


async def serve_forever(process: Process) -> None:
    process.is_serving = True
    await asyncio.get_running_loop().create_future()


def get_process() -> Process:
    process = current_process.get()
    assert isinstance(process, Process)
    return process


class EngineRole:
    def __init__(self, setup: RunSetup, world: World) -> None:
        self.engine = SimulatedEngine()
        self._store = setup.open_store(world)

    async def run(self) -> None:
        self.engine.fence.lease = await self._store.lease(RUN, "trainer")
        head = await self._store.latest_policy(RUN)
        self.engine.load(head)
        await serve_forever(get_process())


class TrainerRole:
    def __init__(self, setup: RunSetup, world: World) -> None:
        engine = EngineClient(world)

        async def list_engines() -> list[Any]:
            return [engine]

        store, config = setup.open_store(world), setup.config
        monitor = Monitor(config.run_dir)
        setup.resources.callback(monitor.close)
        self.trainer = setup.components.trainer_class(
            config,
            store=store,
            backend=setup.components.backend_class(world),
            publisher=PolicyPublisher(FileSync(), list_engines),
            monitor=monitor,
        )

    async def run(self) -> None:
        await self.trainer.run()


class RewardsRole:
    def __init__(self, setup: RunSetup, world: World) -> None:
        scorers = [SimulatedScorer(background=True)] if setup.scores_in_background else []
        self._runner = setup.components.scoring_runner_class(
            setup.open_store(world), RUN, scorers, setup.config.scoring, agent_id=setup.config.agent_id
        )

    async def run(self) -> None:
        await self._runner.run()


class RolloutRole:
    def __init__(self, setup: RunSetup, world: World) -> None:
        store = setup.open_store(world)
        client = SimulatedGatewayClient(world, setup.acknowledge)
        agent = SimulatedAgent(client, setup.turns, can_fail=setup.agent_can_fail)
        scoring = InlineScoring([SimulatedScorer(setup.scores_in_background)], setup.config.scoring)
        tasks = TaskSet([Task(str(number), {}) for number in range(8)])
        services = RolloutServices(store, client, agent, scoring)
        self._runner = setup.components.runner_class(setup.config, tasks, services)

    async def run(self) -> None:
        await self._runner.run()


# --- the gateway --------------------------------------------------------------------------------


class ChatBody(msgspec.Struct):
    messages: list[dict[str, str]]
    client_key: str


class ChatReply(msgspec.Struct):
    call_id: str
    content: str


class SimulatedGatewayClient(GatewayClient):
    """The rollout's client. Its requests reach the gateway's process without a socket."""

    def __init__(self, world: World, acknowledge: Callable[[Acknowledgement], None]) -> None:
        super().__init__("http://gateway", "sk-admin")
        self._world = world
        self._acknowledge = acknowledge

    async def chat(self, session_id: str, messages: list[dict[str, str]], client_key: str) -> str:
        data = msgspec.json.encode(ChatBody(messages, client_key))
        content = await RetryPolicy().run(
            lambda: self._post_once(f"/sessions/{session_id}/chat", data),
            retry_on=EngineUnavailable,
            seconds=RETRY_TIMEOUT_SECONDS,
        )
        reply = msgspec.json.decode(content, type=ChatReply)
        self._acknowledge(Acknowledgement(session_id, reply.call_id, client_key))
        return reply.content

    async def _post_once(self, path: str, data: bytes) -> bytes:
        async def handle(role: GatewayRole) -> bytes:
            return await role.handle(path, data)

        try:
            response = await self._world.request("gateway", path.rpartition("/")[2], handle)
        except (ConnectionError, EngineUnavailable, LeaseLost) as error:
            raise EngineUnavailable(f"the gateway did not respond to {path}: {error}") from error
        except ApiError as error:
            raise InstarError(f"the gateway rejected {path} with status {error.status}: {error}") from error
        if path.endswith(("/complete", "/fail")):
            self._acknowledge(Acknowledgement(path.split("/")[2]))
        return response


class GatewayRole:
    def __init__(self, setup: RunSetup, world: World) -> None:
        self._store = setup.open_store(world)
        context = GatewayContext(
            self._store,
            RunIdentity(RUN, "default", RUN),
            setup.config.gateway,
            MessageHasher(b"simulation"),
            Redactor.from_config(setup.config.gateway.redact),
        )
        self._engine = EngineClient(world)
        self._states = SessionStates(context)
        recorder = setup.components.recorder_class(context, SessionResolver(context, self._states))
        self._sessions = setup.components.session_service_class(context, self._states)
        # Every submission contains its messages and its reply, so nothing needs to be rendered.
        renderer = cast(Any, None)
        self._submissions = setup.components.submission_service_class(
            context, self._states, recorder, renderer
        )

    async def run(self) -> None:
        await serve_forever(get_process())

    async def handle(self, path: str, data: bytes) -> bytes:
        """Handle a control API request or a model call, and return the response body."""
        caller = Caller("admin")
        _, _, rest = path[1:].partition("/")
        session_id, _, action = rest.partition("/")
        if not session_id:
            session, key = await self._sessions.open(caller, msgspec.json.decode(data, type=OpenSession))
            opened = OpenedSession(session.session_id, f"http://gateway/s/{session.session_id}/v1", key)
            return msgspec.json.encode(opened)
        if action == "chat":
            body = msgspec.json.decode(data, type=ChatBody)
            return msgspec.json.encode(await self._chat(session_id, caller, body))
        body_type = CompleteSession if action == "complete" else FailSession
        return msgspec.json.encode(
            await self._sessions.end(session_id, caller, msgspec.json.decode(data, type=body_type))
        )

    async def _chat(self, session_id: str, caller: Caller, body: ChatBody) -> ChatReply:
        """Sample a reply and record it. A retry returns the recorded reply."""
        state = await self._states.get_open(session_id, caller, Action.CALL_MODEL)
        prompt = [0]
        for message in body.messages:
            is_reply = message["role"] == "assistant"
            prompt += map(int, message["content"].split()) if is_reply else [1]
        ids, version = await self._engine.sample(state.session.seed, prompt)
        reply = " ".join(map(str, ids))
        call = {
            "prompt_ids": prompt,
            "sampled_ids": ids,
            "logprobs": [-0.5] * len(ids),
            "versions": [version] * len(ids),
            "finish_reason": "stop",
            "messages": body.messages,
            "reply": {"role": "assistant", "content": reply},
            "client_key": body.client_key,
        }
        latest = (await self._store.latest_policy(RUN)).version
        calls = parse_submission([msgspec.convert(call, CallBody)], ENGINE, max(latest, version))
        (call_id,) = await self._submissions.submit(state, calls)
        recorded = await self._store.call(call_id)
        return ChatReply(call_id, recorded.reply["content"] if recorded else reply)

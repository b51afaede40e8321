"""An agent that runs a `verifiers` environment on one dataset row. The environment computes the reward."""

from __future__ import annotations

from typing import Any

from instar.agents.openai_agent import OpenAIAgent
from instar.errors import AgentError
from instar.rollout.base import AgentSession
from instar.rollout.tasksets.verifiers import load_environment
from instar.types import Json


class VerifiersAgent(OpenAIAgent):
    async def __call__(self, task: Json, session: AgentSession, *, max_tokens: int = 64) -> tuple[int, float]:
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        environment = load_environment(task["environment"], task["args"])
        client = OpenAIChatCompletionsClient(self.client_for(session))
        state: Any = await environment.rollout(
            task["input"], client, session.model, {"max_tokens": max_tokens}
        )
        if state["error"] is not None:
            raise AgentError(f"the environment {task['environment']} failed: {state['error']}") from state[
                "error"
            ]
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        return len(state["trajectory"]), float(state["reward"])


run = VerifiersAgent()

"""The agent of the task `gsm8k`. Older releases of Instar, which run as `baseline`, do not have it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from instar.agents.calculator import calculate
from instar.agents.gsm8k import EXAMPLES, MAX_TEXT_TOKENS
from instar.agents.openai_agent import OpenAIAgent
from instar.rollout.tasksets.gsm8k import find_final_number

if TYPE_CHECKING:
    from instar.rollout.base import AgentSession
    from instar.types import Json


class SingleTurnAgent(OpenAIAgent):
    """An agent that writes one calculation. It returns the reward, which is 1 if the result is correct."""

    async def __call__(self, task: Json, session: AgentSession) -> float:
        messages: list[Any] = [{"role": "system", "content": "Write the calculation."}]
        for question, expression, _ in EXAMPLES:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": expression}]
        messages.append({"role": "user", "content": task["question"]})
        text = (await self.complete(session, messages, max_tokens=MAX_TEXT_TOKENS)).content or ""
        number = find_final_number(calculate(json.dumps({"expression": text.rstrip("= ")})))
        return float(number is not None and abs(number - float(task["final"])) < 1e-6)


solve_in_one_turn = SingleTurnAgent()

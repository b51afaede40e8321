"""smolagents: its agent that calls tools and its agent that writes code."""

from __future__ import annotations

from typing import Any

from job import Job, Outcome, calc, serve
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool


def run(job: Job, outcome: Outcome) -> None:
    model = OpenAIServerModel("instar", api_base=f"{job.url}/v1", api_key=job.key)
    kind: Any = CodeAgent if "code" in job.words else ToolCallingAgent
    agent = kind([tool(calc)], model, verbosity_level=LogLevel.OFF, stream_outputs="stream" in job.words)
    outcome.said.append(agent.run(job.question))
    outcome.said.append(agent.run(job.then, reset=False))
    for step in agent.memory.steps:
        if usage := getattr(step, "token_usage", None):
            outcome.usage.append((usage.input_tokens, usage.output_tokens))


serve(run)

"""smolagents: `ToolCallingAgent` and `CodeAgent`."""

from __future__ import annotations

from typing import Any

from job import Job, JobResult, calc, run_jobs
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool


def run(job: Job, job_result: JobResult) -> None:
    model = OpenAIServerModel("instar", api_base=f"{job.url}/v1", api_key=job.key)
    agent_class: Any = CodeAgent if "code" in job.flags else ToolCallingAgent
    agent = agent_class(
        [tool(calc)], model, verbosity_level=LogLevel.OFF, stream_outputs="stream" in job.flags
    )
    job_result.answers.append(agent.run(job.question))
    job_result.answers.append(agent.run(job.follow_up, reset=False))
    for step in agent.memory.steps:
        if usage := getattr(step, "token_usage", None):
            job_result.usage.append((usage.input_tokens, usage.output_tokens))


run_jobs(run)

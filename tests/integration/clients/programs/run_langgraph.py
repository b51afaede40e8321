"""LangGraph: LangChain's `create_agent` and LangGraph's own `create_react_agent`, over chat, Responses
and Anthropic's Messages, with and without streaming."""

from __future__ import annotations

import warnings
from typing import Any

from job import Job, JobResult, calc, run_jobs
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI

warnings.simplefilter("ignore")


def create_model(job: Job) -> Any:
    if "messages" in job.flags:
        return ChatAnthropic(model="instar", base_url=job.url, api_key=job.key, max_tokens=500)
    return ChatOpenAI(
        model="instar", use_responses_api="responses" in job.flags, stream_usage=True, **job.openai_options
    )


def create_job_agent(job: Job) -> Any:
    if "react" in job.flags:
        from langgraph.prebuilt import create_react_agent

        return create_react_agent(create_model(job), [calc], prompt="Work it out.")
    return create_agent(create_model(job), [calc], system_prompt="Work it out.")


def run(job: Job, job_result: JobResult) -> None:
    agent = create_job_agent(job)
    messages: list[Any] = []
    for question in (job.question, job.follow_up):
        messages.append({"role": "user", "content": question})
        message_count = len(messages)
        if "stream" in job.flags:
            for mode, state in agent.stream({"messages": messages}, stream_mode=["messages", "values"]):
                if mode == "values":
                    messages = state["messages"]
        else:
            messages = agent.invoke({"messages": messages})["messages"]
        for message in messages[message_count:]:
            if isinstance(message, AIMessage) and message.usage_metadata:
                usage = message.usage_metadata
                job_result.usage.append((usage["input_tokens"], usage["output_tokens"]))
        job_result.answers.append(messages[-1].text)


run_jobs(run)

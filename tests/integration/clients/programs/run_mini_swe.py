"""mini-swe-agent with its default settings over LiteLLM: chat, Responses, Anthropic's Messages, and its
variant for models without tools. It runs one task and ignores the follow-up."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

import yaml
from job import Job, JobResult, run_jobs
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel


def run(job: Job, job_result: JobResult) -> None:
    config_name = "mini_textbased.yaml" if "text" in job.flags else "mini.yaml"
    settings = yaml.safe_load((builtin_config_dir / config_name).read_text())
    settings["agent"].pop("mode", None)
    model_classes: dict[str, Any] = {"responses": LitellmResponseModel, "text": LitellmTextbasedModel}
    model_class = next((model_classes[flag] for flag in job.flags if flag in model_classes), LitellmModel)
    url, provider = (job.url, "anthropic") if "messages" in job.flags else (f"{job.url}/v1", "openai")
    endpoint = {"api_base": url, "api_key": job.key}
    options = {**settings["model"], "model_kwargs": {**settings["model"].get("model_kwargs", {}), **endpoint}}
    with tempfile.TemporaryDirectory() as folder:
        environment = LocalEnvironment(cwd=folder, **settings["environment"])
        agent = DefaultAgent(
            model_class(model_name=f"{provider}/instar", **options), environment, **settings["agent"]
        )
        agent.run(job.question)
        job_result.answers.append(Path(folder, "answer.txt").read_text().strip())


run_jobs(run)

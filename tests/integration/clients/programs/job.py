"""Code shared by the programs in this folder, which run in an environment without Instar.

A program reads its jobs as JSON from stdin, runs them concurrently and prints the results as its last line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """A conversation to hold: a question and a follow-up."""

    url: str
    """The URL of the server or of a session, without ``/v1``."""
    key: str
    variant: str
    """The dialect and options to use, joined by ``-``, such as ``chat-async-stream``."""
    question: str
    follow_up: str

    @property
    def flags(self) -> set[str]:
        """The dialect and the options in ``variant``."""
        return set(self.variant.split("-"))

    @property
    def openai_options(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.key}


@dataclass
class JobResult:
    answers: list[Any] = field(default_factory=list)
    """The final answer to each question."""
    usage: list[tuple[int, int]] = field(default_factory=list)
    """The numbers of prompt and sampled tokens of each call, if the client reports them."""
    error: str = ""


def calc(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: two numbers with * or + between them
    """
    left, sign, right = expression.split()
    value = int(left) * int(right) if sign == "*" else int(left) + int(right)
    return f"calc says {value}"


def run_jobs(run: Callable[[Job, JobResult], None]) -> None:
    """Run the jobs from stdin, print their results and exit. ``run`` adds results to its JobResult."""
    jobs = [Job(**job) for job in json.load(sys.stdin)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(lambda job: _run_job(run, job), jobs))
    print("\n" + json.dumps([vars(job_result) for job_result in results]), flush=True)
    os._exit(0)  # some clients leave threads behind that wait on the network


def _run_job(run: Callable[[Job, JobResult], None], job: Job) -> JobResult:
    job_result = JobResult()
    try:
        run(job, job_result)
    except Exception:  # noqa: BLE001 - any client error is reported to the test
        job_result.error = traceback.format_exc()
    return job_result

"""Generate requests with Schemathesis from the gateway's OpenAPI description, and check the responses.

This script runs in Schemathesis's own environment. It reads JSON lines from standard input, first the
settings and then one batch per line, and writes one result per line to standard output. A batch has one
operation and one seed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES_PER_BATCH = 50
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
DOCUMENTED_FAILURES = (502, 503, 504)


class BatchRunner:
    def __init__(self, url: str, keys: list[str], sessions: list[list[str]], timeout_seconds: float) -> None:
        self._schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self._operations = [result.ok() for result in self._schema.get_all_operations()]
        self._keys = keys
        self._sessions = sessions
        self._timeout_seconds = timeout_seconds
        self._http = requests.Session()

    def run(self, base: int, number: int) -> dict[str, Any]:
        """Generate and send one batch of requests, and return the statuses and problems.

        Each batch tests one operation. Every second pass over the operations sends invalid requests.
        """
        operation = self._operations[number % len(self._operations)]
        pass_number = number // len(self._operations)
        session_id, session_key = self._sessions[number % len(self._sessions)]
        key = (*self._keys, session_key)[pass_number % 3]
        modes = schemathesis.GenerationMode
        has_session = pass_number % 4 < 3 and "{session}" in operation.path
        strategy = operation.as_strategy(
            generation_mode=modes.NEGATIVE if pass_number % 2 else modes.POSITIVE,
            path_parameters={"session": session_id} if has_session else None,
        )
        result: dict[str, Any] = {"requests": 0, "problems": [], "statuses": Counter()}
        result |= {"operation": operation.label, "seed": f"schema:{base}:{number}"}

        @seed(base * 1_000_003 + number)
        @settings(
            max_examples=EXAMPLES_PER_BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def send(case: schemathesis.Case) -> None:
            self._send(case, key, result)

        try:
            send()
        except Unsatisfiable:
            pass  # A route without parameters has no invalid requests.
        except Exception as error:  # noqa: BLE001 - any error while generating requests is a problem
            self._report(result, f"Schemathesis: {type(error).__name__}: {error}", "", is_mismatch=True)
        return result

    def _send(self, case: schemathesis.Case, key: str, result: dict[str, Any]) -> None:
        result["requests"] += 1
        headers = {"X-Instar-Key": key}  # takes precedence over the keys that Schemathesis generates
        command = case.as_curl_command(headers=headers)
        try:
            response = case.call(session=self._http, headers=headers, timeout=self._timeout_seconds)
        except requests.Timeout:
            self._report(result, "no response", command, is_hang=True)
            return
        except (requests.RequestException, UnicodeError) as error:
            if "Connection aborted" in str(error) or "RemoteDisconnected" in str(error):
                self._report(result, "the connection closed without a response", command)
            result["statuses"]["not sent"] += 1  # usually because requests rejects a header or a path
            return
        result["statuses"][str(response.status_code)] += 1
        if response.status_code >= 500 and response.status_code not in DOCUMENTED_FAILURES:
            self._report(result, f"status {response.status_code}", command)
            return
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            text = "; ".join(f"{failure.title}: {failure.message}" for failure in group.exceptions)
            self._report(result, text[:1000], command, is_mismatch=True)

    def _report(
        self,
        result: dict[str, Any],
        text: str,
        command: str,
        *,
        is_hang: bool = False,
        is_mismatch: bool = False,
    ) -> None:
        problem = {"text": text, "request": command, "is_hang": is_hang, "is_mismatch": is_mismatch}
        result["problems"].append(problem)


def main() -> None:
    runner = BatchRunner(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        print(json.dumps(runner.run(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

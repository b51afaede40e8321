"""Tests for retry delays, repeated attempts and the Retry-After header."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, formatdate

import pytest

from instar.http.retry import RetryPolicy, parse_retry_after


class BusyError(Exception):
    def __init__(self, retry_after: float | None = None) -> None:
        super().__init__("busy")
        self.retry_after = retry_after


def test_delay_doubles_up_to_the_maximum_unless_at_least_is_longer() -> None:
    policy = RetryPolicy(first_delay=0.5, max_delay=3.0, jitter=(1.0, 1.0))
    assert [policy.delay(failures) for failures in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.delay(10_000) == 3.0
    assert policy.delay(0, at_least=7.0) == 7.0
    assert RetryPolicy(jitter=(0.1, 0.2)).delay(0, at_least=7.0) == 7.0


def test_delay_with_jitter_stays_within_the_jitter_range() -> None:
    policy = RetryPolicy(first_delay=1.0, max_delay=1.0, jitter=(0.5, 1.5))
    delays = [policy.delay(0, rng=random.Random(seed)) for seed in range(200)]
    assert 0.5 <= min(delays) < 0.6
    assert 1.4 < max(delays) <= 1.5


async def test_run_after_transient_errors_returns_the_result() -> None:
    errors = iter([BusyError(), BusyError(0.001)])

    async def attempt() -> str:
        for error in errors:
            raise error
        return "done"

    policy = RetryPolicy(first_delay=0.001, max_delay=0.002)
    assert await policy.run(attempt, retry_on=BusyError, seconds=60) == "done"


async def test_run_past_its_time_limit_raises_the_last_error() -> None:
    async def attempt() -> None:
        raise BusyError(retry_after=30)

    with pytest.raises(BusyError):
        await RetryPolicy().run(attempt, retry_on=BusyError, seconds=5)


async def test_run_does_not_retry_other_errors() -> None:
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised above without a message
        await RetryPolicy().run(attempt, retry_on=BusyError, seconds=5)
    assert attempts == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("", None), ("3", 3.0), ("0.5", 0.5), ("-2", 0.0), ("soon", None), ("inf", None)],
)
def test_parse_retry_after_reads_seconds(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds


def test_parse_retry_after_reads_an_http_date() -> None:
    header = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    assert parse_retry_after(header) == pytest.approx(600, abs=60)
    assert parse_retry_after(formatdate(time.time() - 600, usegmt=True)) == 0.0

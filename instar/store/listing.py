"""Queries for pages of sessions.

Sessions are ordered by ``seq``. A page is read from an index that has this order for each channel and status,
so it costs the same with ten sessions as with a million. If only a few sessions match the tag, scorer, time
or reward range, the search starts from those sessions instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from instar.store.database import Database
from instar.store.models import SessionFilter, SessionRow
from instar.store.rows import SESSION_ROWS
from instar.types import Channel, RewardSource, Session, SessionStatus

MAX_START_SESSIONS = 2000
"""If at most this many sessions meet a condition, the search starts from those sessions."""

_DETAILS_SQL = """
    SELECT s.*,
      (SELECT COUNT(*) FROM calls WHERE calls.session_id = s.session_id) AS calls,
      (SELECT CAST(COALESCE(SUM(sampled_tokens), 0) AS BIGINT) FROM calls
        WHERE calls.session_id = s.session_id) AS sampled
    FROM sessions s WHERE s.seq IN ({}) ORDER BY s.seq"""


def get_sessions(
    db: Database,
    run_id: str | None = None,
    *,
    group_id: str | None = None,
    channel: Channel | None = None,
    status: SessionStatus | None = None,
    where: SessionFilter | None = None,
    before: int | None = None,
    after: int | None = None,
    limit: int | None = None,
) -> list[SessionRow]:
    """Return matching sessions, oldest first. ``channel`` and ``status`` override those in ``where``. Only
    sessions with a ``seq`` lower than ``before`` and higher than ``after`` are returned. ``limit`` keeps only
    the newest sessions or, together with ``after``, the oldest ones."""
    where = where or SessionFilter()
    where = replace(where, channel=channel or where.channel, status=status or where.status)
    query = _PageQuery(run_id, group_id, where, before, after, limit)
    rows = db.execute(_DETAILS_SQL.format(query.build_sql(db)), query.values)
    return [
        SessionRow(SESSION_ROWS.decode(row), row["calls"], row["sampled"], row["reward"], row["seq"])
        for row in rows
    ]


def get_sessions_by_group(db: Database, group_ids: Sequence[str]) -> dict[str, list[Session]]:
    """Return the sessions of each group, oldest first; the list is empty for a group without sessions."""
    by_group: dict[str, list[Session]] = {group_id: [] for group_id in group_ids}
    sql = f"SELECT * FROM sessions WHERE group_id IN ({db.json_array_sql.format('?')}) ORDER BY seq"
    for session in SESSION_ROWS.select(db, sql, (json.dumps(list(by_group)),)):
        if session.group_id is not None:
            by_group[session.group_id].append(session)
    return by_group


@dataclass(slots=True)
class _PageQuery:
    """Builds the query that returns the ``seq`` of each session on a page."""

    run_id: str | None
    group_id: str | None
    where: SessionFilter
    before: int | None
    after: int | None
    limit: int | None
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    conditions: list[str] = field(default_factory=list[str])
    """SQL conditions; the sessions table has the alias ``x``."""
    start_queries: list[str] = field(default_factory=list[str])
    """For each condition with an index, a query for the ids of the sessions that meet it."""

    def __post_init__(self) -> None:
        self._add_column_conditions()
        self._add_annotation_conditions()

    def build_sql(self, db: Database) -> str:
        if self.group_id is not None or self.where.ids or self.limit is None:
            return self._limit_page(f"SELECT x.seq FROM sessions x WHERE {self._condition}")
        for query in self.start_queries:
            count_sql = f"SELECT COUNT(*) AS n FROM (SELECT 1 FROM ({query}) AS d LIMIT :limit) AS counted"
            values = self.values | {"limit": MAX_START_SESSIONS + 1}
            if db.execute(count_sql, values).fetchone()["n"] <= MAX_START_SESSIONS:
                joined = f"(SELECT DISTINCT session_id FROM ({query}) AS d) AS few CROSS JOIN sessions x"
                return self._limit_page(
                    f"SELECT x.seq FROM {joined} WHERE x.session_id = few.session_id AND {self._condition}"
                )
        if self.run_id is None or self.where.task is not None:
            return self._limit_page(f"SELECT x.seq FROM sessions x WHERE {self._condition}")
        return self._limit_page(" UNION ALL ".join(self._build_slice_queries()))

    def _build_slice_queries(self) -> list[str]:
        """Return one page query per channel and status, within which the index is ordered by ``seq``."""
        where = self.where
        queries: list[str] = []
        for channel in [where.channel] if where.channel else Channel:
            for status in [where.status] if where.status else SessionStatus:
                slice_condition = f"x.channel = '{channel.value}' AND x.status = '{status.value}'"
                page_sql = self._limit_page(
                    f"SELECT x.seq FROM sessions x WHERE {self._condition} AND {slice_condition}"
                )
                queries.append(f"SELECT seq FROM ({page_sql}) AS {channel.value}_{status.value}")
        return queries

    def _limit_page(self, sql: str) -> str:
        if self.limit is None:
            return sql
        self.values["page_size"] = self.limit
        order = "ASC" if self.after is not None else "DESC"
        return f"SELECT seq FROM ({sql}) AS page ORDER BY seq {order} LIMIT :page_size"

    @property
    def _condition(self) -> str:
        return " AND ".join(self.conditions) or "TRUE"

    def _add_condition(self, condition: str, **values: Any) -> None:
        self.conditions.append(condition)
        self.values |= values

    def _add_column_conditions(self) -> None:
        where = self.where
        required_values = {
            "run_id": self.run_id,
            "group_id": self.group_id,
            "channel": where.channel and where.channel.value,
            "status": where.status and where.status.value,
            "task_id": where.task,
            "agent_id": where.agent,
        }
        for column, value in required_values.items():
            if value is not None:
                self._add_condition(f"x.{column} = :{column}", **{column: value})
        if where.ids:
            ids = {f"id{number}": session_id for number, session_id in enumerate(where.ids)}
            self._add_condition(f"x.session_id IN ({', '.join(f':{name}' for name in ids)})", **ids)
        self._add_range(before=("x.seq <", self.before), after=("x.seq >", self.after))
        self._add_start_query(
            self._add_range(since=("x.created_at >=", where.since), until=("x.created_at <", where.until))
        )
        if where.scorer is None and where.source is None:
            low, high = ("x.reward >=", where.reward_min), ("x.reward <=", where.reward_max)
            self._add_start_query(self._add_range(reward_min=low, reward_max=high))

    def _add_range(self, **bounds: tuple[str, float | None]) -> str:
        """Add and return one SQL condition for the bounds that are set. It is empty if no bound is set."""
        bounds = {name: bound for name, bound in bounds.items() if bound[1] is not None}
        condition = " AND ".join(f"{comparison} :{name}" for name, (comparison, _) in bounds.items())
        if condition:
            self._add_condition(condition, **{name: value for name, (_, value) in bounds.items()})
        return condition

    def _add_start_query(self, condition: str) -> None:
        if condition and self.run_id is not None:
            self.start_queries.append(
                f"SELECT x.session_id FROM sessions x WHERE x.run_id = :run_id AND {condition}"
            )

    def _add_annotation_conditions(self) -> None:
        where = self.where
        for number, (name, value) in enumerate(where.tags):
            values = {"name": name} if value is None else {"name": name, "value": value}
            self._add_exists("tags", f"tag{number}", values, "")
        for number, name in enumerate(where.without):
            subquery = f"SELECT 1 FROM tags WHERE tags.session_id = x.session_id AND name = :without{number}"
            self._add_condition(f"NOT EXISTS ({subquery})", **{f"without{number}": name})
        if where.scorer is None and where.source is None:
            return
        columns: dict[str, str] = {}
        if where.scorer is not None:
            columns["scorer"], _, version = where.scorer.partition("@")
            if version:
                columns["scorer_version"] = version
        if where.source is not None:
            columns["source"] = where.source.value
        # List every source, because the index has the source before the scorer.
        sources = ", ".join(f"'{source.value}'" for source in RewardSource)
        extra = f" AND rewards.source IN ({sources})" if where.source is None else ""
        for name, comparison in (("reward_min", ">="), ("reward_max", "<=")):
            if (bound := getattr(where, name)) is not None:
                extra += f" AND rewards.value {comparison} :{name}"
                self.values[name] = bound
        self._add_exists("rewards", "by", columns, extra)

    def _add_exists(self, table: str, prefix: str, columns: dict[str, str], extra: str) -> None:
        values = {f"{prefix}_{column}": value for column, value in columns.items()}
        condition = " AND ".join(f"{table}.{column} = :{prefix}_{column}" for column in columns) + extra
        subquery = f"SELECT 1 FROM {table} WHERE {table}.session_id = x.session_id AND {condition}"
        self._add_condition(f"EXISTS ({subquery})", **values)
        if self.run_id is not None:
            self.start_queries.append(
                f"SELECT session_id FROM {table} WHERE {table}.run_id = :run_id AND {condition}"
            )

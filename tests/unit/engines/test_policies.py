"""Tests for the table of loaded policies: lookup, the limit, eviction and unloading."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from instar.engines.policies import PolicyTable
from instar.errors import EngineError, PolicyNotFound
from instar.types import PolicyRef

CreateTable = Callable[[int], PolicyTable[str]]


def make_ref(version: int) -> PolicyRef:
    return PolicyRef("p", version)


@pytest.fixture
def freed() -> list[str]:
    """The contents of the freed policies, in order."""
    return []


@pytest.fixture
def create_table(freed: list[str]) -> CreateTable:
    return lambda limit: PolicyTable("base", limit, lambda policy: freed.append(policy.content))


def test_table_finds_loaded_policies_and_the_base_model(create_table: CreateTable) -> None:
    table = create_table(4)
    assert table.head.content == "base"
    table.set_head(make_ref(1), "one")
    table.keep(make_ref(2), "two")
    assert table.head.content == "one"
    assert [table.acquire(make_ref(v)).content for v in (0, 1, 2)] == ["base", "one", "two"]
    assert table.acquire(PolicyRef("other", 0)).content == "base"
    with pytest.raises(PolicyNotFound, match=r"does not have p@3; it has p@0, p@1, p@2\."):
        table.acquire(make_ref(3))
    with pytest.raises(PolicyNotFound, match=r"does not have other@1; it has other@0\."):
        table.acquire(PolicyRef("other", 1))


def test_base_model_is_not_a_version_if_the_policy_starts_from_an_adapter() -> None:
    table = PolicyTable("base", 1, lambda _: None, serves_base=False)
    table.set_head(make_ref(0), "initial adapter")
    assert table.acquire(make_ref(0)).content == "initial adapter"
    table.set_head(make_ref(1), "one")
    with pytest.raises(PolicyNotFound, match=r"does not have p@0; it has p@1\."):
        table.acquire(make_ref(0))


def test_keep_evicts_the_least_recently_used_policy(create_table: CreateTable, freed: list[str]) -> None:
    table = create_table(3)
    table.set_head(make_ref(1), "head")
    table.keep(make_ref(2), "two")
    table.keep(make_ref(3), "three")
    table.release(table.acquire(make_ref(2)))
    table.keep(make_ref(4), "four")
    assert freed == ["three"]
    assert table.refs == (make_ref(1), make_ref(2), make_ref(4))


def test_keep_raises_if_all_policies_are_in_use(create_table: CreateTable, freed: list[str]) -> None:
    table = create_table(2)
    table.set_head(make_ref(1), "head")
    table.keep(make_ref(2), "two")
    policy = table.acquire(make_ref(2))
    with pytest.raises(EngineError, match=r"p@3 cannot be loaded.*engine\.max_adapters"):
        table.keep(make_ref(3), "three")
    table.release(policy)
    table.keep(make_ref(3), "three")
    assert freed == ["two"]


def test_set_head_evicts_an_unused_policy_before_an_older_one_in_use(
    create_table: CreateTable, freed: list[str]
) -> None:
    table = create_table(3)
    table.set_head(make_ref(1), "one")
    table.keep(make_ref(2), "two")
    policy = table.acquire(make_ref(1))
    table.set_head(make_ref(3), "three")
    table.set_head(make_ref(4), "four")
    assert (freed, table.refs) == (["two"], (make_ref(1), make_ref(3), make_ref(4)))
    table.release(policy)


def test_set_head_succeeds_if_all_policies_are_in_use(create_table: CreateTable, freed: list[str]) -> None:
    table = create_table(1)
    table.set_head(make_ref(1), "one")
    policy = table.acquire(make_ref(1))
    table.set_head(make_ref(2), "two")
    assert table.refs == (make_ref(2),)
    with pytest.raises(PolicyNotFound):
        table.acquire(make_ref(1))
    assert not freed, "a policy in use must stay in memory"
    table.release(policy)
    assert freed == ["one"]


def test_version_that_is_loaded_again_replaces_the_first_one(
    create_table: CreateTable, freed: list[str]
) -> None:
    table = create_table(4)
    first = table.set_head(make_ref(1), "old files")
    second = table.set_head(make_ref(1), "new files")
    assert freed == ["old files"]
    assert first.key != second.key
    assert table.acquire(make_ref(1)) is second


def test_unload_frees_a_policy_after_its_last_request(create_table: CreateTable, freed: list[str]) -> None:
    table = create_table(4)
    table.set_head(make_ref(1), "head")
    table.keep(make_ref(2), "two")
    policies = [table.acquire(make_ref(2)) for _ in range(2)]
    table.unload(make_ref(2))
    with pytest.raises(PolicyNotFound):
        table.acquire(make_ref(2))
    with pytest.raises(PolicyNotFound):
        table.unload(make_ref(2))
    table.release(policies[0])
    assert not freed
    table.release(policies[1])
    assert freed == ["two"]
    with pytest.raises(EngineError, match="p@1 is the served policy"):
        table.unload(make_ref(1))


def test_replace_all_without_a_base_model_leaves_only_the_new_head(
    create_table: CreateTable, freed: list[str]
) -> None:
    table = create_table(4)
    table.set_head(make_ref(1), "one")
    table.keep(make_ref(2), "two")
    table.replace_all(None)
    table.set_head(make_ref(3), "weights")
    assert freed == ["one", "two"]
    with pytest.raises(PolicyNotFound, match=r"it has p@3\."):
        table.acquire(make_ref(0))
    table.replace_all("base")
    assert table.acquire(make_ref(0)).content == table.head.content == "base"

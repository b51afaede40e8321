"""The policies that an engine has loaded, by name, with a limit and LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from instar.errors import EngineError, PoliciesInUse, PolicyNotFound
from instar.types import PolicyRef

T = TypeVar("T")
BASE_REF = PolicyRef("", 0)
"""The name of the base model as the first served policy."""


@dataclass(eq=False, slots=True)
class LoadedPolicy(Generic[T]):
    ref: PolicyRef
    content: T
    key: int
    """A number that identifies the weights. A version that is loaded again gets another key."""
    request_count: int = 0
    is_available: bool = True
    """False if new requests cannot name the policy, because it was unloaded or replaced."""


class PolicyTable(Generic[T]):
    """The served policy (``head``) and the other loaded policies, at most ``limit`` together. ``base`` is the
    content of the base model, which is the first head and does not count. It is version 0 of every policy,
    unless ``serves_base`` is False because the policies start from an adapter. ``free`` is called with a
    policy that was unloaded, once no request uses it."""

    def __init__(
        self, base: T, limit: int, free: Callable[[LoadedPolicy[T]], None], *, serves_base: bool = True
    ) -> None:
        self._keys = count()
        self._limit = limit
        self._free = free
        self._serves_base = serves_base
        self._base: LoadedPolicy[T] | None = None
        self._entries: OrderedDict[PolicyRef, LoadedPolicy[T]] = OrderedDict()
        """The least recently used entry is the first."""
        self.head = self._set_base(base)

    def __contains__(self, ref: PolicyRef) -> bool:
        return ref in self._entries

    @property
    def refs(self) -> tuple[PolicyRef, ...]:
        return tuple(sorted(self._entries))

    def set_head(self, ref: PolicyRef, content: T) -> LoadedPolicy[T]:
        """Add the policy and make it the head. At the limit, unload another one, even if requests use it."""
        entry, previous = self._create(ref, content), self._entries.pop(ref, None)
        self.head = self._entries[ref] = entry
        if previous is not None:
            self._retire(previous)
        while len(self._entries) > self._limit:
            others = [other for other in self._entries.values() if other is not entry]
            # The sort is stable, so the least recently used ones stay first.
            others.sort(key=lambda other: other.request_count > 0)
            self._retire(self._entries.pop(others[0].ref))
        return entry

    def make_room(self, ref: PolicyRef) -> None:
        """At the limit, unload the least recently used policy that no request uses, so that ``ref`` can be
        added. Raises PoliciesInUse if requests use all of them."""
        if len(self._entries) < self._limit:
            return
        for entry in self._entries.values():
            if entry is not self.head and not entry.request_count:
                return self._retire(self._entries.pop(entry.ref))
        raise PoliciesInUse(
            f"{ref} cannot be loaded, because all loaded policies ({len(self._entries)}) are in use; wait "
            "until requests have finished, or increase engine.max_adapters."
        )

    def keep(self, ref: PolicyRef, content: T) -> None:
        """Add a policy that is not loaded yet, after ``make_room``."""
        self.make_room(ref)
        self._entries[ref] = self._create(ref, content)

    def unload(self, ref: PolicyRef) -> None:
        entry = self._entries.get(ref)
        if entry is None:
            raise self._not_found_error(ref)
        if entry is self.head:
            raise EngineError(f"{ref} is the served policy; load another policy before you unload it.")
        self._retire(self._entries.pop(ref))

    def acquire(self, ref: PolicyRef) -> LoadedPolicy[T]:
        """Return a policy for one request. The caller must release it."""
        entry = self._entries.get(ref) or (self._base if ref.version == 0 else None)
        if entry is None:
            raise self._not_found_error(ref)
        if ref in self._entries:
            self._entries.move_to_end(ref)
        entry.request_count += 1
        return entry

    def acquire_head(self) -> LoadedPolicy[T]:
        self.head.request_count += 1
        return self.head

    def release(self, entry: LoadedPolicy[T]) -> None:
        entry.request_count -= 1
        self._free_if_unused(entry)

    def replace_all(self, base: T | None) -> None:
        """Unload every policy. ``base`` is the content of the base model, or None if it is not available. The
        caller must set a head next if ``base`` is None."""
        entries, self._base = [*self._entries.values()], None
        self._entries.clear()
        if base is not None:
            self.head = self._set_base(base)
        for entry in entries:
            self._retire(entry)

    def _set_base(self, content: T) -> LoadedPolicy[T]:
        entry = self._create(BASE_REF, content)
        self._base = entry if self._serves_base else None
        return entry

    def _create(self, ref: PolicyRef, content: T) -> LoadedPolicy[T]:
        return LoadedPolicy(ref, content, next(self._keys))

    def _retire(self, entry: LoadedPolicy[T]) -> None:
        entry.is_available = False
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: LoadedPolicy[T]) -> None:
        if not entry.is_available and not entry.request_count:
            self._free(entry)

    def _not_found_error(self, ref: PolicyRef) -> PolicyNotFound:
        refs = [other for other in self.refs if other.policy_id == ref.policy_id]
        if self._base is not None and PolicyRef(ref.policy_id, 0) not in refs:
            refs.insert(0, PolicyRef(ref.policy_id, 0))
        names = ", ".join(map(str, refs)) or "no version of this policy"
        return PolicyNotFound(f"The engine does not have {ref}; it has {names}.")

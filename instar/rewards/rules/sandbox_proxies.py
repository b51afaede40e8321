"""Proxies for objects in another process. ``sandbox_rpc.py`` creates them inside sandboxes."""

from __future__ import annotations

import collections.abc
import operator
import secrets
import types
from collections.abc import Callable, Generator
from typing import Any

BINARY_OPS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "lshift", "rshift")
OPERATORS = {name: name for name in BINARY_OPS} | {"and": "and_", "or": "or_"}
"""Maps method names without underscores to function names in the module ``operator``."""
UNARY_OPS = (
    *("neg", "pos", "invert", "abs", "len", "iter", "str", "repr", "hash", "bool"),
    *("int", "float", "complex", "round", "index", "reversed"),
)
MEMBER_OPS = ("setattr", "delattr", "setitem", "delitem")
LOCAL_FIELDS = ("_peer", "_handle", "_label", "_is_constructed", "_data")


class RemoteObject:
    """A proxy for an object in the other process. If the peer is guarded, the other process runs an answer,
    which must not learn the value that a result is compared with: it could return an object that equals
    everything. So a proxy never equals data, and other operators with data raise TypeError, unless the tests
    created the object by calling a class with a capitalized name. If the object's class extends a built-in
    type, operators use the built-in value."""

    def __init__(self, peer: Any, handle: int) -> None:
        for name, value in zip(LOCAL_FIELDS, (peer, handle, "", False, None), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return set_label(self._peer.request("getattr", [self, name]), name)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.request("getitem", [self, key])

    def __contains__(self, item: Any) -> bool:
        if can_send_operands(self, item):
            return self._peer.request("contains", [self, item])
        return any(other is item or other == item for other in self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not self._peer.is_guarded:
            return bool(self._peer.request("eq", [self, other]))
        if self._data is not None:  # the class extends a built-in type, whose value is compared here
            return fetch_builtin_value(self) == fetch_builtin_value(other)
        if not isinstance(other, RemoteObject) or not self._peer.request("eq", [self, other]):
            return False
        try:
            return not self._peer.request("eq", [self, secrets.token_hex(8)])
        except Exception:  # noqa: BLE001 - an `__eq__` may raise anything for an object of a different type
            return True

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, exc_type: Any, exc: BaseException | None, trace: Any) -> Any:
        return self.__getattr__("__exit__")(exc_type, exc, None)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and self._peer.request("isinstance", [instance, self])

    def __aiter__(self) -> Any:
        return self.__getattr__("__aiter__")()

    async def __anext__(self) -> Any:
        return self._peer.request("anext", [self])

    @property  # isinstance(result, list) is True for a class that extends list
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._data) if self._data is not None else type(self)


class RemoteFunction(RemoteObject):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return set_constructed(self._peer.request(self, args, kwargs), is_constructed=False)


class RemoteClass(RemoteFunction):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return set_constructed(super().__call__(*args, **kwargs), is_constructed=self._label[:1].isupper())


class RemoteIterator(RemoteObject):
    def __next__(self) -> Any:
        return self._peer.request("next", [self])


class RemoteGenerator(RemoteIterator):
    @property
    def __class__(self) -> type[Any]:
        return types.GeneratorType


class RemoteCoroutine(RemoteObject, collections.abc.Coroutine[Any, Any, Any]):
    """A coroutine that runs to completion in the other process at its first step."""

    def send(self, value: Any) -> Any:
        raise StopIteration(self._peer.request("await", [self]))

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._peer.request("await", [self])
        yield  # makes this a generator, which `await` needs


PROXY_TYPES: dict[str, type[RemoteObject]] = {
    "object": RemoteObject,
    "function": RemoteFunction,
    "class": RemoteClass,
    "iterator": RemoteIterator,
    "generator": RemoteGenerator,
    "coroutine": RemoteCoroutine,
}


def create_proxy(peer: Any, handle: int, proxy_type: str, data: Any = None) -> RemoteObject:
    proxy = PROXY_TYPES.get(proxy_type, RemoteObject)(peer, handle)
    object.__setattr__(proxy, "_data", data)
    return proxy


def set_label(value: Any, name: str) -> Any:
    """Record the name by which this process refers to an object, and return the object. If an answer gives a
    class two names, the one that starts with a lowercase letter counts."""
    if isinstance(value, RemoteObject) and (not value._label or not name[:1].isupper()):
        object.__setattr__(value, "_label", name)
    return value


def wrap_with_write_back(function: Any) -> Any:
    """Make a remote function copy changes to mutable arguments back. Return other functions as they are."""
    if not isinstance(function, RemoteFunction):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function._peer.request(function, args, kwargs, writes_back=True)

    return call


def set_constructed(value: Any, *, is_constructed: bool) -> Any:
    if isinstance(value, RemoteObject):
        object.__setattr__(value, "_is_constructed", is_constructed)
    return value


def fetch_builtin_value(value: Any) -> Any:
    """Fetch the built-in value of a proxy whose class extends a built-in type. Return other values as is."""
    if isinstance(value, RemoteObject) and value._data is not None:
        return value._peer.request("data", [value])
    return value


def can_send_operands(proxy: RemoteObject, *others: Any) -> bool:
    """True if the operands of an operator may be sent to the proxy's process."""
    is_remote = all(isinstance(other, RemoteObject) for other in others)
    return is_remote or proxy._is_constructed or not proxy._peer.is_guarded


def apply_operator(method: str, function: str, proxy: RemoteObject, left: Any, right: Any) -> Any:
    if can_send_operands(proxy, left, right):
        value = proxy._peer.request(function, [left, right])
        return set_constructed(value, is_constructed=proxy._is_constructed)
    if proxy._data is None:
        raise TypeError(
            f"__{method}__ is not supported between an object that the answer returned and a built-in value"
        )
    return getattr(operator, function)(fetch_builtin_value(left), fetch_builtin_value(right))


def add_special_methods() -> None:
    def make_binary_method(method: str, function: str, *, is_reflected: bool = False) -> Callable[..., Any]:
        def call(self: RemoteObject, other: Any) -> Any:
            return apply_operator(method, function, self, *((other, self) if is_reflected else (self, other)))

        return call

    def make_forwarding_method(function: str) -> Callable[..., Any]:
        def call(self: RemoteObject, *args: Any) -> Any:
            return self._peer.request(function, [self, *args])

        return call

    for name, function in OPERATORS.items():
        setattr(RemoteObject, f"__{name}__", make_binary_method(name, function))
        setattr(RemoteObject, f"__r{name}__", make_binary_method(name, function, is_reflected=True))
    for name in ("lt", "le", "gt", "ge"):
        setattr(RemoteObject, f"__{name}__", make_binary_method(name, name))
    for name in (*UNARY_OPS, *MEMBER_OPS):
        setattr(RemoteObject, f"__{name}__", make_forwarding_method(name))
    for proxy_type in PROXY_TYPES.values():
        proxy_type.__doc__ = property(lambda self: self.__getattr__("__doc__"))  # pyright: ignore


add_special_methods()

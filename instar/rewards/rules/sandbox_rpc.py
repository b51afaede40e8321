"""Remote calls between an answer (the model's code) and its tests, which run in separate sandboxes. Messages
are JSON. Data is copied; other objects stay in their process, and the other process gets a proxy
(``sandbox_proxies.py``). Nothing is pickled, and only the standard library is required."""

from __future__ import annotations

import asyncio
import builtins
import collections
import datetime
import decimal
import fractions
import inspect
import json
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from instar.rewards.rules import sandbox_proxies as proxies

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_PLAIN_INT_BITS = 64


CONTAINERS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (list, set, bytearray, dict, collections.deque, collections.OrderedDict, collections.Counter)
} | {"defaultdict": collections.defaultdict}
"""Mutable types that are copied. Changes to arguments of these types can be copied back."""
VALUES: dict[str, tuple[type[Any], Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, list, lambda *items: items),
    "frozenset": (frozenset, list, lambda *items: frozenset(items)),
    "bytes": (bytes, lambda v: [v.decode("latin-1")], partial(str.encode, encoding="latin-1")),
    "int": (int, lambda v: [hex(v)], partial(int, base=16)),
    "complex": (complex, lambda v: [v.real, v.imag], complex),
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], slice),
    "keys": (type({}.keys()), list, lambda *keys: dict.fromkeys(keys).keys()),
    "values": (type({}.values()), list, lambda *items: dict(enumerate(items)).values()),
    "items": (type({}.items()), list, lambda *items: dict(items).items()),
    "decimal": (decimal.Decimal, lambda v: [str(v)], decimal.Decimal),
    "fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], fractions.Fraction),
    "datetime": (datetime.datetime, lambda v: [v.isoformat()], datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda v: [v.isoformat()], datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: [v.isoformat()], datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
}
"""Other types that are copied, by tag: the type, and functions that split a value and rebuild it."""
VALUE_TAGS = {cls: tag for tag, (cls, _, _) in VALUES.items()}
BUILTIN_CONVERTERS: dict[type[Any], Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda v: bytes(memoryview(v)),
    tuple: lambda v: (*tuple.__iter__(v),),
    list: list.copy,
    dict: dict[Any, Any].copy,
    set: lambda v: {*set.__iter__(v)},
    frozenset: frozenset[Any].union,
}
"""For each built-in type, a function that converts an instance of a subclass to the built-in type."""
TYPE_MODULES = ("builtins", "collections", "datetime", "decimal", "fractions")
"""The modules whose classes are sent by name, because they are the same in both processes. An answer can name
only classes, so it cannot return the tests' ``unittest.mock.ANY``, which equals every value."""


class ConnectionLost(Exception):
    """The other process has exited or violated the protocol."""


class Peer:
    """One end of the connection. Calls may be nested: while one end waits, it handles the other's calls."""

    is_guarded = False
    """True if proxies must not send this process's data, such as expected values, to the other process."""

    def __init__(self, descriptor: int) -> None:
        self.reader = open(descriptor, "rb", closefd=False)  # noqa: SIM115 - stays open until exit
        self.writer = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        self.lock = threading.RLock()
        self.exported: list[Any] = []
        """The objects for which the other process has proxies. An object's index is its handle."""
        self.handle_by_id: dict[int, int] = {}
        self.imported: dict[int, Any] = {}
        self.is_lost = False
        self.loop: asyncio.AbstractEventLoop | None = None

    def request(
        self, function: Any, args: Iterable[Any], kwargs: Mapping[str, Any] = {}, *, writes_back: bool = False
    ) -> Any:
        """Call a function in the other process: a proxy, or the name of a builtin or an operator. Changes to
        mutable arguments are copied back if the call returns None or ``writes_back`` is set."""
        encoder = Encoder(self)
        message = {
            "function": function if isinstance(function, str) else encoder.encode(function),
            "args": [encoder.encode(value) for value in args],
            "kwargs": {name: encoder.encode(value) for name, value in kwargs.items()},
            "writes_back": writes_back,
        }
        with self.lock:
            self.send(message)
            while "function" in (reply := self.receive()):
                self.send(self.handle(reply))
        sys.stdout.write(str(reply.get("output", "")))
        decoder = Decoder(self)
        if "error" in reply:
            raise decoder.decode(reply["error"])
        value = decoder.decode(reply["value"])
        if value is None or writes_back:
            self._write_back(encoder.containers, reply.get("changes", {}))
        return value

    def _write_back(self, containers: list[Any], changes: dict[str, Any]) -> None:
        decoder = Decoder(self, containers)
        decoded = {int(index): decoder.decode(content) for index, content in changes.items()}
        for index, content in decoded.items():
            container = containers[index]
            if isinstance(container, list | bytearray):
                container[:] = content
            else:
                container.clear()
                (container.extend if isinstance(container, collections.deque) else container.update)(content)

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Execute a call from the other process and return the reply."""
        decoder = Decoder(self)
        reply: dict[str, Any] = {}
        try:
            args = [decoder.decode(value) for value in message["args"]]
            kwargs = {name: decoder.decode(value) for name, value in message["kwargs"].items()}
            before = self._encode_contents(decoder.containers)
            callee = message["function"]
            self.authorize(callee, args)
            function = self._find_function(callee) if isinstance(callee, str) else decoder.decode(callee)
            value = function(*args, **kwargs)
            reply["value"] = Encoder(self).encode(value)
            if value is None or message["writes_back"]:
                after = self._encode_contents(decoder.containers)
                pairs = zip(before, after, strict=True)
                reply["changes"] = {i: new for i, (old, new) in enumerate(pairs) if old != new}
        except ConnectionLost:
            raise
        except BaseException as error:  # noqa: BLE001 - the caller gets every exception
            reply = {"error": Encoder(self).encode_exception(error)}
        return {**reply, "output": self.take_output()}

    def _encode_contents(self, containers: list[Any]) -> list[Any]:
        """Encode the contents of the containers. A container inside another one becomes a reference."""
        return [Encoder(self, containers).encode_container(container) for container in containers]

    def authorize(self, callee: Any, args: list[Any]) -> None:
        """Raise PermissionError or AttributeError if the other process must not make this call."""

    def check_export(self, value: Any) -> None:
        """Raise TypeError if the other process must not get a proxy for the object."""

    def take_output(self) -> str:
        """Return and clear the text that was printed since the last call."""
        return ""

    def _find_function(self, name: str) -> Callable[..., Any]:
        special = {"await": self._await, "anext": self._await_next, "data": to_builtin}
        return special.get(name) or getattr(operator, name, None) or getattr(builtins, name)

    def _await_next(self, iterator: Any) -> Any:
        return self._await(iterator.__anext__())

    def _await(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(wait())

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.writer.write(json.dumps(message).encode() + b"\n")
            self.writer.flush()
        except OSError as error:
            self.is_lost = True
            raise ConnectionLost("the connection was closed") from error

    def receive(self) -> dict[str, Any]:
        line = b""
        try:
            line = self.reader.readline(MAX_MESSAGE_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.is_lost = True
            problem = f"invalid message: {line[:100]!r}" if line else "the connection was closed"
            raise ConnectionLost(problem)
        return message

    def serve(self) -> None:
        while True:
            self.send(self.handle(self.receive()))

    def export(self, value: Any) -> int:
        if id(value) not in self.handle_by_id:
            self.check_export(value)
            self.handle_by_id[id(value)] = len(self.exported)
            self.exported.append(value)
        return self.handle_by_id[id(value)]


def to_builtin(value: Any) -> Any:
    """Convert an object whose class extends a built-in type to that type."""
    return next(convert(value) for base, convert in BUILTIN_CONVERTERS.items() if isinstance(value, base))


class Encoder:
    """Encodes values as JSON. Objects of this process become ``["mine", handle, ...]``, those of the other
    process ``["yours", handle]``, and containers that were already encoded ``["same", index]``."""

    def __init__(self, peer: Peer, containers: Iterable[Any] = ()) -> None:
        self.peer = peer
        self.containers = list(containers)
        self.positions = {id(container): index for index, container in enumerate(self.containers)}

    def encode(self, value: Any) -> Any:
        cls: type[Any] = type(value)
        if cls in (bool, str, float, type(None)):
            return value
        if cls is int and value.bit_length() <= MAX_PLAIN_INT_BITS:
            return value
        if id(value) in self.positions:
            return ["same", self.positions[id(value)]]
        if CONTAINERS.get(cls.__name__) is cls:
            self.positions[id(value)] = len(self.containers)
            self.containers.append(value)
            return self.encode_container(value)
        if cls in VALUE_TAGS:
            tag = VALUE_TAGS[cls]
            return [tag, *(self.encode(item) for item in VALUES[tag][1](value))]
        if isinstance(value, proxies.RemoteObject):
            return ["yours", value._handle]
        if isinstance(value, type):
            return self._encode_class(value)
        if isinstance(value, BaseException):
            return self.encode_exception(value)
        if cls.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
            return ["array", value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]
        if isinstance(value, tuple) and _is_plain_namedtuple(cls):
            return ["namedtuple", cls.__name__, cls._fields, *map(self.encode, value)]  # pyright: ignore
        data = [self.encode(to_builtin(value))] if isinstance(value, tuple(BUILTIN_CONVERTERS)) else []
        return ["mine", self.peer.export(value), _choose_proxy_type(value), *data]

    def encode_container(self, container: Any) -> Any:
        if isinstance(container, bytearray):
            items: Any = container.decode("latin-1")
        elif isinstance(container, dict):
            items = [[self.encode(key), self.encode(item)] for key, item in container.items()]
        else:
            items = [self.encode(item) for item in container]
        factory = getattr(container, "default_factory", None)
        return [type(container).__name__, items, *([] if factory is None else [self.encode(factory)])]

    def _encode_class(self, cls: type[Any]) -> Any:
        module, name = cls.__module__, cls.__name__
        if module in TYPE_MODULES and getattr(sys.modules[module], name, None) is cls:
            return ["type", module, name]
        if not issubclass(cls, BaseException):
            return ["mine", self.peer.export(cls), "class"]
        if "_remote_handle" in vars(cls):
            return ["yours", vars(cls)["_remote_handle"]]
        if module.partition(".")[0] in sys.stdlib_module_names and name == cls.__qualname__:
            return ["type", module, name, self._encode_class(cls.__bases__[0])]
        bases = [self.encode(base) for base in cls.__bases__ if issubclass(base, BaseException)]
        return ["exception type", self.peer.export(cls), name, *bases]

    def encode_exception(self, error: BaseException) -> Any:
        fields: dict[str, Any] = {k: v for k, v in vars(error).items() if not k.startswith("_")}
        error_type = self._encode_class(type(error))
        try:
            return ["exception", error_type, self.encode(error.args), self.encode(fields)]
        except (TypeError, ValueError, RecursionError):  # its arguments cannot be sent
            return ["exception", error_type, self.encode((str(error),)), self.encode({})]


class Decoder:
    def __init__(self, peer: Peer, containers: Iterable[Any] = ()) -> None:
        self.peer = peer
        self.containers = list(containers)

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, *args = value
        if tag in CONTAINERS:
            return self._decode_container(tag, *args)
        if tag in VALUES:
            return VALUES[tag][2](*map(self.decode, args))
        return getattr(self, f"_decode_{tag.replace(' ', '_')}")(*args)

    def _decode_container(self, tag: str, items: Any, *factory: Any) -> Any:
        container = CONTAINERS[tag](*map(self.decode, factory))
        self.containers.append(container)
        if isinstance(items, str):
            container += items.encode("latin-1")
        elif isinstance(container, dict):
            for key, item in items:
                container[self.decode(key)] = self.decode(item)
        else:
            add = container.add if isinstance(container, set) else container.append
            for item in items:
                add(self.decode(item))
        return container

    def _decode_same(self, index: int) -> Any:
        return self.containers[index]

    def _decode_array(self, dtype: str, shape: list[int], content: str) -> Any:
        import numpy  # only if an answer or a test uses it

        array_dtype = numpy.dtype(dtype)
        if array_dtype.hasobject:
            raise TypeError("arrays with dtype object are not supported")
        array = numpy.frombuffer(content.encode("latin-1"), array_dtype).reshape(shape).copy()
        return array if shape else array[()]

    def _decode_namedtuple(self, name: str, fields: list[str], *items: Any) -> Any:
        cls: Any = collections.namedtuple(name, fields)  # pyright: ignore[reportUntypedNamedTuple]
        return cls(*map(self.decode, items))

    def _decode_yours(self, handle: int) -> Any:
        return self.peer.exported[handle]

    def _decode_mine(self, handle: int, proxy_type: str, *data: Any) -> Any:
        if handle not in self.peer.imported:
            self.peer.imported[handle] = proxies.create_proxy(
                self.peer, handle, proxy_type, *(self.decode(item) for item in data)
            )
        return self.peer.imported[handle]

    def _decode_type(self, module: str, name: str, *base: Any) -> Any:
        cls = getattr(sys.modules.get(module), name, None)
        is_exception = isinstance(cls, type) and issubclass(cls, BaseException)
        package = module.partition(".")[0]
        # A SkipTest raised by the answer becomes a different class, so that it does not skip the test.
        if is_exception and package in sys.stdlib_module_names and package != "unittest":
            return cls
        if isinstance(cls, type) and module in TYPE_MODULES:
            return cls
        return type(name, (self.decode(base[0]),), {"__module__": module})

    def _decode_exception_type(self, handle: int, name: str, *bases: Any) -> Any:
        if handle not in self.peer.imported:
            parents = tuple(self.decode(base) for base in bases)
            self.peer.imported[handle] = type(name, parents, {"_remote_handle": handle})
        return self.peer.imported[handle]

    def _decode_exception(self, encoded_type: Any, args: Any, fields: Any) -> BaseException:
        error_type = self.decode(encoded_type)
        error = error_type.__new__(error_type, *self.decode(args))
        for name, item in self.decode(fields).items():
            if not name.startswith("_"):
                setattr(error, name, item)
        return error


def _is_plain_namedtuple(cls: type[Any]) -> bool:
    public = [name for name in vars(cls) if not name.startswith("_")]
    return cls.__bases__ == (tuple,) and public == list(getattr(cls, "_fields", [None]))


def _choose_proxy_type(value: Any) -> str:
    if inspect.iscoroutine(value) or inspect.isawaitable(value):
        return "coroutine"
    if inspect.isgenerator(value):
        return "generator"
    if hasattr(type(value), "__next__"):
        return "iterator"
    return "function" if callable(value) else "object"

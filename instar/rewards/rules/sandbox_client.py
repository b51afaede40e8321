"""Lets a task's tests call the model's code (the answer), which runs in its own sandbox."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import sys
import types
from typing import Any

from instar.rewards.rules import sandbox_proxies as proxies
from instar.rewards.rules.sandbox_rpc import ConnectionLost, Decoder, Peer

FUNCTION_TYPES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
ALLOWED_OPERATIONS = {
    *(*proxies.UNARY_OPS, *proxies.OPERATORS.values(), "eq", "lt", "le", "gt", "ge", "isinstance"),
    *("getitem", "setitem", "delitem", "contains", "next", "await", "anext"),
}
READABLE_FUNCTION_FIELDS = ("__name__", "__qualname__", "__doc__")
READABLE_OBJECT_FIELDS = ("__enter__", "__exit__", "__aiter__")
PROTECTED_NAMES = {*dir(builtins), *sys.stdlib_module_names}
ALLOWED_LIBRARIES = {*sys.stdlib_module_names, "numpy"} - {"antigravity", "this"}  # these have side effects
INDIRECT_ACCESS = ("globals", "eval", "exec", "importlib", "sys", "locals", "vars")
TEST_PREFIXES = ("test", "pytest", "setup", "teardown")
UPDATE_ARGUMENTS = "__update_arguments__"


class TestsPeer(Peer):
    """The tests' end of the connection. The answer can use only objects that a test has passed to it."""

    is_guarded = True

    def __init__(self, descriptor: int, tests_module: str) -> None:
        super().__init__(descriptor)
        self.tests_module = tests_module

    def check_export(self, value: Any) -> None:
        if isinstance(value, FUNCTION_TYPES) or hasattr(type(value), "__next__") or self._is_mock(value):
            return
        if not self._is_test_object(value):
            raise TypeError(f"a test cannot pass a {type(value).__name__} to the answer; pass data instead")

    def authorize(self, callee: Any, args: list[Any]) -> None:
        if not isinstance(callee, str):
            is_allowed = callee[0] == "yours"
        elif callee in ("getattr", "setattr"):
            is_allowed = self._can_access(args[0], args[1], is_write=callee == "setattr")
        else:
            is_allowed = callee in ALLOWED_OPERATIONS
        if not is_allowed:
            error = AttributeError if callee == "getattr" else PermissionError
            raise error(f"the answer may not call {callee!r:.50} on this object")

    def _can_access(self, target: Any, name: str, *, is_write: bool) -> bool:
        if not any(target is value for value in self.exported):
            return False
        if self._is_mock(target):
            return not is_write and name not in dir(sys.modules["unittest.mock"].NonCallableMock)
        if not self._is_test_object(target):
            return not is_write and name in READABLE_FUNCTION_FIELDS
        if is_write and (isinstance(target, type) or hasattr(type(target), name)):
            return False  # the answer must not replace a method that the tests define
        return not name.startswith("_") or (name in READABLE_OBJECT_FIELDS and not is_write)

    def _is_test_object(self, value: Any) -> bool:
        cls: type[Any] = value if isinstance(value, type) else type(value)
        return cls.__module__ == self.tests_module or isinstance(value, io.StringIO | io.BytesIO)

    def _is_mock(self, value: Any) -> bool:
        mock = sys.modules.get("unittest.mock")
        return mock is not None and isinstance(value, mock.NonCallableMock)


class AnswerModule(types.ModuleType):
    """The answer's module. Tests may import from it and patch it."""

    def __init__(self, module_name: str, module: Any, names: dict[str, Any]) -> None:
        super().__init__(module_name)
        # With `from answer import *`, a test_* function in the answer would become a test.
        public = [name for name in names if not name.lower().startswith(TEST_PREFIXES)]
        self.__dict__.update(_module=module, __all__=public, __getattr__=functools.partial(getattr, module))
        self.__dict__["_originals"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        self._originals.setdefault(name, getattr(self._module, name, None))
        setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        """Restore the original value of a name. `unittest.mock.patch` ends by deleting the name that it
        patched, because the answer's names are not in ``__dict__``."""
        setattr(self._module, name, self._originals.pop(name))


class Answer:
    """The answer in the other sandbox. ``names`` is None if the answer could not be executed."""

    def __init__(self, descriptor: int, module_name: str, tests_module: str) -> None:
        self.peer = TestsPeer(descriptor, tests_module)
        setattr(builtins, UPDATE_ARGUMENTS, proxies.wrap_with_write_back)
        self.module_name = module_name
        self.names: dict[str, Any] | None = None
        sys.modules[module_name] = None  # pyright: ignore[reportArgumentType]
        try:
            message = self.peer.receive()
            sys.stdout.write(message.get("output", ""))
            if "names" not in message:
                sys.stderr.write(message["error"])
                return
            module = Decoder(self.peer).decode(message["module"])
            self.names = {
                name: value
                for name, encoded in message["names"].items()
                # The answer must not replace __builtins__.
                if not name.startswith("__") and (value := self._decode_global(name, encoded)) is not None
            }
        except (ConnectionLost, LookupError, TypeError, ValueError, AttributeError) as error:
            sys.stderr.write(f"the answer could not be loaded: {error}\n")
        else:
            own_names = {name: value for name, value in self.names.items() if name not in PROTECTED_NAMES}
            sys.modules[module_name] = AnswerModule(module_name, module, own_names)

    def _decode_global(self, name: str, encoded: Any) -> Any:
        """Decode a global of the answer. Library modules, and objects from them, are imported locally. Return
        None if the library is not allowed."""
        match encoded:
            case ["module", str(module)] | ["library", str(module)]:
                if module.partition(".")[0] not in ALLOWED_LIBRARIES:
                    return None
                if encoded[0] == "library":
                    return getattr(importlib.import_module(module), name, None)
                return importlib.import_module(module)
            case _:
                return proxies.set_label(Decoder(self.peer).decode(encoded), name)

    def prepare_test(self, test: str) -> tuple[str | ast.Module, dict[str, Any]]:
        """Return the code of a test, and the answer's names that it sees. An answer's own ``abs`` would hide
        the builtin, so a test sees it only if the test uses no other name from the answer and no ``eval``."""
        assert self.names is not None
        try:
            tree = ast.parse(test)
        except SyntaxError:  # it is reported when the test is executed
            return test, {}
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assigned = {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
        used = {node.id for node in nodes if node.id in self.names and node.id not in assigned}
        used = {name for name in used if not isinstance(self.names[name], types.ModuleType)}
        hidden = {
            name for name in self.names if name in PROTECTED_NAMES and not _is_genuine(name, self.names[name])
        }
        if len(used) == 1 and not any(word in test for word in (self.module_name, *INDIRECT_ACCESS)):
            hidden -= used
        visible = {name: value for name, value in self.names.items() if name not in hidden}
        return rewrite_call_statements(tree), visible


def _is_genuine(name: str, value: Any) -> bool:
    """True if the value is Python's own builtin, module or class with that name, such as `abs`."""
    module = sys.modules.get(name)
    return any(
        value is known for known in (getattr(builtins, name, module), module, getattr(module, name, module))
    )


class _CallStatementRewriter(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            name = ast.Name(UPDATE_ARGUMENTS, ast.Load())
            call.func = ast.Call(name, [call.func], [])
        return ast.fix_missing_locations(node)


def rewrite_call_statements(tree: ast.Module) -> ast.Module:
    """Rewrite calls that are statements, such as ``sort(items)``, so that they update their arguments. Other
    calls must not do so: with ``assert f(items) == sorted(items)``, an answer could empty the list."""
    return _CallStatementRewriter().visit(tree)

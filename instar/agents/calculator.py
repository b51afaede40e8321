"""The calculator tool that the agents use."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MAX_EXPRESSION_CHARS = 64

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(arguments: str) -> str:
    """Return the result of a call of `calc` with these JSON arguments: a number, or `error`."""
    try:
        parsed = json.loads(arguments)
        value = evaluate(parsed["expression"])
    except (ValueError, TypeError, KeyError, SyntaxError, ZeroDivisionError, RecursionError, OverflowError):
        return "error"
    return str(int(value)) if value == int(value) else f"{value:.4f}".rstrip("0")


def evaluate(expression: str) -> float:
    """Return the value of an expression of numbers and the four operations. Raises ValueError otherwise."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("expression too long")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case _:
            raise ValueError(f"not arithmetic: {ast.dump(node)}")

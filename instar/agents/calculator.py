"""The calculator tool for the GSM8K agents and the demo's agent."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from instar.agents.openai_agent import make_tool

CALC_TOOL = make_tool("calc", "Evaluate arithmetic.", "expression")
MAX_EXPRESSION_CHARS = 64

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(arguments: str) -> str:
    """Return the result of the `calc` tool for the JSON ``arguments``: a number or `error`."""
    try:
        value = evaluate(json.loads(arguments)["expression"])
        return str(int(value)) if value == int(value) else f"{value:.4f}".rstrip("0").rstrip(".")
    except (ValueError, TypeError, KeyError, SyntaxError, ArithmeticError, RecursionError):
        return "error"


def evaluate(expression: str) -> float:
    """Return the value of an arithmetic expression. Raises ValueError if the expression is too long or not
    arithmetic, and SyntaxError, ArithmeticError or RecursionError if it cannot be parsed or computed."""
    if not isinstance(expression, str):  # pyright: ignore[reportUnnecessaryIsInstance] - chosen by a model
        raise ValueError("the expression is not a string")
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION_CHARS} characters")
    return _evaluate_node(ast.parse(expression.strip(), mode="eval").body)


def _evaluate_node(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_evaluate_node(node.left), _evaluate_node(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate_node(node.operand)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")

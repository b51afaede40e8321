"""Write docs/models.md from docs/models.json, or check that it is current.

    python tools/models_page.py [--check]

`python bench/families.py --record docs/models.json` measures the results. The check fails if the page differs
from them, or if they are not those of all types in the installed transformers and of all formats in
tests/model_families.txt. tests/integration/test_model_families.py measures the formats again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
FAMILIES = ROOT / "tests" / "model_families.txt"
MEASURE = "run `python bench/families.py --record docs/models.json`, then `make docs`"
HEAD = """# Models

This page is generated (`make docs`) from `docs/models.json`, which is measured by
`python bench/families.py --record docs/models.json`. One model is checked by its config and tokenizer alone:

```
instar models check Qwen/Qwen3-0.6B          # or a folder; --json for programs
```

The command shows the model's type, the formats of its tool calls and reasoning, how much of a conversation
is recorded exactly, and which engines and backends support it. The exit status is 0 if at least one engine
can serve the model exactly. What was not checked is listed: the weights, the models of training services,
and vLLM if it is not installed (`--python` names the interpreter that has it).

## Formats of prompts and replies

A conversation with parallel tool calls, reasoning, compact and unusually spaced JSON and text outside of
ASCII is held in each format, from a folder with a made-up name. *Linked* is the fraction of follow-up calls
that are recorded as continuations, *trained* the fraction of sampled tokens that are trained on, and
*exact* the fraction of follow-up calls whose prompt starts with the exact tokens of the call before them.
Some formats rewrite the history after a new message of the user, because they drop reasoning or move the
system message or the tools; these calls are counted separately. The chat templates are published ones. A
tokenizer is published, too, or reconstructed from the special tokens of the template.
"""
TYPES_HEAD = """
## Architectures

These are the causal language models of transformers {transformers}, by the type in their config. The local
engine and backend compute {right} of {total} types like transformers does: logprobs, gradients and a
trained adapter, within 1e-4 in fp32. They refuse the others with the reason; use vLLM as the engine of
these, and verl or a training service as the backend.

**Supported**: {names}.

| refused type | by | reason |
|---|---|---|
"""
_REFUSAL = re.compile(
    r"The local (?P<part>engine|backend) does not support the model '[^']*': (?P<reason>.*)"
)
_ADVICE = re.compile(r"[.;] *Set (engine|backend)\.type to .*$")


def render_page(results: Mapping[str, Any], sources: Mapping[str, bool]) -> str:
    """Return the page. ``sources`` tells of each format whether its tokenizer is a published one."""
    return HEAD + "\n".join(_render_formats(results["families"], sources)) + _render_types(results)


def _render_formats(rows: Mapping[str, Any], sources: Mapping[str, bool]) -> Iterator[str]:
    yield "\n| model | tokenizer | tool calls | reasoning | linked | trained | exact | rewritten |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        tokenizer = "published" if sources[name] else "reconstructed"
        reasoning = f"`{_escape(row['reasoning'])}`" if row["reasoning"] else "none"
        fractions = " | ".join(f"{row[key]:.0%}" for key in ("linked", "trained", "exact_possible"))
        rewritten = row["rewritten"] or ""
        yield f"| {name} | {tokenizer} | {row['tools']} | {reasoning} | {fractions} | {rewritten} |"


def _render_types(results: Mapping[str, Any]) -> str:
    types: Mapping[str, Mapping[str, str]] = results["types"]
    right = [f"`{name}`" for name, row in types.items() if row["outcome"] == "right"]
    head = TYPES_HEAD.format(
        transformers=results["transformers"], right=len(right), total=len(types), names=", ".join(right)
    )
    rows = [
        f"| `{name}` | {' | '.join(_split_refusal(row))} |"
        for name, row in types.items()
        if row["outcome"] != "right"
    ]
    return head + "\n".join(rows) + "\n"


def _split_refusal(row: Mapping[str, str]) -> tuple[str, str]:
    """Return the part that refuses a type, and its reason."""
    text = " ".join(row["detail"].split())
    if row["outcome"] != "refused":
        return "", _escape(f"{row['outcome']}: {text}")
    if (match := _REFUSAL.match(text)) is None:  # an error that names a setting of the part
        return text.partition(".")[0], _escape(text)
    reason = _ADVICE.sub("", match["reason"]).replace("<", "&lt;")
    return match["part"], _escape(reason)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def read_sources() -> dict[str, bool]:
    """Return the name of each format, and True if its tokenizer is published."""
    head, *lines = FAMILIES.read_text().splitlines()
    column = head.split().index("package")
    return {line.split()[0]: line.split()[column] != "-" for line in lines}


def find_problem(results: Mapping[str, Any], page: str) -> str | None:
    """Return why the results or the page are not current, or None."""
    for kind, known in (("types", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("families", read_sources())):
        if different := sorted(set(results[kind]) ^ set(known)):
            return f"docs/models.json is outdated: {', '.join(different[:5])} in {kind}; {MEASURE}"
    if page != render_page(results, read_sources()):
        return "docs/models.md is outdated; run `make docs`"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is outdated")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    if not arguments.check:
        PAGE.write_text(render_page(results, read_sources()))
    elif problem := find_problem(results, PAGE.read_text() if PAGE.is_file() else ""):
        sys.exit(problem)


if __name__ == "__main__":
    main()

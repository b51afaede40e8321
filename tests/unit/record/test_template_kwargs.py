"""Tests for the variables of chat templates, and for renderers with other values of them."""

from __future__ import annotations

import pytest

from instar.errors import RenderError
from instar.record.family import FamilyRenderer
from instar.record.render import TemplateRenderer
from instar.record.template_kwargs import find_template_variables
from instar.types import Message
from tests.tiny import CHATML, make_tiny_tokenizer
from tests.unit.record.conftest import LoadTemplate

USER = Message(role="user", content="Hi")
QWEN = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}",
)
TEMPLATES: list[tuple[str, set[str]]] = [
    (CHATML, set()),
    (QWEN, {"enable_thinking"}),
    (
        "{%- macro head() %}{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}"
        "{%- endif %}{{ reasoning_effort }}{% endmacro %}{{ bos_token }}{{ head() }}",
        {"reasoning_effort"},
    ),
    (
        "{%- set thinking = thinking | default(false) %}{% set ns = namespace(first=true) %}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if thinking %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%d') if date_string is not defined else date_string }}"
        "{% if tools %}{{ raise_exception('no') }}{% endif %}",
        {"thinking", "date_string"},
    ),
    ("{% for m in messages", set()),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_template_variables_are_those_that_a_request_can_set(template: str, expected: set[str]) -> None:
    assert find_template_variables(make_tiny_tokenizer(template=template)) == expected


def test_variant_renders_and_parses_with_its_variables(load_template: LoadTemplate) -> None:
    renderer = load_template(QWEN)
    variant = renderer.with_template_kwargs({"enable_thinking": False})
    assert isinstance(variant, TemplateRenderer)
    assert renderer.with_template_kwargs({"enable_thinking": False}) is variant
    assert renderer.with_template_kwargs({}) is renderer
    prompts = [str(make_tiny_tokenizer().decode(r.render([USER]))) for r in (renderer, variant)]
    assert [prompt.partition("assistant\n")[2] for prompt in prompts] == [
        "<think>\n",
        "<think>\n\n</think>\n\n",
    ]
    reply = renderer.encode("Fine.")
    assert renderer.parse(reply) == {"role": "assistant", "content": "", "reasoning": "Fine."}
    assert variant.parse(reply) == {"role": "assistant", "content": "Fine."}
    sampled = [*reply, variant.stop_token_ids[-1]]
    extended = variant.extend(variant.render([USER]), sampled, [USER])
    assert extended is None or str(make_tiny_tokenizer().decode(extended)).endswith("</think>\n\n")


def test_variant_rejects_special_tokens_and_follows_the_prompt_limit(load_template: LoadTemplate) -> None:
    renderer = load_template(CHATML + "{{ note }}")
    with pytest.raises(RenderError, match="special token"):
        renderer.with_template_kwargs({"note": "x<|im_end|>"})
    renderer.max_prompt_tokens = 77
    assert renderer.with_template_kwargs({"note": "x"}).max_prompt_tokens == 77


def test_least_recently_used_variants_are_dropped(load_template: LoadTemplate) -> None:
    renderer = load_template(CHATML + "{{ note }}")
    first, second = (renderer.with_template_kwargs({"note": n}) for n in (1, 2))
    for n in range(3, 18):
        renderer.with_template_kwargs({"note": n})
        assert renderer.with_template_kwargs({"note": 1}) is first
    assert renderer.with_template_kwargs({"note": 2}) is not second


def test_family_variant_renders_with_the_variables_of_the_family() -> None:
    tokenizer = make_tiny_tokenizer()
    names = ["think", "tool_call", "tool_response"]
    tokenizer.add_tokens([tag for name in names for tag in (f"<{name}>", f"</{name}>")])
    renderer = FamilyRenderer(tokenizer, "qwen3")
    assert renderer.template_variables == {"enable_thinking"}
    variant = renderer.with_template_kwargs({"enable_thinking": False})
    decode = tokenizer.decode
    assert decode(variant.render([USER])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert decode(renderer.render([USER])).endswith("<|im_start|>assistant\n")
    with pytest.raises(RenderError, match="enable_thinking"):
        renderer.with_template_kwargs({"enable_thinking": "perhaps"})

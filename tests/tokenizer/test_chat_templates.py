"""Chat templates: the built-in ones, what real templates use, and what hostile ones try."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ChatTemplateError
from engine.tokenizer import BUILTIN_TEMPLATES, ChatTemplate

TALK = [
    {"role": "system", "content": " Be nice. "},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]

EXPECTED = {
    "chatml": "<|im_start|>system\n Be nice. <|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "[INST]  Be nice. \n Hi\n [/INST]Hello</s>[INST] Why? [/INST]",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe nice.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>user\nBe nice.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
}
ANSWER_STARTS = {
    "chatml": "<|im_start|>assistant\n",
    "llama2": "",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
}


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(TALK, variables=variables)


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_builtin_templates(name):
    template = ChatTemplate(name)
    assert template.render(TALK) == EXPECTED[name]
    assert template.render(TALK, add_generation_prompt=False) + ANSWER_STARTS[name] == EXPECTED[name]


@given(st.text("<b>&'\"{}%# é\n", max_size=20))
def test_content_is_never_escaped_or_read_as_a_template(content):
    text = ChatTemplate("chatml").render([{"role": "user", "content": content}], False)
    assert text == f"<|im_start|>user\n{content}<|im_end|>\n"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s></s>True"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% break %}{% endfor %}", "x"),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }} {% endfor %}",
         "0False4 1False4 2False4 3True4 "),
        ("{{ {'a': ['<', 'é']} | tojson }}", '{"a": ["<", "é"]}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ messages[0]['content'].strip().split(' ')[-1] }}", "nice."),
        ("{{ messages[1:] | map(attribute='role') | join(',') }}", "user,assistant,user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ns.n}}",
         "16"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') ~ m(1) }}", "[a][1]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{% generation %}{{ 'a' }}{% endgeneration %}", "a"),
        ("{{ '%s-%.2f' % ('a', 1.5) }}{{ '%d' | format(3) }}", "a-1.503"),
        ("{{ 'x' if 'b' in 'abc' else 'y' }}{{ (1, 2) == (1, 2) }}{{ 2 ** 10 }}", "xTrue1024"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
         "[('a', 2), ('b', 1)]a1"),
        ("{{ 'aXb'.replace('X', '-') | replace('a', 'c') }}{{ '-'.join(['a', 'b']) }}", "c-ba-b"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent }}|{{ 1.26 | round(1) }}", "a\n  b|a\n    b|1.3"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        ("{{ tools[0].name }}", "f"),
        ("{% for k, v in {'a': [1, 2]} | items %}{{ k }}{{ v[::-1] }}{% endfor %}", "a[2, 1]"),
    ],
)  # fmt: skip
def test_what_real_templates_use(source, expected):
    assert render(source, tools=[{"name": "f"}]) == expected


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ 10 ** 10000 }}",
    "{{ (2**1000) ** 1000 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}",
    "{% set ns = namespace(a=3) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(3) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
    "{% set x = 'a' * 8000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
    "{% set y %}{% for i in range(100000) %}" + "z" * 10000 + "{% endfor %}{% endset %}",
    "{% set x = 'a' * 8000000 %}{{ x }}{{ x }}",
    "{{ [['a' * 100000] * 100000] * 100 }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 1000) }}",
    "{{ ('a' * 1000000).join('b' * 1000) }}",
    "{{ (['b'] * 1000) | join('a' * 1000000) }}",
    "{{ (['b'] * 1000) | join(d='a' * 1000000) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%(a)99999999d' % {'a': 1} }}",
    "{{ '%*d' % (99999999, 1) }}",
    "{{ '%99999999d' | format(1) }}",
    "{{ ('%s' * 1000) % (['a' * 100000] * 1000 | list) }}",
    "{{ '{:>999999999}'.format('a') }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 1 | round(10**9, 'ceil') }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ [1, 2] | tojson(separators=('a' * 8000000, 'b')) }}",
    "{{ ('\n' * 100000) | indent(1000) }}",
    "{{ strftime_now('%99999999d') }}",
    "{{ lipsum(10**6) }}",
    "{% for i in range(90000) %}{{ (range(90000) | list) | length }}{% endfor %}",
    "{{ " + "(" * 100000,
    "{{ " + "-" * 50000 + "1 }}",
]


@pytest.mark.parametrize("source", BOMBS, ids=lambda s: s[:60])
@pytest.mark.slow
def test_blow_ups_are_refused(source):
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.pop() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ (1).__class__ }}",
        "{{ 'a'.encode() }}",
        "{% include 'secret' %}",
        "{% import 'os' as os %}",
        "{{ messages | attr('__class__') }}",
    ],
)
def test_no_way_out(source):
    try:
        assert render(source) == ""  # an unsafe attribute that is only looked at is undefined
    except ChatTemplateError:
        pass


def test_budget_is_per_rendering():
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok")
    assert [template.render(TALK) for _ in range(8)] == ["ok"] * 8


def test_long_conversations_fit():
    talk = [{"role": r, "content": "word " * 500} for _ in range(300) for r in ("user", "assistant")]
    text = "{% for m in messages %}{{ m.content | trim }}{{ messages | length - loop.index0 }}{% endfor %}"
    assert len(ChatTemplate(text).render(talk)) > 1_400_000


@pytest.mark.parametrize(
    "source", ["{% if %}", "{% for x in y %}", "{{ 1 | nothing }}", "{{{", "{% endif %}"]
)
def test_templates_that_do_not_compile(source):
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source)


def test_the_templates_own_refusal_is_told():
    with pytest.raises(ChatTemplateError, match="failed: no system role$"):
        render("{{ raise_exception('no\nsystem\trole') }}")


@pytest.mark.parametrize("source", [None, "", " \n"])
def test_missing_template_names_the_option(source):
    with pytest.raises(ChatTemplateError, match="chatml, gemma, llama2, llama3.*--chat-template"):
        ChatTemplate(source)


def test_unknown_name():
    with pytest.raises(ChatTemplateError, match="'vicuna' is no template and none of chatml"):
        ChatTemplate("vicuna")


def test_source_length_is_limited():
    with pytest.raises(ChatTemplateError, match="1048576 are allowed"):
        ChatTemplate("{" + "a" * 2_000_000)


@pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [{"role": 1, "content": "hi"}]])
def test_messages_need_a_role(messages):
    with pytest.raises(ChatTemplateError, match="message 0"):
        ChatTemplate("chatml").render(messages)


def test_messages_of_the_caller_are_left_alone():
    talk = [{"role": "user", "content": "a"}]
    ChatTemplate("{% for m in messages %}{% set m = 1 %}{% endfor %}{% set messages = [] %}").render(talk)
    assert talk == [{"role": "user", "content": "a"}]

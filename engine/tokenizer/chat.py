"""Chat templates: a conversation written as the text a model was trained on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ChatTemplateError

MAX_SOURCE = 1024 * 1024

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA2 = """\
{% set turn = namespace(open=true) %}
{{ '[INST] ' }}
{%- for message in messages %}
{% if not turn.open %}{{ '[INST] ' }}{% endif %}
{% set turn.open = message.role != 'assistant' %}
{% if message.role == 'system' %}{{ message.content ~ '\n' }}
{%- elif message.role == 'user' %}{{ message.content ~ ' [/INST]' }}
{%- else %}{{ message.content ~ '</s>' }}{% endif %}
{% endfor %}"""

LLAMA3 = """\
{% macro header(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}{% endmacro %}
{% for message in messages %}
{{ header(message.role) ~ (message.content | trim) ~ '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

GEMMA = """\
{% set system = namespace(text='') %}
{% for message in messages %}
{% if message.role == 'system' %}
{% set system.text = system.text ~ (message.content | trim) %}
{% continue %}
{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' ~ role ~ '\n' }}
{%- if system.text and role != 'model' %}{{ system.text ~ '\n\n' }}{% set system.text = '' %}{% endif %}
{{ (message.content | trim) ~ '<end_of_turn>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

BUILTIN_TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "llama3": LLAMA3, "gemma": GEMMA}


class ChatTemplate:
    """A chat template, compiled. It comes from a file nobody vouches for: see `engine.tokenizer.sandbox`."""

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        """`source` is a Jinja template or a name in `BUILTIN_TEMPLATES`."""
        self.source = check_source(source)
        self.bos_token, self.eos_token = bos_token, eos_token
        self._lock = threading.Lock()
        from engine.tokenizer.sandbox import Sandbox

        self._environment = Sandbox()
        try:
            self._template = self._environment.from_string(self.source)
        except Exception as error:  # whatever such a file makes the parser raise
            raise ChatTemplateError(f"the chat template does not compile: {one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, ready for the model's answer if `add_generation_prompt`.

        `variables` are further names the template may ask for, such as `tools`.
        """
        names = {"bos_token": self.bos_token, "eos_token": self.eos_token, **(variables or {})}
        names |= {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
        from engine.tokenizer.sandbox import Budget, fits

        with self._lock:
            self._environment.budget = Budget()
            try:
                text = self._template.render(names)
                fits(len(text))
            except Exception as error:  # whatever such a file makes the template raise
                raise ChatTemplateError(f"the chat template failed: {one_line(error)}") from error
        return text


def check_source(source: str | None) -> str:
    """The template's text, looked up if it is a name."""
    known = ", ".join(sorted(BUILTIN_TEMPLATES))
    if source is None or not source.strip():
        raise ChatTemplateError(
            f"there is no chat template: give its text or name ({known}) with --chat-template"
        )
    if source in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[source]
    if "{" not in source:
        raise ChatTemplateError(f"--chat-template {one_line(source)!r} is no template and none of {known}")
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(source)} characters; {MAX_SOURCE} are allowed")
    return source


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as dictionaries of their own, each with a role."""
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"message {i} is not a mapping with a 'role' (system, user, assistant)")
        checked.append(dict(message))
    return checked


def one_line(what: object) -> str:
    """At most 200 characters, on one line."""
    text = " ".join(str(what).split()) or type(what).__name__
    return text if len(text) <= 200 else text[:199] + "…"

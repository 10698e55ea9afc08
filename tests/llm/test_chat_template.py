"""ChatTemplate: what transformers renders, and what a hostile template cannot do."""

import dataclasses
import random
import time
from typing import Any

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.chat_template import ChatTemplate
from tests.llm.tokenizers_on_the_spot import chat_template_of_smollm2, smollm2_folder

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml": """{% for m in messages %}
<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}{% else %}{% set system = false %}{% endif %}
{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant') }}
    {% endif %}
    {% if m['role'] == 'user' %}
{{ bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n' if loop.first and system else '') + m['content'] + ' [/INST]' }}
    {%- else %}
{{ ' ' + m['content'] + ' ' + eos_token }}
    {%- endif %}
{% endfor %}""",  # noqa: E501
    "tools": """{%- if tools %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' + (tool | tojson(indent=2)) }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}""",
    "namespace": """{%- set ns = namespace(count=0, last='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = m.content %}
    {%- if ns.count > 3 %}{% break %}{% endif %}
    {{- ns.count ~ ': ' ~ m.content ~ '\\n' }}
{%- endfor %}
{{- ns.last | upper }}""",
    "macro": """{%- macro turn(m, mark='#') %}{{ mark }}{{ m.role | capitalize }}: {{ m.content | replace('\\n', ' ') }}{% endmacro %}
{%- for m in messages %}{{ turn(m, mark='##' if loop.last else '#') }}
{% endfor %}""",  # noqa: E501
    "generation": """{%- for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}""",  # noqa: E501
    "thinking": """{%- for m in messages %}
{%- if m.reasoning_content is defined and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content else m.content %}
{{- m.role + ': ' + content }}
{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think>

</think>{% endif %}""",
    "json": """{{ messages | tojson }}{{ {'é<&>': [1, 2.5, none, true]} | tojson }}""",
    "date": """Today: {{ strftime_now('%Y') }}{% if documents %}{% for d in documents %}[{{ d.title }}]{% endfor %}{% endif %}
{%- for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }} {{ m['content'] }};{% else %}none{% endfor %}""",  # noqa: E501
    "whitespace": """{% for m in messages %}
  {% if loop.first %}
      {{ m.content }}
  {% else %}

    -{{ m.content }}-
  {% endif %}
{% endfor %}
  {# a comment #}
end
""",
    "parts": """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}""",
    "dicts": """{%- set names = dict(user='U', assistant='A') %}{% for m in messages %}
{{- names.get(m.role, '?') }}{% for key, value in m | items %}{{ key }}={{ value }},{% endfor %}{% endfor %}""",
}
if (smollm2_folder() / "tokenizer_config.json").exists():
    TEMPLATES["smollm2"] = chat_template_of_smollm2()

TOOLS = [{"type": "function", "function": {"name": "näme", "parameters": {"b": 1, "a": ["<x>"]}}}]


def _conversation(chance: random.Random) -> list[dict[str, Any]]:
    words = ["Hi", "two\nlines", " spaced ", "a<b>&c", "東京 😀", "'quoted'", "<think>x</think>\n\ny", ""]
    turns = ["user", "assistant"] * 3
    messages: list[dict[str, Any]] = [
        {"role": role, "content": chance.choice(words)} for role in turns[: chance.randint(1, 6)]
    ]
    if chance.random() < 0.4:
        messages.insert(0, {"role": "system", "content": chance.choice(words)})
    if chance.random() < 0.3:
        messages[-1]["reasoning"] = "because"
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_equals_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # the reference

    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    chance = random.Random(name)
    for _ in range(25):
        messages = _conversation(chance)
        if name == "parts":
            messages[-1]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        options = {
            "tools": chance.choice([None, TOOLS]),
            "documents": chance.choice([None, [{"title": "t", "text": "x"}]]),
            "add_generation_prompt": chance.random() < 0.5,
        }
        variables = {"enable_thinking": chance.random() < 0.5} if chance.random() < 0.5 else {}
        try:
            (expected,), _ = render_jinja_template(
                [messages], chat_template=TEMPLATES[name], **options, **SPECIAL, **variables
            )
        except Exception as error:  # noqa: BLE001 - ours must refuse then, too
            with pytest.raises(InvalidRequestError, match=str(error)[:20]):
                template.render(messages, **options, **variables)
            continue
        assert template.render(messages, **options, **variables) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% for c in 'xx' %}x{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in [1, 2] %}{{ f(n) if n < 900 else '' }}{% endfor %}{% endmacro %}"
        "{% macro g(n) %}{% if n %}{{ g(n - 1) }}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(60) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="end in time"):
        ChatTemplate(source, seconds=0.1).render([{"role": "user", "content": "a"}])
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'x' * 99999999 }}", "too much memory"),
        ("{{ 9 ** 99999999 }}", "too much memory"),
        ("{{ 'x'.center(999999999) }}{{ 'x' | center(999999999) }}", "too much memory"),
        ("{% set w = 999999999 %}{{ 'x' | center(w) }}", "too much memory"),
        ("{% set a = 'x' * 99999 %}{{ a.replace('x', a) }}", "too much memory"),
        ("{% set a = 'x' * 99999 %}{{ a | replace('x', a) }}", "too much memory"),
        ("{{ '%0999999999d' % 1 }}", "too much memory"),
        ("{{ '%0*d' | format(999999999, 1) }}", "too much memory"),
        ("{{ '{:>999999999}'.format(1) }}", "too much memory"),
        ("{{ '{:>{}}'.format(1, 999999999) }}", "too much memory"),
        (
            "{% set n = namespace(s='xy') %}{% for _ in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "too much memory",
        ),
        (
            "{% set n = namespace(s='xy') %}{% for _ in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "too much memory",
        ),
        (
            "{% set n = namespace(s=['xy']) %}{% for _ in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "too much memory",
        ),
        ("{% set a = 'x' * 999999 %}{% for _ in range(999) %}{{ a }}{% endfor %}", "too much memory"),
        (
            "{% set a = 'x' * 999999 %}{% set b %}{% for _ in range(999) %}{{ a }}{% endfor %}{% endset %}",
            "too much memory",
        ),
        ("{{ dict.mro() }}", "refused"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{{ cycler.__init__.__globals__ }}", "refused"),
        ("{{ lipsum(99999) }}", "undefined"),
        ("{{ messages.__class__.__mro__ }}", "refused"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ messages[0].update({'a': 1}) }}", "refused"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ nothing.there }}", "undefined"),
        ("{{ 1 / 0 }}", "division"),
        ("{% include 'other' %}", "refused"),
    ],
)
def test_a_hostile_or_broken_template_is_refused_in_a_line(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "a"}])
    assert "\n" not in str(caught.value)


def test_messages_may_be_objects_and_what_is_none_is_left_out() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str | None = None

    template = ChatTemplate("{% for m in messages %}{{ m.role }}={{ m.content | default('-') }};{% endfor %}")
    assert template.render([Message("user", "hi"), Message("assistant")]) == "user=hi;assistant=-;"  # type: ignore[list-item]


def test_attributes_that_lead_elsewhere_are_not_there() -> None:
    source = "{{ ''.format.__self__ }}{{ '{0.__class__}'.format(messages) }}{{ raise_exception.__globals__ }}|"
    source += "{{ messages.__class__ is defined }}{{ messages | attr('__class__') }}{{ messages['__class__'] }}"
    assert ChatTemplate(source).render([{"role": "user", "content": "a"}]) == "|False"


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(InvalidRequestError, match="line 2"):
        ChatTemplate("ok\n{% for %}")


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, [{"content": "a"}], ["hi"], [{"role": 3}]])
def test_messages_of_a_wrong_form_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="dict"):
        ChatTemplate("{{ messages }}").render(messages)


def test_a_template_sees_plain_data_only() -> None:
    class Sly:
        def write(self) -> str:
            raise AssertionError("called")

    messages = [{"role": "user", "content": Sly()}]
    assert ChatTemplate("{{ messages[0].content }}").render(messages) == "<Sly>"

"""Templates of the kinds that well-known models have, written for this test: text and ids equal apply_chat_template."""

import random
from pathlib import Path
from typing import Any

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError
from llmkernel.llm.input_processor import InputProcessor
from llmkernel.llm.prompts import ChatPrompt
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import TokenizerFacts
from tests.llm.outputs_of_an_engine import ready_response
from tests.llm.tokenizers_on_the_spot import byte_level

FOLDER = Path(__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where,\nexactly"},
        "days": {"type": "integer", "default": 3},
        "units": {"enum": ["°C", "°F"], "type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object", "additionalProperties": {"type": "number"}},
        "deep": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}, "required": ["x"]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Wie ist's <draußen>?", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WORDS = ["Hi", "two\nlines", " spaced ", "a<b>&c", "東京 😀", "'quoted'", "<think>\nx\n</think>\n\ny", "</s>", ""]


def _calls(chance: random.Random) -> list[dict[str, Any]]:
    arguments = {"city": chance.choice(WORDS), "days": 2}
    return [
        {
            "id": "abcdefgh" + str(number),
            "type": "function",
            "function": {"name": chance.choice(["weather", "now"]), "arguments": arguments},
        }
        for number in range(chance.choice([1, 1, 2]))
    ]


def _conversation(chance: random.Random) -> list[dict[str, Any]]:
    """Turns that alternate, mostly; with system turns, tool calls and their results, reasoning, parts, None."""
    messages: list[dict[str, Any]] = []
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        messages.append({"role": "system", "content": chance.choice(WORDS)})
    for _ in range(chance.randint(1, 3)):
        messages.append({"role": "user", "content": chance.choice(WORDS)})
        if chance.random() < 0.3:
            calls = _calls(chance)
            messages.append({"role": "assistant", "content": chance.choice([None, "", "calling"]), "tool_calls": calls})
            messages += [
                {"role": "tool", "content": "21", "tool_call_id": call["id"], "name": "weather"} for call in calls
            ]
        if chance.random() < 0.7:
            messages.append({"role": "assistant", "content": chance.choice(WORDS), "tool_calls": None})
            if chance.random() < 0.3:
                messages[-1][chance.choice(["reasoning", "thinking", "reasoning_content"])] = "because"
    if chance.random() < 0.2:
        messages[-1]["content"] = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]
    if chance.random() < 0.1:
        chance.shuffle(messages)
    return messages


def _options(chance: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    documents = [{"title": "b title", "text": "a long text to cut"}, {"title": "A", "text": "x"}]
    options = {
        "tools": chance.choice([None, None, TOOLS, TOOLS[:1]]),
        "documents": chance.choice([None, None, documents]),
        "add_generation_prompt": chance.random() < 0.7,
    }
    variables = {
        name: value
        for name, value in {
            "enable_thinking": chance.random() < 0.5,
            "date_string": "1 Jan 2030",
            "tools_in_user_message": chance.random() < 0.5,
            "reasoning_effort": "high",
            "citations": None,
        }.items()
        if chance.random() < 0.4
    }
    return options, variables


def _both(source: str, **named: str) -> tuple[InputProcessor, Any]:
    """Ours, and transformers' tokenizer, around the same small vocabulary. named: further templates."""
    from transformers import PreTrainedTokenizerFast  # the reference

    backend = byte_level()
    eos = backend.token_to_id("</s>")
    facts = TokenizerFacts(
        chat_template=source,
        special_tokens=SPECIAL,
        bos_token_id=backend.token_to_id("<s>"),
        eos_token_id=eos,
        named_chat_templates=named,
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)
    theirs.chat_template = {"default": source, **named} if named else source
    return InputProcessor(EngineArgs(), ready_response(max_model_len=10**6), Tokenizer(backend, facts)), theirs


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_it_equals_apply_chat_template(name: str) -> None:
    ours, theirs = _both((FOLDER / f"{name}.jinja").read_text("utf-8"))
    chance = random.Random(name)
    rendered = 0
    for _ in range(60):
        messages = _conversation(chance)
        options, variables = _options(chance)
        chat = ChatPrompt(messages=messages, variables=variables, **options)
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **options, **variables)
        except Exception as error:  # noqa: BLE001 - ours must refuse then, too, with the same words
            with pytest.raises(InvalidRequestError) as caught:
                ours.tokenize(chat)
            assert str(error)[:40] in str(caught.value) and "\n" not in str(caught.value)
            continue
        made = ours.tokenize(chat)
        assert made.text == text
        assert made.token_ids == theirs.apply_chat_template(messages, return_dict=False, **options, **variables)
        rendered += 1
    assert rendered >= 10, "the conversations suit the template"


def test_a_template_is_chosen_as_transformers_chooses_it() -> None:
    ours, theirs = _both("plain", tool_use="{{ tools | length }} tools", rag="{{ documents[0].title }}")
    messages = [{"role": "user", "content": "Hi"}]
    for options in (
        {},
        {"tools": TOOLS},
        {"chat_template": "rag", "documents": [{"title": "t", "text": "x"}]},
        {"chat_template": "{{ messages[0].content }}", "tools": TOOLS},
        {"chat_template": "default", "tools": TOOLS},
    ):
        made = ours.tokenize(ChatPrompt(messages=messages, **options))  # type: ignore[arg-type]
        assert made.text == theirs.apply_chat_template(messages, tokenize=False, **options), options

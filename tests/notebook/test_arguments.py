"""The line of a magic: options, quotes, the rest byte for byte, mistakes in one line."""

import pytest
from IPython.core.error import UsageError

from llmkernel.notebook.arguments import help_text, is_awaited_verb, is_background, parse_line, split_words
from llmkernel.notebook.options import GENERATE, LOAD


def parse(line: str) -> tuple[dict[str, object], str]:
    return parse_line(line, GENERATE, command="%generate")


def test_options_come_first_and_the_rest_stays_as_it_is() -> None:
    values, rest = parse('-o x --max-tokens 5 -t=0.3 --stop a --stop "b c"  tell me: -n 5  {x} "quoted"  ')
    assert values == {"output": "x", "max_tokens": 5, "temperature": 0.3, "stop": ["a", "b c"]}
    assert rest == 'tell me: -n 5  {x} "quoted"  '


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ('"be brief"', "be brief"),
        ("'be brief'", "be brief"),
        (r'"line\nbreak\ttab"', "line\nbreak\ttab"),
        (r'"a \"quote\" and \\n"', 'a "quote" and \\n'),
        ("don't", "don't"),
        ("\"{'a': 1}\"", "{'a': 1}"),
    ],
)
def test_quotes_are_taken_off(typed: str, value: str) -> None:
    assert parse(f"--system {typed}") == ({"system": value}, "")
    assert parse(f"--system={typed} hi")[1] == "hi"


def test_settings_of_speculation_are_json_in_quotes() -> None:
    settings = '{"method": "ngram", "num_speculative_tokens": 3}'
    for typed, value in (("ngram", "ngram"), (f"'{settings}'", settings)):
        values, rest = parse_line(f"--speculative {typed} smollm2", LOAD, command="%llm load")
        assert (values, rest) == ({"speculative": value}, "smollm2")


def test_two_dashes_end_the_options() -> None:
    assert parse("-n 2 -- --max-tokens is a flag") == ({"n": 2}, "--max-tokens is a flag")
    assert parse("- a list item") == ({}, "- a list item")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-token 5", "Unknown option --max-token; did you mean --max-tokens?"),
        ("--bogus", "%generate? lists the options"),
        ("-n two", "-n: 'two' is not a whole number."),
        ("-t warm", "--temperature: 'warm' is not a number."),
        ("--stop", "--stop needs a value: --stop S."),
        ("--raw=yes", "--raw takes no value."),
        ('--system "open', "the closing quote is missing"),
        ("-o 3x", "'3x' is not the name of a variable."),
    ],
)
def test_mistakes_are_usage_errors(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_background_is_seen_in_any_place_but_the_prompt() -> None:
    assert is_background("-b hi") and is_background("-n 2 --background hi")
    assert not is_background("tell me about -b")
    assert not is_background("--unknown -b")
    assert is_awaited_verb("load smollm2") and is_awaited_verb(" unload") and not is_awaited_verb("status")
    assert not is_awaited_verb("")


def test_words_and_help() -> None:
    assert split_words("a 'b c'  d=\"e f\"") == ["a", "b c", 'd="e f"']
    assert split_words("system='be brief' n=2") == ["system='be brief'", "n=2"]
    table = help_text(GENERATE)
    assert all(flag in table for option in GENERATE for flag in option.flags)

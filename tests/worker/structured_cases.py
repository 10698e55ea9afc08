"""Some two hundred constraints: schemas and regexes that can be followed, and others that are broken in every way."""

import dataclasses
import re
from typing import Any

import jsonschema
import numpy as np

__all__ = ["BROKEN", "Case", "make_cases"]


@dataclasses.dataclass(frozen=True)
class Case:
    """constraint: fields of StructuredOutputsParams."""

    constraint: dict[str, Any]

    def check(self, text: str) -> None:
        """Fails where a finished answer does not fit."""
        if "json" in self.constraint:
            value = _loads(text)
            jsonschema.Draft202012Validator(self.constraint["json"]).validate(value)
            if self.constraint.get("disable_any_whitespace"):
                assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), text
        elif "regex" in self.constraint:
            assert re.fullmatch(self.constraint["regex"], text), (self.constraint, text)
        elif "choice" in self.constraint:
            assert text in self.constraint["choice"]
        elif "json_object" in self.constraint:
            assert isinstance(_loads(text), dict)


def _loads(text: str) -> Any:
    import json

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 8}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["leaf", "узел", "節"]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
LIST = {  # a linked list that refers to the whole schema
    "type": "object",
    "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}

SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 102},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.25},
    {"type": ["null", "boolean"]},
    {"type": ["integer", "null"], "minimum": 3, "maximum": 700},
    SHORT,
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    {"type": "string", "pattern": "^(rot|grün|blau)$"},
    {"type": "string", "pattern": '^\\\\["/]?$'},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"const": None},
    {"const": 'naïve 😀 "quoted" \\ \n\t'},
    {"const": {"a": [1, 2, {"b": True}]}},
    {"const": 3.25},
    {"enum": ["a", 1, None, True, [1], {"k": "v"}]},
    {"enum": ["ä", "ö", "ü", "ß", "日本", "😀😀", "\u0000", "\u2028"]},
    {"enum": [f"value number {number}" for number in range(5000)]},
    {"enum": list(range(-3000, 3000, 7))},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 6},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": False},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    _object(),
    _object(a={"type": "integer", "minimum": 0, "maximum": 9}),
    _object(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    _object(ключ={"enum": ["да", "нет"]}, **{"鍵 with space": {"type": "boolean"}, 'q"uote\\': {"type": "null"}}),
    _object(outer=_object(inner=_object(leaf={"type": "boolean"}))),
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x_[a-z]$": {"type": "boolean"}}, "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, {"const": "maybe"}]},
    {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}, {"const": "only this"}]},
    {"anyOf": [_object(kind={"const": "cat"}, lives={"enum": [9]}), _object(kind={"const": "dog"})]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"allOf": [_object(a={"type": "null"})]},
    {"type": "string", "enum": ["x", "y"], "maxLength": 1},
    {"$ref": "#/definitions/flag", "definitions": {"flag": {"type": "boolean"}}},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": "through two doors"}}, "$ref": "#/$defs/a"},
    TREE,
    LIST,
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"title": "words only", "description": "…", "type": "boolean", "default": True, "examples": [{"$ref": "http://x"}]},
    {"type": "integer"},
    {"type": "string"},
    {"type": "object"},
    {"type": "array"},
    {},
]
"""Every keyword that llguidance knows, at least once; the last ones have no bounds of their own."""

REGEXES = [
    "[a-z]{3}",
    "[0-9]{1,4}",
    "(foo|bar|baz){1,3}",
    "a*b",
    "x?y?z",
    "[A-Fa-f0-9]{8}",
    "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "(?:[1-9]?[0-9]\\.){3}[0-9]",
    "ä+ö*ü",
    "[α-ω]{2,6}",
    "[\\u4e00-\\u4e20]{1,3}",
    "😀{1,3}!",
    "\\+[0-9]{1,3} [0-9]{3}",
    "[^a-z\\s]{2,4}",
    "\\d{2,3}",
    "[a-zß-ÿ_]{1,6}",
    "(yes|no), (please|thanks)\\.",
    '"[^"\\\\]{0,6}"',
    "<(b|i)>[a-z]{1,4}</(b|i)>",
    "(a|b)*abb",
    "((ab){2}){2}",
    "(a{1,30}){1,30}b",
    "(.*a){0,3}z",
    "line one\\nline two",
    "\\{\\}",
    "(?i)hello",
    "[\\x21-\\x2f]{3}",
    ".{1,5}",
    "(ab|cd|ef|gh){4}",
    "",
]

BROKEN: list[dict[str, Any]] = [
    {"regex": "("},
    {"regex": "[z-a]"},
    {"regex": "a{3,2}"},
    {"regex": "(?=a)b"},
    {"regex": "(?<!a)b"},
    {"regex": "(a)\\1"},
    {"regex": "*"},
    {"regex": "\\p{NoSuchClass}"},
    {"regex": "[^\\s\\S]"},
    {"regex": "(?P<name"},
    {"grammar": "start: x"},
    {"grammar": 'start: "a'},
    {"grammar": "hello"},
    {"grammar": 'root ::= "a" other'},
    {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
    {"json": {"type": "array", "minItems": 3, "maxItems": 1}},
    {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    {"json": {"enum": ["a"], "type": "integer"}},
    {"json": _object(a={"allOf": [{"const": 1}, {"const": 2}]})},
    {"json": {"type": "no such type"}},
    {"json": {"type": "string", "format": "no such format"}},
    {"json": {"type": "string", "pattern": "(("}},
    {"json": {"properties": []}},
    {"json": {"not": {"type": "string"}}},
    {"json": {"if": {"type": "string"}, "then": {"minLength": 2}}},
    {"json": {"type": "array", "uniqueItems": True}},
    {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
    {"json": {"$ref": "#/$defs/missing"}},
    {"json": {"items": {"$ref": "#/no/where"}, "type": "array"}},
    {"json": {"type": "boolean"}, "whitespace_pattern": "("},
]
"""What only the compiler finds out; see test_sampling_params for what is refused before it is sent."""


def make_cases(count: int, seed: int = 0) -> list[Case]:
    """Constraints that can be followed: all of the above, and schemas put together from them at random."""
    cases = [Case({"json": schema}) for schema in SCHEMAS]
    cases += [Case({"regex": regex}) for regex in REGEXES if regex]
    cases += [
        Case({"choice": ["a", "ab", "abc"]}),
        Case({"choice": ["", "non-empty"]}),
        Case({"choice": [f"choice {number} of many" for number in range(3000)]}),
        Case({"choice": ['"', "\\", "\n", "\t", "\u0007", "😀", "'", "{}"]}),
        Case({"json_object": True}),
        Case({"json_object": True, "disable_any_whitespace": True}),
        Case(
            {"json": {"type": "object", "properties": {"a": {"type": "null"}}}, "disable_additional_properties": True}
        ),
        Case({"json": _object(a={"type": "null"}), "whitespace_pattern": " ?"}),
    ]
    rng = np.random.default_rng(seed)
    while len(cases) < count:
        schema = _random_schema(rng, depth=int(rng.integers(1, 4)))
        options = {"disable_any_whitespace": True} if rng.random() < 0.5 else {}
        cases.append(Case({"json": schema, **options}))
    return cases


def _random_schema(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.2:
        return _random_leaf(rng)
    kind = rng.choice(["object", "object", "array", "anyOf"])
    inner = [_random_schema(rng, depth - 1) for _ in range(int(rng.integers(1, 4)))]
    if kind == "object":
        names = rng.permutation(["id", "название", "名前", "with space", "a-b", "x", "😀"])[: len(inner)].tolist()
        schema = _object(**dict(zip(names, inner, strict=True)))
        schema["required"] = [name for name in names if rng.random() < 0.7]
        return schema
    if kind == "array":
        return {"type": "array", "items": inner[0], "maxItems": int(rng.integers(0, 4))}
    return {"anyOf": inner}


def _random_leaf(rng: np.random.Generator) -> dict[str, Any]:
    low = int(rng.integers(-50, 50))
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 500))},
        {"type": "string", "maxLength": int(rng.integers(1, 8))},
        {"type": "string", "pattern": "^[a-e]{1,4}$"},
        {"enum": rng.permutation(["a", "b", "é", 1, None]).tolist()[: int(rng.integers(1, 5))]},
        {"const": f"c{low}"},
    ]
    return leaves[int(rng.integers(len(leaves)))]

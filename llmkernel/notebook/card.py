"""The reproducibility card of a generation: what was sent, to which weights, and what came of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from llmkernel.notebook.plain_text import clean_text
from llmkernel.protocol.handshake import ModelFacts

if TYPE_CHECKING:
    from llmkernel.llm.outputs import RequestOutput
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.generation_row import GenerationRow
    from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["Card", "described_model", "described_params", "described_prompt", "make_card"]

MOST_IDS = 4096
"""Ids of one prompt that an output's metadata holds; of a longer prompt it holds a hash."""


class Card(dict[str, Any]):
    """JSON data: models (by name: source, weights, dtype, quantization, versions ...) and requests (prompt,
    prompt_token_ids, params, seed, answers), one per prompt. `str()` is for people."""

    def __str__(self) -> str:
        lines = []
        for name, model in self["models"].items():
            versions = ", ".join(f"{package} {version}" for package, version in model["versions"].items())
            lines += [
                f"model         {name}: {model['source']}, {model['architecture']} ({model['implementation']})",
                f"weights       {model['weights'] or 'unknown'}",
                f"arithmetic    {_arithmetic(model)}",
                f"versions      {versions or 'unknown'}",
            ]
        for request in self["requests"]:
            params = ", ".join(f"{name}={value!r}" for name, value in request["params"].items())
            lines += ["", f"request       {request['request_id']} to {request['model']}, seed {request['seed']}"]
            lines += [f"params        {params or 'defaults'}", f"prompt        {_shown(request['prompt'])}"]
            lines.append(f"prompt ids    {len(request['prompt_token_ids'])}: {_shortened(request['prompt_token_ids'])}")
            for answer in request["answers"]:
                ids = answer["token_ids"]
                what = f"{len(ids)} tokens, {answer['finish_reason']}, sha256 of the ids {hash_of(ids)[:16]}"
                lines.append(f"answer {answer['index']}      {what}")
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def make_card(generation: "Generation") -> Card:
    """All of it; requests that were never sent have no prompt and no ids."""
    models = {row.slot.name: described_model(row.facts) for row in generation.rows if row.facts is not None}
    return Card(models=models, requests=[_request(row) for row in generation.rows])


def described_model(facts: ModelFacts) -> dict[str, Any]:
    """What exactly answered."""
    names = ("source", "architecture", "implementation", "dtype", "device", "quantization")
    versions = {package: version for package, version in facts.identity.items() if package != "weights"}
    return {
        **{name: getattr(facts, name) for name in names},
        "weights": facts.identity.get("weights", ""),
        "versions": versions,
    }


def described_params(params: "SamplingParams | None") -> dict[str, Any]:
    """Parameters as they were sent, vLLM's defaults and the seed left out."""
    fields = msgspec.to_builtins(params, str_keys=True) if params is not None else {}
    for name in ("output_kind", "seed"):
        fields.pop(name, None)
    return fields


def described_prompt(output: "RequestOutput | None") -> dict[str, Any]:
    """The prompt as it was sent, for the metadata of an output: its text and ids, or their hash if they are many."""
    if output is None:
        return {}
    ids = list(output.prompt_token_ids or ())
    if len(ids) <= MOST_IDS:
        return {"prompt": output.prompt, "prompt_token_ids": ids}
    return {"prompt_token_ids_sha256": hash_of(ids)}


def hash_of(token_ids: Sequence[int]) -> str:
    """sha256 of the ids as JSON without spaces."""
    return hashlib.sha256(json.dumps(list(token_ids), separators=(",", ":")).encode()).hexdigest()


def _request(row: "GenerationRow") -> dict[str, Any]:
    output = row.output
    params = output.sampling_params if output is not None else None
    return {
        "request_id": row.request_id,
        "model": row.slot.name,
        "prompt": output.prompt if output is not None else None,
        "prompt_token_ids": list(output.prompt_token_ids or ()) if output is not None else [],
        "params": described_params(params),
        "seed": params.seed if params is not None else None,
        "answers": [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
            }
            for answer in row.answers
        ],
    }


def _arithmetic(model: Mapping[str, Any]) -> str:
    """With a caution: short numbers round differently with what else is computed in the same step, and a draw may fall
    differently then."""
    line = f"{model['dtype']} on {model['device']}, quantization {model['quantization']}"
    exact = model["dtype"] in ("float32", "none")
    return line if exact else f"{line}; not always the same tokens again, float32 has them"


def _shown(prompt: str | None) -> str:
    text = json.dumps(clean_text(prompt), ensure_ascii=False) if prompt is not None else "(token ids only)"
    return text if len(text) <= 200 else f"{text[:120]} … {text[-60:]}"


def _shortened(ids: Sequence[int]) -> str:
    shown = [str(token_id) for token_id in ids]
    return " ".join(shown if len(shown) <= 24 else [*shown[:16], "…", *shown[-6:]])

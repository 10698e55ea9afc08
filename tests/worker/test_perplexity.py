"""Perplexity on 20 kB of English: bfloat16 and 4-bit weights stay within half a percent of float32 by transformers."""

import math
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from llmkernel.engine.worker.model_files import ModelFiles
from tests.worker.engine_run import EngineRun

PIECE = 256
"""Tokens that are read at a time, so that each has some context and the test little to do."""


@pytest.fixture(scope="module")
def pieces(smollm2_files: ModelFiles) -> list[list[int]]:
    text = "".join(topics.values())  # Python's own manual
    tokenizer = Tokenizer.from_file(str(smollm2_files.folder / "tokenizer.json"))
    ids = tokenizer.encode(text[:20000], add_special_tokens=False).ids
    return [ids[start : start + PIECE] for start in range(0, len(ids) - PIECE, PIECE)]


@pytest.fixture(scope="module")
def reference(smollm2_files: ModelFiles, pieces: list[list[int]]) -> float:
    model = AutoModelForCausalLM.from_pretrained(smollm2_files.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        total = sum(float(model(ids := torch.tensor([piece]), labels=ids).loss) for piece in pieces)
    return math.exp(total / len(pieces))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("quantization", "chunk"), [("none", 2048), ("auto", 2048), ("int4", 2048), ("auto", 8), ("int8", 2048)]
)
def test_perplexity(quantization: str, chunk: int, pieces: list[list[int]], reference: float) -> None:
    """In chunks of 8 tokens all layers run in one call, in large ones call by call."""
    options = {"dtype": "bfloat16", "quantization": quantization, "max_num_batched_tokens": chunk}
    with EngineRun("smollm2", enable_prefix_caching=False, **options) as run:
        answers = run.generate(pieces, 1, prompt_logprobs=0)
    total = count = 0.0
    for answer in answers:
        assert answer.prompt_logprobs is not None
        chosen = answer.prompt_logprobs.logprobs[:, 0]
        total -= float(chosen[-(PIECE - 1) :].sum())
        count += PIECE - 1
    perplexity = math.exp(total / count)
    print(f"{quantization}, chunks of {chunk}: perplexity {perplexity:.3f}, float32 {reference:.3f}")
    assert abs(perplexity / reference - 1) < 0.005

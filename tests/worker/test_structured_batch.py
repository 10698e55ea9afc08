"""Two hundred constraints, valid and broken, in a batch with free-form requests, on a small model that draws at random
from SmolLM2's vocabulary: what is finished validates, what is broken fails alone, and the free ones do not notice."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.sampling_params import SamplingParams, StructuredOutputsParams
from tests.worker import tiny_models
from tests.worker.engine_run import Answer, EngineRun, make_request
from tests.worker.structured_cases import BROKEN, make_cases

NUM_CASES, NUM_FREE = 170, 24
MAX_TOKENS = 72
SMOLLM2_VOCABULARY, EOS = 49152, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_files: ModelFiles) -> Path:
    """Two layers of 32, SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-smollm2")
    model = tiny_models.build(
        "llama", vocab_size=SMOLLM2_VOCABULARY, num_hidden_layers=2, initializer_range=0.1, max_position_embeddings=512
    )
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (smollm2_files.folder / name).exists():
            shutil.copy(smollm2_files.folder / name, folder / name)
    return folder


def run_all(run: EngineRun, requests: dict[str, SamplingParams]) -> dict[str, Answer]:
    answers = {request_id: Answer() for request_id in requests}
    for request_id, params in requests.items():
        message = make_request(request_id, [300 + number for number in request_id.encode()], params)
        message.eos_token_id = EOS
        run.core.add_request(run.core.preprocess_add_request(message))
    while run.core.has_unfinished_requests():
        run.wait_for_grammars()
        run._take(run.core.step(), answers)
    return answers


def free_requests() -> dict[str, SamplingParams]:
    ways = [{"temperature": 0}, {"temperature": 0.5, "top_k": 4}, {"temperature": 0, "repetition_penalty": 1.3}]
    return {
        f"free {number}": SamplingParams(max_tokens=20, seed=number, **ways[number % len(ways)])  # type: ignore[arg-type]
        for number in range(NUM_FREE)
    }


EXTRAS = [
    {},
    {"logprobs": 2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"min_tokens": 3},
    {"top_p": 0.9},
    {"temperature": 0},
    {"temperature": 2.0},
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_constraints_beside_free_requests(folder: Path) -> None:
    cases = make_cases(NUM_CASES)
    requests: dict[str, SamplingParams] = {}
    for number, case in enumerate(cases):
        requests[f"case {number}"] = SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=number,
            structured_outputs=StructuredOutputsParams(**case.constraint),
            **EXTRAS[number % len(EXTRAS)],  # type: ignore[arg-type]
        )
    for number, constraint in enumerate(BROKEN):
        requests[f"broken {number}"] = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    free = free_requests()
    assert len(cases) + len(BROKEN) >= 200
    with EngineRun(folder, max_num_seqs=256, max_num_batched_tokens=512) as run:
        alone = run_all(run, free)
        together = run_all(run, requests | free)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for request_id, answer in alone.items():
        assert together[request_id].token_ids == answer.token_ids, request_id
    endings: Counter[str] = Counter()
    for number, case in enumerate(cases):
        answer = together[f"case {number}"]
        endings[str(answer.finish_reason)] += 1
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (case, answer.stop_reason)
        text = tokenizer.decode([token for token in answer.token_ids if token != EOS], skip_special_tokens=False)
        if answer.finish_reason is FinishReason.STOP:
            case.check(text)
    for number, constraint in enumerate(BROKEN):
        answer = together[f"broken {number}"]
        assert answer.finish_reason is FinishReason.ERROR and not answer.token_ids, constraint
        reason = str(answer.stop_reason)
        assert reason.startswith("structured_outputs.") and "\n" not in reason and len(reason) < 250, reason
    print(f"{len(cases)} constraints: {dict(endings)}; {len(BROKEN)} broken ones failed alone, {len(free)} free equal")
    assert endings["stop"] > 0.75 * len(cases)

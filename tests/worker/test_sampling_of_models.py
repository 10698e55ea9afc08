"""What a request draws depends on its parameters, seed and position, not on how the work is cut up (float32, D13);
and logits that are broken cost one request."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.sampling_params import SamplingParams
from tests.worker import tiny_models
from tests.worker.engine_run import Answer, EngineRun, make_request
from tests.worker.sampler.reference import Case, distribution, draw, uniform

GAP = 1e-4
NEW_TOKENS = 20
POISON = 13

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 7},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {3: 5.0, 4: -100.0}, "top_p": 0.95},
    {"allowed_token_ids": list(range(20, 60)), "temperature": 0.9},
    {"stop_token_ids": [5, 6, 7], "min_tokens": 12},
    {"temperature": 0},
]


Asked = dict[str, tuple[list[int], SamplingParams]]
"""Prompt and parameters by request id."""


def requests() -> Asked:
    rng = np.random.default_rng(4)
    made = {}
    for number in range(18):
        prompt = rng.integers(0, tiny_models.VOCAB_SIZE, int(rng.integers(1, 40))).tolist()
        fields = {"max_tokens": NEW_TOKENS, "seed": 1000 + number, "logprobs": -1} | WAYS[number % len(WAYS)]
        made[f"r{number}"] = prompt, SamplingParams(**fields)
    return made


def run_some(run: EngineRun, some: Asked) -> dict[str, Answer]:
    answers = {request_id: Answer() for request_id in some}
    for request_id, (prompt, params) in some.items():
        run.core.add_request(run.core.preprocess_add_request(make_request(request_id, prompt, params)))
    while run.core.has_requests():
        run._take(run.core.step(), answers)
    return answers


class Draws:
    """Answers of other runs against those of the first; they may part where the draw or a cut lies at an edge."""

    def __init__(self, asked: Asked, expected: dict[str, Answer]) -> None:
        self._asked = asked
        self._expected = expected
        self.num_answers = self.num_parted = 0

    def check(self, found: dict[str, Answer], what: str) -> None:
        for request_id, answer in found.items():
            expected = self._expected[request_id]
            self.num_answers += 1
            if answer.token_ids == expected.token_ids:
                continue
            self.num_parted += 1
            pairs = enumerate(zip(answer.token_ids, expected.token_ids, strict=False))
            at = next(position for position, (one, other) in pairs if one != other)
            prompt, params = self._asked[request_id]
            case = Case(params, prompt, expected.token_ids[:at], None, [], expected.logits[at].astype(np.float64))
            _, gap = draw(distribution(case), uniform(params.seed or 0, at))
            assert gap < GAP, f"{what}: {request_id} parts at {at} with a gap of {gap}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_family("llama", tmp_path_factory.mktemp("llama"))


def test_a_seed_gives_the_same_tokens_alone_together_in_chunks_cached_and_preempted(folder: Path) -> None:
    asked = requests()
    with EngineRun(folder, block_size=8) as run:
        block = run.core.ready.kv_cache_bytes // run.core.ready.num_gpu_blocks
        alone: dict[str, Answer] = {}
        for request_id, one in asked.items():
            alone |= run_some(run, {request_id: one})
        draws = Draws(asked, alone)
        draws.check(run_some(run, asked), "together, warm cache")
        draws.check(run_some(run, dict(reversed(asked.items()))), "together, the other way round")
        run.core.call_utility("reset_prefix_cache")
        draws.check(run_some(run, asked), "together, cold")
    with EngineRun(folder, block_size=8, max_num_batched_tokens=7, max_num_seqs=5) as run:
        draws.check(run_some(run, asked), "in chunks of 7")
    with EngineRun(folder, block_size=8, kv_cache_memory=24 * block) as run:
        draws.check(run_some(run, asked), "preempted")
        assert run.num_preempted > 0
    print(f"{draws.num_answers} answers, {draws.num_parted} parted at an edge")
    assert draws.num_parted <= draws.num_answers // 50


def test_nan_in_the_logits_fails_that_request_alone(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    with EngineRun(tiny_models.save(model, tmp_path)) as run:
        healthy = [[1, 2, 3], [4] * 20, [5, 6]]
        expected = run.generate(healthy, 8)
        mixed = run.generate([healthy[0], [7, POISON, 8], *healthy[1:]], 8)
        assert [mixed[at].token_ids for at in (0, 2, 3)] == [answer.token_ids for answer in expected]
        assert mixed[1].finish_reason is FinishReason.ERROR and mixed[1].token_ids == []
        assert "the model's logits hold NaN or infinity" in str(mixed[1].stop_reason)
        told = run.generate([[7, POISON, 8], [1, 2, 3]], 8, prompt_logprobs=2)
        assert told[0].finish_reason is FinishReason.ERROR and "NaN" in str(told[0].stop_reason)
        assert told[1].token_ids == expected[0].token_ids and told[1].prompt_logprobs is not None
        assert run.generate(healthy, 8)[2].token_ids == expected[2].token_ids

"""A forward or a sampler that raises for one request: the others say what they would have said alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmkernel.engine.worker.sampler.sampler import Place, Sampler
from llmkernel.protocol.outputs import FinishReason
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun

SAMPLED = {
    "temperature": 0.9,
    "seed": 3,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "logit_bias": {95: -100.0},
}
BAD = 95


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(folder: Path) -> Iterator[EngineRun]:
    with EngineRun(folder, block_size=4, max_num_batched_tokens=24, enable_prefix_caching=False) as run:
        yield run


def prompts() -> list[list[int]]:
    made = [[1 + (7 * n + i) % 90 for i in range(4 + 9 * (n % 4))] for n in range(7)]
    made[4] = [BAD, *made[4]]
    return made


def test_a_forward_that_raises_for_one_request(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [run.generate([prompt], 6, **SAMPLED)[0].token_ids for prompt in prompts()]
    model = run.core._executor._worker._ready.runner._model  # type: ignore[union-attr]
    forward, num_raised = model.forward, 0

    def faulty(token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal num_raised
        logits = forward(token_ids, *args)
        if BAD in token_ids.tolist():
            num_raised += 1
            raise RuntimeError("a kernel does not like it")
        return logits

    monkeypatch.setattr(model, "forward", faulty)
    answers = run.generate(prompts(), 6, **SAMPLED)
    assert num_raised > 1
    for number, answer in enumerate(answers):
        if number == 4:
            assert answer.finish_reason is FinishReason.ERROR
            assert answer.stop_reason == "RuntimeError: a kernel does not like it"
        else:
            assert answer.token_ids == alone[number]
    run.core.step()  # tells the worker of those that ended last
    assert run.core.collective_rpc("memory")[0]["requests"] == 0


def test_a_sampler_that_raises_for_one_request_in_the_middle_of_its_answer(
    run: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [run.generate([prompt], 6, **SAMPLED)[0].token_ids for prompt in prompts()]
    sample = Sampler.sample_places

    def faulty(self: Sampler, logits: Any, places: list[Place]) -> Any:
        drawn = sample(self, logits, places)
        if any(place.req_id == victim and len(place.output_token_ids) >= 3 for place in places):
            raise RuntimeError("a processor does not like it")
        return drawn

    victim = f"r{run._count + 3}"
    monkeypatch.setattr(Sampler, "sample_places", faulty)
    answers = run.generate(prompts(), 6, **SAMPLED)
    assert answers[2].finish_reason is FinishReason.ERROR
    assert answers[2].token_ids == alone[2][:3]
    assert [a.token_ids for n, a in enumerate(answers) if n != 2] == [ids for n, ids in enumerate(alone) if n != 2]

"""Custom logits processors: what they change, when, and whom it costs when they raise."""

from collections.abc import Sequence

import pytest
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.logits_processors.loader import load_logits_processors
from llmkernel.engine.worker.sampler import Sampler, SamplerOutput
from llmkernel.errors import EngineStartupError, InvalidRequestError
from llmkernel.protocol.sampling_params import SamplingParams
from tests.worker.sampler.batch_tools import CPU, make_logits, params

EXAMPLES = "tests.worker.logits_processors.examples"


def make_sampler(*names: str, vocab_size: int = 100, **options: object) -> Sampler:
    args = EngineArgs(import_paths=tuple(f"{EXAMPLES}:{name}" for name in names))
    return Sampler(vocab_size, CPU, processors=load_logits_processors(args, CPU), **options)  # type: ignore[arg-type]


def sample(
    sampler: Sampler, logits: torch.Tensor, requests: Sequence[SamplingParams], outputs: Sequence[list[int]]
) -> SamplerOutput:
    ids = [str(i) for i in range(len(requests))]
    for req_id, request in zip(ids, requests, strict=True):
        sampler.add(req_id, request, [1, 2], None, None)
    return sampler.sample(logits, ids, list(outputs))


def wanting(target: object, **fields: object) -> SamplingParams:
    return params(extra_args={"target_token": target}, **fields)


@pytest.mark.parametrize("way", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_p": 0.9}], ids=str)
def test_requests_that_do_not_use_it_draw_as_ever(way: dict) -> None:
    logits = make_logits(3, 100)
    plain = sample(Sampler(100, CPU), logits, [params(**way)] * 3, [[]] * 3)
    found = sample(make_sampler("OnlyToken"), logits, [params(**way), wanting(42, **way), params(**way)], [[]] * 3)
    assert found.token_ids == [plain.token_ids[0], 42, plain.token_ids[2]] and not found.errors


def test_the_logits_of_the_model_stay_as_they_are() -> None:
    logits = make_logits(2, 128)
    before = logits.clone()
    sample(make_sampler("OnlyToken", "Sharpen", vocab_size=128), logits, [wanting(42), params(seed=1)], [[]] * 2)
    assert torch.equal(logits, before)


def test_one_that_raises_fails_the_requests_concerned() -> None:
    logits = make_logits(4, 100)
    requests = [wanting(42), wanting(13), params(temperature=0), wanting(7)]
    sampler = make_sampler("OnlyToken")
    found = sample(sampler, logits, requests, [[]] * 4)
    assert found.token_ids == [42, -1, int(logits[2].argmax()), 7]
    assert found.errors == {"1": "The logits processor OnlyToken raised RuntimeError: 13 brings bad luck."}
    sampler.remove("1")
    again = sampler.sample(logits[[3, 0, 2]], ["3", "0", "2"], [[7], [42], [1]])
    assert again.token_ids == [7, 42, int(logits[2].argmax())] and not again.errors


def test_rows_keep_their_state_while_the_batch_changes() -> None:
    sampler = make_sampler("OnlyToken")
    logits = make_logits(4, 100)
    for number in range(6):
        sampler.add(str(number), wanting(number + 20), [1], None, None)
    for step in (["0", "1", "2"], ["2", "0"], ["3", "2", "4", "0"], ["4"], ["5", "4", "1"], ["1", "0", "5"]):
        found = sampler.sample(logits[: len(step)], step, [[] for _ in step])
        assert found.token_ids == [int(req_id) + 20 for req_id in step]


def test_functions_for_each_request() -> None:
    sampler = make_sampler("Countdown")
    requests = [params(temperature=0, extra_args={"countdown": 3}), params(temperature=0)]
    logits = make_logits(2, 100)
    outputs: list[list[int]] = [[], []]
    for req_id, request in enumerate(requests):
        sampler.add(str(req_id), request, [1], None, None)
    for _ in range(5):
        found = sampler.sample(logits, ["0", "1"], outputs)
        for output, token in zip(outputs, found.token_ids, strict=True):
            output.append(token)
    assert outputs == [[3, 2, 1, 0, int(logits[0].argmax())], [int(logits[1].argmax())] * 5]


@pytest.mark.parametrize(
    ("countdown", "reason"), [(5, "RuntimeError: five is not counted"), (-1, "ValueError: countdown must not be neg")]
)
def test_a_function_that_raises_fails_its_own_request_and_no_state_is_lost(countdown: int, reason: str) -> None:
    sampler = make_sampler("Countdown")
    logits = make_logits(2, 100)
    requests = [params(extra_args={"countdown": countdown}), params(temperature=0, extra_args={"countdown": 9})]
    output: list[int] = []
    found = sample(sampler, logits, requests, [[], output])
    assert found.token_ids == [-1, 9] and list(found.errors) == ["0"] and reason in found.errors["0"]
    output.append(9)
    assert sampler.sample(logits[1:], ["1"], [output]).token_ids == [8]


def test_argmax_invariant_ones_come_after_temperature_and_spare_greedy_rows() -> None:
    logits = make_logits(3, 1000)
    best = logits.topk(2).indices.tolist()
    drawn = set()
    for seed in range(60):
        requests = [params(seed=seed, temperature=2.0), params(temperature=0), params(seed=seed, top_p=0.999)]
        sampler = make_sampler("Sharpen", vocab_size=1000, logprobs_mode="processed_logprobs")
        requests[0].logprobs = 3
        found = sample(sampler, logits, requests, [[], [], []])
        drawn.add(found.token_ids[0])
        assert found.token_ids[1] == best[1][0] and found.token_ids[2] in best[2]
        values = found.logprobs["0"].logprobs[0, 1:]
        expected = (logits[0, best[0]] / 2).log_softmax(-1)
        assert torch.allclose(torch.from_numpy(values[:2]), expected, atol=1e-5) and values[2] == -torch.inf
    assert drawn == set(best[0])


def test_masks_come_last_and_nothing_left_is_an_error_with_the_reason() -> None:
    found = sample(make_sampler("OnlyToken"), make_logits(1, 100), [wanting(42, allowed_token_ids=[1, 2])], [[]])
    assert found.token_ids == [-1] and "the logits processors, allowed_token_ids" in found.errors["0"]


def test_a_wrong_result_is_named() -> None:
    found = sample(make_sampler("Broken"), make_logits(2, 100), [params(), params()], [[], []])
    assert found.token_ids == [-1, -1]
    assert "Broken raised TypeError: apply returned (1, 2) in place of a tensor of (1, 100)" in found.errors["0"]


def test_parameters_that_it_does_not_take_are_refused() -> None:
    sampler = make_sampler("OnlyToken")
    with pytest.raises(InvalidRequestError, match=r"OnlyToken refuses the request: target_token = 'x' must be a token"):
        sampler.add("0", wanting("x"), [1], None, None)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (f"{EXAMPLES}:Missing", "Missing"),
        ("no_such_module_anywhere:Class", "No module named"),
        (f"{EXAMPLES}:NOT_A_CLASS", "is no logits processor"),
        ("collections:OrderedDict", "is no logits processor"),
        (f"{EXAMPLES}:Unmakeable", "raised OSError when it was made: no such file"),
    ],
)
def test_what_cannot_be_loaded_ends_the_load_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(EngineStartupError, match="import_paths") as caught:
        load_logits_processors(EngineArgs(import_paths=(path,)), CPU)
    assert reason in str(caught.value)


@pytest.mark.parametrize("path", ["module", "a b:C", "relative/folder", ":C", "m:", 3])
def test_what_is_no_import_path_is_refused_at_the_door(path: object) -> None:
    with pytest.raises(InvalidRequestError, match="import_paths"):
        EngineArgs(import_paths=(path,))  # type: ignore[arg-type]

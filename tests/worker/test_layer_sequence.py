"""All layers as one list of kernels: the same bits as call by call, for every model that is built of them."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmkernel.engine.worker.compiled import layer_sequence
from llmkernel.engine.worker.compiled.arguments import GateArguments, NormArguments
from llmkernel.engine.worker.compiled.call_table import CallTable
from llmkernel.engine.worker.compiled.layer_sequence import LayerSequence
from llmkernel.engine.worker.compiled.team import Kernel
from tests.worker import tiny_models
from tests.worker.engine_run import Answer, EngineRun


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each step that ran as a sequence."""
    rows: list[int] = []
    run = LayerSequence.run

    def note(self: LayerSequence, hidden: torch.Tensor, *others: object) -> torch.Tensor:
        rows.append(len(hidden))
        return run(self, hidden, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerSequence, "run", note)
    yield rows


def same(left: list[Answer], right: list[Answer]) -> bool:
    def told(answer: Answer) -> list[np.ndarray]:
        assert answer.prompt_logprobs is not None
        return [*answer.logits, answer.prompt_logprobs.logprobs]

    return all(
        a.token_ids == b.token_ids and all(map(np.array_equal, told(a), told(b)))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("family", sorted(tiny_models.FUSED_FAMILIES))
@pytest.mark.parametrize("threads", [1, 2])
def test_every_family(
    family: str, threads: int, tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of several lengths, with drafts, beside a prompt that is read in pieces."""
    folder = tiny_models.save_fused_family(family, tmp_path / "model")
    prompts = [[5, 6, 7] * 3, [9], [11, 12] * 20]
    options = {"dtype": "bfloat16", "quantization": "int4", "num_threads": threads, "max_num_batched_tokens": 16}

    def answers() -> list[list[Answer]]:
        found = []
        for more in ({}, {"speculative": "ngram"}):
            with EngineRun(folder, **options, **more) as run:
                found.append(run.generate(prompts, 12, logits=True, prompt_logprobs=2))
        return found

    in_one = answers()
    assert {1, 2, 3} <= set(runs)
    assert max(runs) > 3  # drafts
    runs.clear()
    monkeypatch.setattr(LayerSequence, "of", lambda *_: None)
    by_call = answers()
    assert not runs
    assert all(same(*pair) for pair in zip(in_one, by_call, strict=True))


def test_large_steps_and_dense_weights_go_call_by_call(
    tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_sequence, "_MOST_ROWS", 4)
    model = tiny_models.build("llama", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    folder = tiny_models.save(model, tmp_path / "llama")
    with EngineRun(folder, dtype="bfloat16", quantization="int4") as run:
        run.generate([[5, 6, 7]] * 5, 3)
        assert not [rows for rows in runs if rows > 4]
        run.generate([[5, 6, 7]] * 4, 3)
        assert 4 in runs
    runs.clear()
    with EngineRun(folder, dtype="float32") as run:
        run.generate([[5, 6, 7]], 3)
    assert not runs


def test_a_table_of_calls() -> None:
    kernel = Kernel(0)
    norm, gate = NormArguments(rows=3, size=7, eps=0.5), GateArguments(rows=4, size=9)
    table = CallTable([(kernel, norm), (kernel, gate), (kernel, norm)])
    assert len(table) == 3
    addresses = (ctypes.c_int64 * 6).from_address(table.address)[1::2]
    kinds = (NormArguments, GateArguments, NormArguments)
    told = [kind.from_address(address) for kind, address in zip(kinds, addresses, strict=True)]
    assert [(one.team, one.rows, one.size) for one in told] == [(1, 3, 7), (1, 4, 9), (1, 3, 7)]
    table.set("rows", 5)
    table.set("size", [1, 2], NormArguments)
    assert [(one.rows, one.size) for one in told] == [(5, 1), (5, 9), (5, 2)]
    assert told[2].eps == 0.5
    assert norm.rows == 3

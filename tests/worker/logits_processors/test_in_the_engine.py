"""A logits processor from a user's own folder, in an engine with a real model."""

from pathlib import Path

import pytest

from llmkernel.protocol.outputs import FinishReason
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun

SOURCE = '''
from llmkernel.engine.worker.logits_processors import AdapterLogitsProcessor


class Cycle(AdapterLogitsProcessor):
    """extra_args {"cycle": [ids]}: these tokens in turn."""

    @classmethod
    def validate_params(cls, params):
        cycle = (params.extra_args or {}).get("cycle")
        if cycle == []:
            raise ValueError("cycle must not be empty.")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        cycle = (params.extra_args or {}).get("cycle")
        if cycle is None:
            return None

        def force(output, logits):
            token = cycle[len(output) % len(cycle)]
            if token < 0:
                raise LookupError("a negative id")
            logits[:] = float("-inf")
            logits[token] = 0
            return logits

        return force
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_family("llama", tmp_path_factory.mktemp("llama"))


def test_loaded_from_a_folder_it_serves_and_fails_requests_one_by_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cycle_of_mine.py").write_text(SOURCE)
    prompts = [[1, 2, 3], [4, 5], [6] * 20]
    with EngineRun(folder) as plain:
        free = plain.generate(prompts, 12)
    options = {"block_size": 4, "import_paths": (str(tmp_path), "cycle_of_mine:Cycle")}
    with EngineRun(folder, **options) as run:
        blocks = run.core.ready.kv_cache_bytes // run.core.ready.num_gpu_blocks * 16
        bad = run.generate([[1, 2]], 12, extra_args={"cycle": []})[0]
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.stop_reason == "The logits processor Cycle refuses the request: cycle must not be empty."
        failing = run.generate([[1, 2]], 12, extra_args={"cycle": [7, 8, -1]})[0]
        assert failing.token_ids == [7, 8] and "raised LookupError: a negative id" in str(failing.stop_reason)
        assert [answer.token_ids for answer in run.generate(prompts, 12)] == [answer.token_ids for answer in free]
    with EngineRun(folder, kv_cache_memory=blocks, **options) as small:
        for answer in small.generate(prompts * 2, 12, extra_args={"cycle": [30, 40, 50]}):
            assert answer.token_ids == [30, 40, 50] * 4
        assert small.num_preempted > 0

"""The worker from start to shutdown: stages, facts, calls by name, faults that cost one request."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.models import fused_load
from llmkernel.engine.worker.worker import Worker
from llmkernel.errors import EngineStartupError, InvalidRequestError, LLMKernelError, UnsupportedFeatureError
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.sampling_params import SamplingParams
from tests.worker import tiny_models
from tests.worker.conftest import Reports
from tests.worker.engine_run import EngineRun, make_request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(folder: Path) -> Iterator[EngineRun]:
    with EngineRun(folder, block_size=4, seed=5) as run:
        yield run


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(1, tiny_models.VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.mark.row("A-017")
def test_stages_and_facts(folder: Path, reports: Reports) -> None:
    worker = Worker(EngineArgs(model=str(folder), dtype="float32", num_threads=1, device="cpu"), reports)
    facts = worker.start()
    assert reports.stages == ["importing", "weights", "kv cache", "warm-up"]
    assert list(facts.load_timings) == reports.stages
    assert all(seconds >= 0 for seconds in facts.load_timings.values())
    assert (facts.model.architecture, facts.model.implementation) == ("LlamaForCausalLM", "fused")
    assert (facts.model.vocab_size, facts.model.max_position) == (tiny_models.VOCAB_SIZE, tiny_models.MAX_POSITION)
    assert (facts.model.dtype, facts.model.device, facts.num_threads) == ("float32", "cpu", 1)
    embedding = 4 * tiny_models.VOCAB_SIZE * 32  # stays in the file
    assert facts.model.weights_bytes == 4 * facts.model.num_parameters - embedding
    assert (facts.block_size, facts.max_model_len) == (32, tiny_models.MAX_POSITION)
    assert facts.num_blocks == 1 + 128 * tiny_models.MAX_POSITION // 32  # max_num_seqs at full length: it is small
    assert facts.kv_cache_bytes == facts.num_blocks * 32 * (4 * 2 * 2 * 8) * 4  # layers, k and v, heads, size, float32
    assert facts.tokenizer.json or facts.tokenizer.path
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(LLMKernelError, match="holds no model"):
        worker.call("memory")


def test_a_tokenizer_that_is_not_there_is_refused_before_the_weights_are_read(folder: Path, reports: Reports) -> None:
    worker = Worker(EngineArgs(model=str(folder), tokenizer="/nowhere", num_threads=1, device="cpu"), reports)
    with pytest.raises(InvalidRequestError, match="'/nowhere' is neither a folder nor a Hub id"):
        worker.start()
    assert "weights" not in reports.stages


def test_calls_by_name(run: EngineRun) -> None:
    assert run.core.collective_rpc("ping") == ["pong"]
    (memory,) = run.core.collective_rpc("memory")
    assert memory["weights"] == run.core.ready.model.weights_bytes
    assert memory["kv_cache"] == run.core.ready.kv_cache_bytes
    assert memory["resident"] > 0 < memory["available"]
    assert run.core.get_stats()["num_threads"] == 1
    (info,) = run.core.collective_rpc("model_info")
    assert info["architecture"] == "LlamaForCausalLM"
    for name in ("shutdown", "execute_model", "__init__", "_ready"):
        with pytest.raises(AttributeError, match="it has memory, model_info, ping"):
            run.core.collective_rpc(name)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_that_cannot_be_is_refused(quantization: str, folder: Path, reports: Reports) -> None:
    options = {"quantization": quantization, "num_threads": 1, "device": "cpu"}
    for more, reason in (
        ({"dtype": "float32"}, "needs bfloat16 activations; set dtype='bfloat16'"),
        ({"dtype": "bfloat16", "implementation": "transformers"}, "needs the fused decoder"),
    ):
        worker = Worker(EngineArgs.from_options(str(folder), **options, **more), reports)
        with pytest.raises(UnsupportedFeatureError, match=f"quantization = '{quantization}' {reason}"):
            worker.start()


_REFUSED = """
import sys
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.worker import Worker
from llmkernel.errors import LLMKernelError
for model in sys.argv[1:]:
    try:
        Worker(EngineArgs(model=model), lambda *_: None).start()
    except LLMKernelError as error:
        print(error)
assert "torch" not in sys.modules
"""


def test_a_wrong_name_or_file_need_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "notes.txt").write_text("no model")
    models = ["smolm2", "./nowhere.gguf", *(str(tmp_path / name) for name in ("empty", "short.gguf", "notes.txt"))]
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED, *models], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    signs = ["did you mean 'smollm2'?", "no such folder or file", "no config.json", "truncated", "not a GGUF file"]
    assert [sign for sign, line in zip(signs, done.stdout.splitlines(), strict=True) if sign in line] == signs


def test_memory_is_checked_before_weights_are_read(
    folder: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_weights(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(fused_load, "build_decoder", read_weights)
    monkeypatch.setenv("LLMKERNEL_MEMORY_LIMIT", "100MiB")
    with pytest.raises(
        InvalidRequestError, match=r"need 1\d\d\.\d KiB and 256.0 MiB to work with; 100.0 MiB of memory"
    ):
        Worker(EngineArgs(model=str(folder), dtype="float32"), reports).start()
    monkeypatch.setenv("LLMKERNEL_MEMORY_LIMIT", "257MiB")
    with pytest.raises(InvalidRequestError, match=r"The KV cache of .* needs 10\.0 GiB"):
        Worker(EngineArgs(model=str(folder), kv_cache_memory="10GiB"), reports).start()


def test_a_small_pool_lowers_max_model_len_and_says_so(folder: Path) -> None:
    with EngineRun(folder, block_size=4, kv_cache_memory="50KiB") as run:
        ready = run.core.ready
        holds = (ready.num_gpu_blocks - 1) * 4
        assert ready.max_model_len == holds < tiny_models.MAX_POSITION
        assert f"max_model_len is {holds} and not 256" in " ".join(ready.model.notes)
        (answer,) = run.generate(prompts_of(holds - 5), 5)
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.token_ids) == 5


def save_with_poison(folder: Path, token_id: int) -> Path:
    """A model whose embedding of `token_id` is NaN: what reads that token computes NaN from there on."""
    model = tiny_models.build("llama")
    model.get_input_embeddings().weight.data[token_id] = torch.nan
    return tiny_models.save(model, folder)


@pytest.mark.parametrize("block_size", [4, 16])
def test_nan_costs_its_own_request_and_leaves_nothing_behind(block_size: int, tmp_path: Path) -> None:
    folder = save_with_poison(tmp_path / "poison", 0)
    good, late = prompts_of(5, 9, 14, 22, 23), prompts_of(6, 11, 17, 30)
    with EngineRun(folder, block_size=block_size, kv_cache_memory="100KiB", max_num_batched_tokens=32) as run:
        alone = [run.generate([prompt], 8)[0].token_ids for prompt in good]
        bad = [[5, 0, 7], [*good[3], 0], [0] * 30]
        # one mixed batch, then others in the blocks that the failed ones held, in every order of reuse
        for _ in range(3):
            run.core.call_utility("reset_prefix_cache")
            answers = run.generate([good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3], good[4]], 8)
            assert [answers[i].token_ids for i in (0, 2, 4, 6, 7)] == alone
            for index in (1, 3, 5):
                assert answers[index].finish_reason is FinishReason.ERROR
                assert "NaN" in str(answers[index].stop_reason)
            assert all(answer.finish_reason is FinishReason.LENGTH for answer in run.generate(late, 8))


def test_aborted_requests_leave_nothing_behind(run: EngineRun) -> None:
    prompts = prompts_of(5, 9, 14, 22)
    want = [run.generate([prompt], 12)[0].token_ids for prompt in prompts]
    for index, prompt in enumerate(prompts_of(30, 31, 32, 33)):
        request = make_request(f"gone{index}", prompt, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        run.core.add_request(run.core.preprocess_add_request(request))
    run.core.step()
    run.core.step()
    run.core.abort_requests([f"gone{index}" for index in range(4)])
    assert run.core.collective_rpc("memory")[0]["requests"] == 4
    while run.core.has_requests():
        run.core.step()  # the worker is told
    assert run.core.collective_rpc("memory")[0]["requests"] == 0
    assert [answer.token_ids for answer in run.generate(prompts, 12)] == want
    assert run.core.get_stats()["num_running_reqs"] == 0


def test_draws_do_not_depend_on_company_or_chunks(folder: Path) -> None:
    prompts = prompts_of(4, 40, 11, 77, 23, 5, 60, 31)
    params = {"temperature": 1.0, "seed": 11, "top_p": 0.95}
    with EngineRun(folder) as run:
        alone = [run.generate([prompt], 16, **params)[0].token_ids for prompt in prompts]
    with EngineRun(folder, max_num_batched_tokens=16, block_size=8) as run:
        assert [answer.token_ids for answer in run.generate(prompts, 16, **params)] == alone
    assert len({tuple(ids) for ids in alone}) == len(prompts)


def test_bfloat16_stays_close_to_float32(folder: Path) -> None:
    """Sixteen rows decode by batched products there; the distributions stay close to those of float32."""
    prompts = prompts_of(*range(3, 67, 4))
    with EngineRun(folder) as run:
        exact = run.generate(prompts, 6, logits=True)
    with EngineRun(folder, dtype="bfloat16") as run:
        rough = run.generate(prompts, 6, logits=True)
    divergences = []
    for want, got in zip(exact, rough, strict=True):
        for step in range(6):
            if want.token_ids[:step] == got.token_ids[:step]:
                p, q = want.logits[step], got.logits[step]
                divergences.append(float((np.exp(p) * (p - q)).sum()))
    assert len(divergences) > 60
    assert np.median(divergences) < 2e-3


def test_end_tokens_and_defaults_of_the_generation_config(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, eos_token_id=[7, 9])
    with EngineRun(tiny_models.save(model, tmp_path / "model")) as run:
        facts = run.core.ready.model
        assert facts.generation_defaults == {"temperature": 0.6, "top_k": 20}
        assert sorted({*facts.stop_token_ids, run.core.ready.tokenizer.eos_token_id} - {None}) == [7, 9]


def test_a_folder_that_is_not_a_model(tmp_path: Path, reports: Reports) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises((EngineStartupError, InvalidRequestError), match="unheard-of"):
        Worker(EngineArgs(model=str(tmp_path)), reports).start()

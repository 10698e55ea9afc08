"""Interrupt, again and again, at every stage: this cell's requests end in time, and nothing else changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llmkernel.engine.fake_executor import fake_answer
from tests.notebook.kernel import Kernel, running_kernel

LIMIT = 0.5
"""Seconds from Interrupt to the end of the cell (design section 6)."""

SOME = bytes(fake_answer(list(b"hello"), 3)).decode()
LONG = "%generate --raw --max-tokens 3000 hello"
WAITING = "waiting for the first token"
SLOT = "Session.current.models['fake']"

STAGES = {
    "load wait": ("fake:load_ms=60000", "%generate --raw hello", "to load"),
    "queue": ("fake:step_ms=10,max_model_len=40000,num_blocks=3000 --max-num-seqs 1", LONG, WAITING),
    "prefill": (
        "fake:step_ms=40,max_model_len=4000,num_blocks=3000 --max-num-batched-tokens 16 --no-prefix-caching",
        "%generate --raw " + "a" * 3000,
        WAITING,
    ),
    "decode": ("fake:step_ms=5,max_model_len=4000,num_blocks=3000", LONG, SOME),
    "between tokens": ("fake:step_ms=300,max_model_len=4000,num_blocks=3000", "%generate --raw hello", SOME[:1]),
    "long step": ("fake:step_ms=4000", "%generate --raw hello", WAITING),
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(tmp_path_factory.mktemp("often"), "%load_ext llmkernel\nfrom llmkernel import Session") as made:
        yield made


def shows(text: str) -> Callable[[dict[str, Any]], bool]:
    def found(message: dict[str, Any]) -> bool:
        return text in message["content"].get("data", {}).get("text/plain", "")

    return found


@pytest.mark.row("A-144")
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("stage", STAGES)
def test_at_every_stage(kernel: Kernel, stage: str, times: int) -> None:
    model, code, sign = STAGES[stage]
    if stage == "load wait":
        kernel.run(f"Session.current.load('{model}', name='fake')")
    else:
        kernel.run(f"%llm load {model} --name fake")
    if stage == "queue":
        kernel.run("%generate -b --raw --quiet --max-tokens 30000 -o first hello")
    pid = kernel.value(f"{SLOT}.process.pid")
    try:
        for _ in range(times):
            cell = kernel.run(code, interrupt_when=shows(sign))
            assert cell.ename == "KeyboardInterrupt", cell
            assert cell.seconds < LIMIT
            assert kernel.value("_.state") == "cancelled"
        assert kernel.value(f"{SLOT}.process.pid") == pid
        if stage == "load wait":
            assert kernel.value(f"{SLOT}.state") == "loading"
            return
        if stage == "queue":
            assert kernel.value("first.state") == "running"
            kernel.run("first.cancel()")
        after = kernel.run("%generate --raw --max-tokens 1 hello", timeout=20)
        assert after.answers[0]["data"]["text/plain"] == SOME[:1]
        stats = kernel.run(f"stats = await {SLOT}.llm.get_stats()")
        assert stats.status == "ok"
        assert kernel.value("(stats['num_running_reqs'], stats['num_waiting_reqs'], stats['kv_cache_usage'])") == (
            0, 0, 0.0,
        )  # fmt: skip
    finally:
        kernel.run("%llm unload fake")


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_while_nothing_runs(kernel: Kernel, times: int) -> None:
    kernel.run("%llm load fake: --name fake")
    pid = kernel.value(f"{SLOT}.process.pid")
    for _ in range(times):
        kernel.interrupt()
        after = kernel.run("%generate --raw --max-tokens 3 hello")
        assert after.answers[0]["data"]["text/plain"] == SOME, after
    assert kernel.value(f"{SLOT}.process.pid") == pid
    kernel.run("%llm unload fake")


def test_on_the_default_model(kernel: Kernel) -> None:
    loaded = kernel.run("%llm load smollm2", timeout=100)
    assert loaded.status == "ok", loaded.traceback
    pid = kernel.value("Session.current.models['smollm2'].process.pid")
    for _ in range(3):
        cell = kernel.run(
            "%generate --max-tokens 500 -t 0 Count from one to two hundred.",
            interrupt_when=lambda message: len(message["content"].get("data", {}).get("text/plain", "")) > 30,
            timeout=60,
        )
        assert cell.ename == "KeyboardInterrupt" and kernel.value("_.state") == "cancelled", cell
        assert cell.seconds < LIMIT and kernel.value("len(_.text)") > 10
    after = kernel.run("%generate --max-tokens 4 -t 0 What is the capital of France?", timeout=60)
    assert after.status == "ok" and len(after.answers[0]["data"]["text/plain"]) > 0
    assert kernel.value("Session.current.models['smollm2'].process.pid") == pid
    kernel.run("stats = await Session.current.models['smollm2'].llm.get_stats()")
    assert kernel.value("(stats['num_running_reqs'], stats['kv_cache_usage'])") == (0, 0.0)
    kernel.run("%llm unload smollm2")

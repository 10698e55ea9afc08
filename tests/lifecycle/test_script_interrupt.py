"""Ctrl-C in a script: the text so far is there, the engine goes on, and ends with the script."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.client.fake_engine import run_directories, wait_gone
from tests.lifecycle.test_kernel_death import wait_for

MODEL = "fake:step_ms=10,max_model_len=4000,num_blocks=600"
EXECUTOR = "llmkernel.engine.fake_executor:FakeExecutor"

BLOCKING = f"""
from llmkernel import LLM, SamplingParams
from llmkernel.errors import GenerationInterrupted
if __name__ == "__main__":
    with LLM({MODEL!r}, executor_class={EXECUTOR!r}, quiet=True) as llm:
        print("engine", llm.llm_engine.facts.pid, flush=True)
        for _ in range(3):
            stream = llm.stream("hello", SamplingParams(max_tokens=3000))
            next(stream)
            stream.close()
            print("asking", flush=True)
            try:
                llm.generate(["hello", "there"], SamplingParams(max_tokens=3000))
            except GenerationInterrupted as stop:
                assert isinstance(stop, KeyboardInterrupt)
                assert len(stop.partial) == 2, stop.partial
                print("interrupted", llm.llm_engine.facts.pid, flush=True)
        print(len(llm.generate("hello", SamplingParams(max_tokens=5))[0].outputs[0].token_ids))
"""

ASYNC = f"""
import asyncio
from llmkernel import AsyncLLM, EngineArgs, SamplingParams
async def main(said):
    llm = AsyncLLM(EngineArgs(model={MODEL!r}), executor_class={EXECUTOR!r})
    facts = await llm.ready()
    print("engine", facts.pid, flush=True)
    async for output in llm.generate("hello", SamplingParams(max_tokens=3000)):
        said[:] = [output.outputs[0].text]
        if len(said[0]) == 3:
            print("asked", flush=True)
if __name__ == "__main__":
    said = []
    try:
        asyncio.run(main(said))
    except KeyboardInterrupt:
        assert len(said[0]) >= 3, said
        print("interrupted", flush=True)
"""


class Script:
    def __init__(self, folder: Path, code: str) -> None:
        path = folder / "script.py"
        path.write_text(code)
        self.popen = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()

    def wait_for(self, word: str) -> str:
        assert self.popen.stdout is not None and self.popen.stderr is not None
        for line in self.popen.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(self.popen.stderr.read())


def test_blocking_calls_are_interrupted_three_times(base: Path, tmp_path: Path) -> None:
    with Script(tmp_path, BLOCKING) as script:
        engine = script.wait_for("engine")
        for _ in range(3):
            script.wait_for("asking")
            wait_for(base, lambda status: status.running == 2)
            script.popen.send_signal(signal.SIGINT)
            assert script.wait_for("interrupted") == engine
        out, err = script.popen.communicate(timeout=20)
        assert (out, err, script.popen.returncode) == ("5\n", "", 0)
    wait_gone(int(engine), 2)
    assert run_directories(base) == []


def test_asyncio_run_is_interrupted(base: Path, tmp_path: Path) -> None:
    with Script(tmp_path, ASYNC) as script:
        engine = int(script.wait_for("engine"))
        script.wait_for("asked")
        script.popen.send_signal(signal.SIGINT)
        out, err = script.popen.communicate(timeout=20)
        assert (out, err, script.popen.returncode) == ("interrupted\n", "", 0)
    wait_gone(engine, 2)
    assert run_directories(base) == []

"""Plain scripts, without a __main__ guard, as a user writes them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.llm.engines import FAKE, answer
from tests.llm.tokenizers_on_the_spot import smollm2_folder

_BLOCKING = """
from llmkernel import LLM, SamplingParams
llm = LLM({model!r}, quiet=True, **{options!r})
outputs = llm.generate(["Hello", "World"], SamplingParams(temperature=0, max_tokens={count}))
for output in outputs:
    print(output.outputs[0].text)
print(llm.chat([{{"role": "user", "content": "Hi"}}], SamplingParams(temperature=0, max_tokens=4))[0].finished)
"""

_ASYNC = """
import asyncio
from llmkernel import AsyncLLM, EngineArgs, SamplingParams

llm = AsyncLLM(EngineArgs(model={model!r}), **{options!r})

async def main():
    async for output in llm.generate("Hello", SamplingParams(temperature=0, max_tokens={count}), request_id="r1"):
        pass
    print(output.outputs[0].text)

asyncio.run(main())
asyncio.run(main())
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
"""


def _run(tmp_path: Path, source: str, timeout: float = 60) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no warning, no traceback"
    return done.stdout.splitlines()


@pytest.mark.row("A-001")
def test_llm_in_a_script_that_forgets_to_shut_down(tmp_path: Path) -> None:
    lines = _run(tmp_path, _BLOCKING.format(model="fake:", options={"executor_class": FAKE}, count=8))
    assert lines == [answer("Hello", 8), answer("World", 8), "True"]


@pytest.mark.row("A-002", "A-118")
def test_async_llm_in_a_script_made_outside_the_loops_that_use_it(tmp_path: Path) -> None:
    lines = _run(tmp_path, _ASYNC.format(model="fake:", options={"executor_class": FAKE}, count=8))
    assert lines == [answer("Hello", 8)] * 3


@pytest.mark.slow
@pytest.mark.skipif(not (smollm2_folder() / "model.safetensors").exists(), reason="smollm2 is not converted yet")
def test_both_with_the_real_model(tmp_path: Path) -> None:
    blocking = _run(tmp_path, _BLOCKING.format(model="smollm2", options={"num_threads": 1}, count=8), timeout=110)
    assert len(blocking) >= 3 and blocking[-1] == "True"
    streamed = _run(tmp_path, _ASYNC.format(model="smollm2", options={}, count=8), timeout=110)
    assert streamed[0] == blocking[0], "greedy, so the same"


_NESTED = """
import asyncio, nest_asyncio2, threading
nest_asyncio2.apply()
from llmkernel import LLM, AsyncLLM, EngineArgs, SamplingParams

params, options = SamplingParams(max_tokens=8), {options!r}

async def last(prompt):
    async for output in llm.generate(prompt, params):
        pass
    return output.outputs[0].text

async def cell():
    print(asyncio.run(last("nested")))
    print(asyncio.get_event_loop().run_until_complete(last("again")))
    with LLM(engine=llm) as guest, LLM({model!r}, quiet=True, **options) as own:
        print(guest.generate("guest", params)[0].outputs[0].text, own.generate("own", params)[0].outputs[0].text)
    thread = threading.Thread(target=lambda: print(asyncio.run(last("thread"))))
    thread.start()
    thread.join()
    print(await last("awaited"))

llm = AsyncLLM(EngineArgs(model={model!r}), **options)
asyncio.run(cell())
print(asyncio.run(last("after")))
"""


def test_after_somebody_elses_nest_asyncio(tmp_path: Path) -> None:
    lines = _run(tmp_path, _NESTED.format(model="fake:", options={"executor_class": FAKE}))
    prompts = ("nested", "again", "guest", "own", "thread", "awaited", "after")
    assert " ".join(lines).split(" ") == " ".join(answer(prompt, 8) for prompt in prompts).split(" ")

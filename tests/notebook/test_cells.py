"""%%generate in a real kernel: alone, in a loop, nested, awaited or not; what is shown and what is stored."""

import itertools
import json
import re
import time
from collections.abc import Iterator

import nbformat
import pytest

from llmkernel.engine.fake_executor import fake_answer
from tests.notebook.kernel import Kernel, running_kernel

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("cells")
    with running_kernel(
        folder, "%load_ext llmkernel", "%llm load fake:step_ms=4,fail_token=33 --name fake", "%llm config raw=on"
    ) as kernel:
        yield kernel


@pytest.mark.row("A-020", "A-021")
def test_the_engine_is_a_process_and_its_client_lives_on_the_kernels_loop(kernel: Kernel) -> None:
    cell = kernel.run(
        "import asyncio, os, threading\nfrom llmkernel import Session\n"
        "llm = Session.current.models['fake'].llm\n"
        "before = {thread.name for thread in threading.enumerate()}\n"
        "%generate --quiet --max-tokens 3 hi\n"
        "after = {thread.name for thread in threading.enumerate()}\n"
        "assert asyncio.get_running_loop() is llm.loop and after == before, after - before\n"
        "assert llm.engine_core.process.pid != os.getpid()"
    )
    assert cell.status == "ok", cell.traceback


@pytest.mark.row("A-119", "A-002")
def test_text_grows_in_one_display_at_most_ten_times_a_second(kernel: Kernel) -> None:
    cell = kernel.run("%%generate --max-tokens 250\nhello")
    updates = [
        (when, message["content"]["data"]["text/plain"])
        for when, message in cell.messages
        if message["msg_type"] in ("display_data", "update_display_data")
    ]
    assert len(updates) >= 4
    texts = [text for _, text in updates]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[0] and len(texts[0]) < 100 and texts[-1] == answer("hello", 250)
    seconds = updates[-1][0] - updates[0][0]
    assert len(updates) <= seconds * 10 + 3
    assert len(cell.displays) == 1 and not cell.of_type("execute_result", "comm_open")


def test_the_final_bundle_has_markdown_plain_text_and_metadata(kernel: Kernel) -> None:
    cell = kernel.run('%%generate --max-tokens 5 -t 0.5 --seed 7 --stop "#"\nhello')
    (stored,) = cell.displays
    assert stored["data"] == {"text/markdown": answer("hello", 5), "text/plain": answer("hello", 5)}
    assert stored["metadata"] == {
        "llmkernel": {
            "model": "fake",
            "id": stored["metadata"]["llmkernel"]["id"],
            "params": {"temperature": 0.5, "max_tokens": 5, "stop": ["#"], "raw": True},
            "weights": {
                "source": "fake:step_ms=4,fail_token=33",
                "architecture": "Fake",
                "implementation": "fake",
                "dtype": "none",
                "device": "none",
                "quantization": "none",
                "weights": "",
                "versions": {},
            },
            "request_id": stored["metadata"]["llmkernel"]["id"],
            "prompt": "hello",
            "prompt_token_ids": list(b"hello"),
            "seed": 7,
            "finish_reason": "length",
            "usage": {"prompt_tokens": 5, "completion_tokens": 5, "cached_tokens": 0},
        }
    }
    notebook = nbformat.v4.new_notebook()
    notebook.cells.append(nbformat.v4.new_code_cell("x"))
    output = nbformat.v4.new_output("display_data", data=stored["data"], metadata=stored["metadata"])
    notebook.cells[0].outputs.append(output)
    nbformat.validate(json.loads(nbformat.writes(notebook)))
    assert cell.stdout == "The answer stopped at max_tokens = 5; raise it with --max-tokens.\n"


def test_plain_stores_plain_text_only_and_quiet_shows_nothing(kernel: Kernel) -> None:
    plain = kernel.run("%%generate --plain --max-tokens 3\nhello")
    assert [content["data"] for content in plain.displays] == [{"text/plain": answer("hello", 3)}]
    quiet = kernel.run("%%generate --quiet --max-tokens 3 -o kept\nhello")
    assert not quiet.displays and not quiet.stdout
    assert kernel.value("kept.text") == answer("hello", 3)


def test_the_result_is_in_underscore_and_shows_itself_in_another_cell(kernel: Kernel) -> None:
    kernel.run("%%generate --max-tokens 4 -o haiku\nhello")
    assert kernel.value("_ is haiku, Out[max(Out)] is haiku, _.text") == (True, True, answer("hello", 4))
    shown = kernel.run("haiku")
    assert [content["data"]["text/plain"] for content in shown.answers] == [answer("hello", 4)]
    assert kernel.run("%llm show").answers[0]["data"] == shown.answers[0]["data"]


def test_in_a_loop_in_an_assignment_and_in_an_async_function(kernel: Kernel) -> None:
    loop = kernel.run(
        "kept = []\nfor word in ('a', 'b'):\n    r = %generate --max-tokens 3 {word}\n    kept.append(r.text)"
    )
    assert [content["data"]["text/plain"] for content in loop.answers] == [answer("a", 3), answer("b", 3)]
    assert kernel.value("kept") == [answer("a", 3), answer("b", 3)]
    assigned = kernel.run("x = %generate --max-tokens 3 hi")
    assert len(assigned.displays) == 1 and kernel.value("x.text") == answer("hi", 3)
    defined = kernel.run("async def ask():\n    r = %generate --max-tokens 3 hi\n    return r.text\nprint(await ask())")
    assert defined.stdout.endswith(answer("hi", 3) + "\n")
    plain = kernel.run(
        "def ask():\n    return get_ipython().run_line_magic('generate', '-n 1 --max-tokens 3 hi')\nh = ask()"
    )
    assert plain.status == "ok"
    assert kernel.run("print((await h).text)").stdout == answer("hi", 3) + "\n"


def test_under_time(kernel: Kernel) -> None:
    cell = kernel.run("%%time\n%%generate --max-tokens 20\nhello")
    assert len(cell.displays) == 1 and "CPU times: total:" in cell.stdout
    (number, unit) = re.findall(r"Wall time: ([\d.]+) (m?s)", cell.stdout)[0]
    assert float(number) * (1e-3 if unit == "ms" else 1) >= 0.07
    assert kernel.value("_.text") == answer("hello", 20)
    cell = kernel.run("%%time\ny = %generate --max-tokens 3 hi\nz = y.text\nz")
    assert cell.of_type("execute_result")[0]["data"]["text/plain"] == repr(answer("hi", 3))
    failing = kernel.run("%%time\nq = %generate --max-tokens 3 hi\n1 / 0")
    assert failing.ename == "ZeroDivisionError" and "Wall time" in failing.stdout
    assert "1 / 0" in ANSI.sub("", failing.traceback)


def test_under_capture(kernel: Kernel) -> None:
    cell = kernel.run("%%capture held\n%%generate --max-tokens 40\nhello")
    assert not cell.displays and not cell.stdout
    assert kernel.value("[output.data for output in held.outputs]") == [
        {"text/markdown": answer("hello", 40), "text/plain": answer("hello", 40)}
    ]
    assert kernel.value("held.stdout").startswith("The answer stopped at max_tokens = 40")
    nested = kernel.run("%%capture\n%%time\n%%generate --max-tokens 3\nhello")
    assert nested.status == "ok" and not nested.stdout


def test_with_autoawait_off_the_handle_comes_back_and_says_why(kernel: Kernel) -> None:
    kernel.run("%autoawait off")
    try:
        message_id = kernel.start("%generate --max-tokens 30 hello")
        cell = kernel.finish(message_id)
        assert cell.stdout == "%autoawait is off, so the cell does not wait; _ is the handle of the request.\n"
        assert not kernel.value("_.done")
        last = kernel.more(message_id, lambda message: "llmkernel" in message["content"].get("metadata", {}))[-1]
        assert last["content"]["data"]["text/plain"] == answer("hello", 30)
    finally:
        kernel.run("%autoawait on")
    assert kernel.value("_.done")


def test_in_the_background_the_answer_grows_in_its_own_cell(kernel: Kernel) -> None:
    message_id = kernel.start("%%generate -b --max-tokens 60 -o behind\nhello")
    assert kernel.finish(message_id).seconds < 0.2
    other = kernel.start("await behind\nprint('here')")
    last = kernel.more(message_id, lambda message: "llmkernel" in message["content"].get("metadata", {}))[-1]
    assert last["content"]["data"]["text/plain"] == answer("hello", 60)
    assert kernel.finish(other).status == "ok"
    message_id = kernel.start("%%generate -b\nbad!")
    kernel.finish(message_id)
    last = kernel.more(message_id, lambda message: "llmkernel" in message["content"].get("metadata", {}))[-1]
    assert last["content"]["data"]["text/plain"].startswith("[failed: The request failed in the engine")


def test_many_answers_and_many_prompts_share_one_display(kernel: Kernel) -> None:
    cell = kernel.run("%%generate -n 3 --max-tokens 3\nhello")
    (stored,) = cell.displays
    word = answer("hello", 3)
    assert stored["data"]["text/plain"] == f"[1]\n{word}\n\n[2]\n{word}\n\n[3]\n{word}"
    assert stored["metadata"]["llmkernel"]["finish_reason"] == ["length"] * 3
    cell = kernel.run("ask = ['a', 'bad!', 'c']\ng = %generate --prompts ask --max-tokens 3")
    (stored,) = cell.displays
    assert stored["data"]["text/plain"].splitlines()[:2] == ["[1] a", answer("a", 3)]
    assert "[failed: The request failed in the engine: the prompt holds fail_token 33]" in stored["data"]["text/plain"]
    assert [one["finish_reason"] for one in stored["metadata"]["llmkernel"]["requests"]] == [
        "length",
        "error",
        "length",
    ]
    assert "1 of 3 requests failed" in cell.stdout and cell.status == "ok"
    kernel.run("%%generate --prompts ask --max-tokens 2 -o g\n<{prompt}>")
    assert kernel.value("g.texts[0], g.errors[1] is None") == (answer("<a>", 2), False)


def test_the_body_is_exact_and_interpolation_is_asked_for(kernel: Kernel) -> None:
    kernel.run("%llm load fake:echo=1 --name echo\nname = 'Ann'")
    body = '  {name} $name {"a": 1} {}\n\n!ls\n%time x\n>>> y\t\n'
    kernel.run(f"%%generate --model echo -o g\n{body}")
    assert kernel.value("g.text") == body.removesuffix("\n")
    kernel.run("%%generate --model echo -i -o g\n{name} {nome} {}")
    assert kernel.value("g.text") == "Ann {nome} {}"
    kernel.run("%llm unload echo")


def test_two_models_side_by_side(kernel: Kernel) -> None:
    loaded = kernel.run("%llm load fake:echo=1,load_ms=200 --name echo")
    assert loaded.displays[0]["data"]["text/plain"].startswith("echo is ready (")
    assert kernel.run("%generate hello").answers[0]["data"]["text/plain"] == "hello"
    assert (
        kernel.run("%generate --model fake --max-tokens 2 hello").answers[0]["metadata"]["llmkernel"]["model"] == "fake"
    )
    status = kernel.run("%llm status").stdout
    assert "echo (default): ready" in status and "fake: ready" in status and status.count("engine process") == 2
    assert "fake path, 1 thread\n" in status and "load " not in status
    stages = r"  load [\d.]+ s: process and handshake [\d.]+ s, weights 0\.[2-9]\d s$"
    assert re.search(stages, kernel.run("%llm status -v").stdout, re.MULTILINE)
    unloaded = kernel.run("%llm unload echo")
    assert re.fullmatch(r"Unloaded echo: [\d.]+ MiB given back\.\n", unloaded.stdout)
    assert "echo" not in kernel.run("%llm status").stdout


def test_settings_hold_until_they_are_taken_back(kernel: Kernel) -> None:
    assert kernel.run("%llm config max_tokens=2 stop='# #'").stdout == "max_tokens = 2\nraw = True\nstop = ['# #']\n"
    assert kernel.run("%generate hello").answers[0]["data"]["text/plain"] == answer("hello", 2)
    assert kernel.run("%generate --max-tokens 3 hello").answers[0]["data"]["text/plain"] == answer("hello", 3)
    assert kernel.run("%llm config max_tokens= stop=").stdout == "raw = True\n"


def test_ps_stop_and_logs(kernel: Kernel) -> None:
    kernel.run("%%generate -b --max-tokens 2000 -o long\nhello\nworld")
    listed = kernel.run("%llm ps").stdout.splitlines()[-1]
    assert re.fullmatch(r"g\d+ +\[\d+\] +fake +(prefill|queued|running) +\d+ tokens +hello world", listed)
    assert kernel.run("%llm stop").stdout.startswith("Stopped g")
    assert kernel.run("%llm stop --all").stdout == "Nothing runs.\n"
    assert kernel.value("long.state") == "cancelled"
    assert kernel.run("%llm logs fake -n 3").status == "ok"


def test_help_and_completion(kernel: Kernel) -> None:
    kernel.run("%config Completer.use_jedi = False")
    reply = kernel.client.execute_interactive("%%generate?", output_hook=lambda _: None, timeout=20)
    page = reply["content"]["payload"][0]["data"]["text/plain"]
    assert "--max-tokens" in page and "longest answer in tokens" in page
    assert "unload" in kernel.run("%llm help").stdout

    def complete(code: str) -> list[str]:
        return kernel.client.complete(code, reply=True, timeout=20)["content"]["matches"]

    assert complete("%%generate --tempe") == ["--temperature"]
    assert "fake" in complete("x = %generate --model ")
    assert complete("%llm unl") == ["unload"] and complete("%llm load --kv") == ["--kv-cache"]
    assert "--temperature" not in complete("%%generate\n--te")


MISTAKES = [
    ("%%generate --bogus\nhi", "UsageError", "Unknown option --bogus; %%generate? lists the options."),
    ("%%generate --max-tokens many\nhi", "UsageError", "--max-tokens: 'many' is not a whole number."),
    ("%%generate --max-tokens 0\nhi", "InvalidRequestError", "max_tokens = 0 must be an integer of at least 1."),
    ("%%generate -t 9\nhi", "InvalidRequestError", "temperature = 9.0 must be a number from 0 to 2."),
    ("%llm status echo", "UsageError", "%llm status tells of every model; 'echo' is no option of it."),
    ("%%generate stray\nhi", "UsageError", "'stray' stands after the options"),
    ("%%generate\n  \n", "UsageError", "The prompt is empty; write it into the lines below %%generate."),
    ("%generate", "UsageError", "The prompt is empty; write it after %generate."),
    ("%generate --model nope hi", "InvalidRequestError", "No model is called 'nope' (loaded: fake)"),
    ("%generate --prompts nope", "UsageError", "--prompts: there is no variable 'nope'."),
    ("%generate -t 0 -n 2 hi", "InvalidRequestError", "n = 2 must be 1 when temperature is 0"),
    ("%generate " + "x" * 3000, "InvalidRequestError", "The prompt has 3000 tokens, and the model takes 2048"),
    ("%generate bad!", "RequestFailedError", "The request failed in the engine: the prompt holds fail_token 33"),
    ("%llm load", "UsageError", "Name a model: %llm load MODEL"),
    ("%llm load fake: --dtype float3", "UsageError", "--dtype: 'float3' is not one of auto, float32"),
    ("%llm load fake: b", "UsageError", "%llm load takes one model, 'b' is one too many; --name NAME"),
    ("%llm load fake: --implementation mine", "UsageError", "'mine' is not one of auto, fused, transformers"),
    ("%llm load fake: --kv-cache much", "InvalidRequestError", "'much' is not a size"),
    ("%llm load fake:fail_load=1", "EngineStartupError", "told to fail its load"),
    ("%llm load fake:step=3", "EngineStartupError", "'step=3' is no setting of the fake model"),
    ("%llm unload nope", "InvalidRequestError", "No model is called 'nope'"),
    ("%llm config max_tokns=3", "InvalidRequestError", "did you mean max_tokens?"),
    ("%llm config 5", "UsageError", "'5': write NAME=VALUE"),
    ("%llm show g999", "InvalidRequestError", "No generation is called 'g999'"),
    ("%llm fly", "UsageError", "Unknown verb 'fly'"),
]


@pytest.mark.parametrize(("code", "name", "message"), MISTAKES, ids=[code[:24] for code, _, _ in MISTAKES])
def test_a_mistake_is_one_line_and_harms_nobody(kernel: Kernel, code: str, name: str, message: str) -> None:
    cell = kernel.run(code)
    assert (cell.status, cell.ename) == ("error", name)
    assert message in cell.evalue
    shown = ANSI.sub("", cell.traceback or cell.stderr).strip()
    assert shown == f"{name}: {cell.evalue}" and "\n" not in shown
    assert kernel.run("%generate --max-tokens 2 ok").answers[0]["data"]["text/plain"] == answer("ok", 2)


def test_ten_cells_leave_nothing_behind(kernel: Kernel) -> None:
    kernel.run("import gc, os, asyncio, threading, comm")
    kernel.run(
        "def open_files():  # IPython's history comes and goes\n"
        "    links = [f'/proc/self/fd/{number}' for number in os.listdir('/proc/self/fd')]\n"
        "    return len([link for link in links if os.path.lexists(link) and 'history' not in os.readlink(link)])"
    )
    count = (
        "(len(asyncio.all_tasks(llm.loop)), open_files(), threading.active_count(),"
        " len(comm.get_comm_manager().comms), len(llm.output_processor.request_states))"
    )
    kernel.run("%%generate --max-tokens 4\nwarm-up")
    before = kernel.value(count)
    for number in range(10):
        assert kernel.run(f"%%generate --max-tokens 4 -n {1 + number % 3}\ncell {number}").status == "ok"
    kernel.run("gc.collect()")
    deadline = time.monotonic() + 5
    while left := [pair for pair in zip(before, kernel.value(count), strict=True) if pair[1] > pair[0]]:
        assert time.monotonic() < deadline, left  # what earlier cells ended may take a moment to be gone
    assert kernel.value("llm.get_scheduler_stats().kv_cache_usage") == 0

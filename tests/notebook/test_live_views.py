"""The kernel's half of the live views, as a notebook page sees it: what is sent, what is stored, what is let go."""

import json
from collections.abc import Iterator
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.notebook.live_views import KEPT_OPEN
from tests.notebook.kernel import Cell, Kernel, running_kernel

WIDGET = "application/vnd.jupyter.widget-view+json"


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(
        tmp_path_factory.mktemp("views"),
        "%load_ext llmkernel",
        "from llmkernel import Session",
        "%llm load fake:step_ms=10,fail_token=33,num_blocks=1024 --name one",
        "%llm load fake:step_ms=2,num_blocks=1024 --name two",
        "%llm config raw=on",
    ) as kernel:
        yield kernel


def run(kernel: Kernel, code: str, timeout: float = 60) -> Cell:
    """As a notebook page runs a cell: the request names it."""
    content = {
        "code": code,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": True,
    }
    message = kernel.client.session.msg("execute_request", content, metadata={"cellId": "c1"})
    kernel.client.shell_channel.send(message)
    return kernel.finish(message["header"]["msg_id"], timeout=timeout)


def frames(cell: Cell) -> list[dict[str, Any]]:
    """What went to the view's browser half, in order."""
    contents = [message["data"].get("content") for message in cell.of_type("comm_msg")]
    return [content for content in contents if content]


def test_a_page_gets_a_widget_frames_and_at_last_the_bundle(kernel: Kernel) -> None:
    cell = run(kernel, "%%generate --model one --max-tokens 80\nhello")
    opened = [one["data"]["state"]["_model_module"] for one in cell.of_type("comm_open")]
    assert opened.count("anywidget") == 1
    first, *_, last = cell.of_type("display_data", "update_display_data")
    assert first["data"][WIDGET]["model_id"] and "llmkernel" not in first["metadata"]
    assert last["data"] == {"text/markdown": answer("hello", 80), "text/plain": answer("hello", 80)}
    sent = frames(cell)
    assert [frame["seq"] for frame in sent] == list(range(1, len(sent) + 1))
    assert "".join(text for frame in sent for _, text in frame.get("d", ())) == answer("hello", 80)
    states = [counters["state"] for frame in sent for _, counters in frame.get("c", ()) if "state" in counters]
    assert states[-2:] == ["decoding", "done"]
    (snapshot,) = [
        state["snapshot"] for one in cell.of_type("comm_msg") if (state := one["data"].get("state", {})).get("snapshot")
    ]
    assert snapshot["rows"][0]["text"] == answer("hello", 80) and snapshot["rows"][0]["tokens"] == 80


def test_who_draws_no_widgets_gets_none(kernel: Kernel) -> None:
    for cell in (kernel.run("%generate --max-tokens 3 hi"), run(kernel, "%generate --quiet --max-tokens 3 hi")):
        assert not cell.of_type("comm_open", "comm_msg")


def test_a_headless_run_stores_the_bundle_and_no_widget_state() -> None:
    cells = ["%load_ext llmkernel", "%llm load fake:", "%generate --raw --max-tokens 4 hello"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3", store_widget_state=True).execute()
    assert notebook.cells[2].outputs[0]["data"]["text/plain"] == answer("hello", 4)
    assert "widgets" not in notebook.metadata and WIDGET not in json.dumps(notebook)


def test_two_models_side_by_side(kernel: Kernel) -> None:
    cell = run(kernel, "%%generate --model one --model two --max-tokens 12\nhello")
    (stored,) = cell.answers
    assert stored["data"]["text/plain"] == f"one\n{answer('hello', 12)}\n\ntwo\n{answer('hello', 12)}"
    assert [one["model"] for one in stored["metadata"]["llmkernel"]["requests"]] == ["one", "two"]
    dicts = kernel.value("_.to_dicts()")
    assert [(one["model"], one["text"], one["tokens"]) for one in dicts] == [
        ("one", answer("hello", 12), 12),
        ("two", answer("hello", 12), 12),
    ]


def test_a_failed_background_request_says_so_in_its_own_view(kernel: Kernel) -> None:
    content = {"code": "%%generate --model one -b --max-tokens 4\nbang!", "silent": False, "store_history": True}
    message = kernel.client.session.msg("execute_request", content, metadata={"cellId": "c1"})
    kernel.client.shell_channel.send(message)
    later = kernel.more(message["header"]["msg_id"], lambda one: one["msg_type"] == "update_display_data")
    counters = [
        counters
        for one in later
        if one["msg_type"] == "comm_msg"
        for _, counters in (one["content"]["data"].get("content") or {}).get("c", ())
    ]
    assert counters[-1]["state"] == "failed" and "failed" in counters[-1]["error"]
    assert "[failed: " in later[-1]["content"]["data"]["text/plain"]


def test_one_of_several_answers_is_stopped_alone(kernel: Kernel) -> None:
    cell = run(
        kernel,
        "handle = Session.current.generate('hello', model='one', n=3, max_tokens=60)\n"
        "async for _ in handle:\n"
        "    if len(handle.outputs[1].text) > 3:\n"
        "        break\n"
        "Session.current.stop_requests([f'1_{handle.id}'])\n"
        "await handle",
    )
    assert cell.status == "ok", cell.traceback
    reasons = kernel.value("[answer.finish_reason for answer in handle.outputs]")
    assert reasons == ["length", "abort", "length"]


def test_requests_that_wait_for_a_load_are_stopped_too(kernel: Kernel) -> None:
    cell = run(
        kernel,
        "work = Session.current.load('fake:load_ms=600', name='slow')\n"
        "handle = Session.current.generate(['a', 'b'], model='slow', max_tokens=5)\n"
        "Session.current.stop_requests([handle.rows[0].request_id])\n"
        "await handle\n_ = await work\nSession.current.default = 'one'",
    )
    assert cell.status == "ok", cell.traceback
    assert kernel.value("[answer.finish_reason for answer in handle.outputs]") == ["abort", "length"]


def test_tokens_can_be_looked_at_after_the_end(kernel: Kernel) -> None:
    cell = run(kernel, "%%generate --model one --logprobs 3 --max-tokens 4 -o told\nhello")
    assert "`%llm show " in cell.stdout and "`.tokens()`" in cell.stdout
    tokens = kernel.value("told.tokens()")
    assert (
        [token["text"] for token in tokens] == list(answer("hello", 4)) == [token["bytes"].decode() for token in tokens]
    )
    assert [token["position"] for token in tokens] == [0, 1, 2, 3] and tokens[0]["rank"] == 1
    assert tokens[0]["alternatives"][0] == (tokens[0]["token_id"], tokens[0]["text"], tokens[0]["logprob"])
    for code in ("told.show(view=True)", "%llm show --view"):
        (shown,) = run(kernel, code).of_type("display_data")
        assert WIDGET in shown["data"] and shown["data"]["text/plain"] == answer("hello", 4)
    assert WIDGET not in kernel.run("told.show(view=True)").displays[0]["data"]
    cell = run(kernel, "asked = {'logprobs': 2, 'max_tokens': 3}\n%generate --model one --params asked -o told hello")
    assert [opened["data"]["state"].get("logprobs") for opened in cell.of_type("comm_open")] == [None, True]
    assert len(kernel.value("told.tokens()")) == 3
    run(kernel, "%%generate --model one --max-tokens 4 -o told\nhello")
    refused = kernel.run("told.tokens()")
    assert refused.ename == "InvalidRequestError" and "ask with --logprobs N." in refused.evalue


def test_bytes_of_a_token_that_is_no_text_go_along(kernel: Kernel) -> None:
    kernel.run("%llm load fake:echo=1,step_ms=2 --name echo")
    cell = run(kernel, "%%generate --model echo --logprobs 1 --raw\nä")
    views = [view for frame in frames(cell) for _, some in frame.get("k", ()) for view in some]
    assert [(view["chosen"][1], view["chosen"][3]) for view in views[:2]] == [("", [0xC3]), ("ä", [0xA4])]
    kernel.run("%llm unload echo\nSession.current.default = 'one'")


def test_a_handle_that_has_nothing_yet_says_so(kernel: Kernel) -> None:
    kernel.run("%llm load fake:step_ms=400 --name late\n%autoawait off")
    try:
        run(kernel, "handle = %generate --model late --max-tokens 2 hello")
        (shown,) = kernel.run("handle").of_type("display_data")
        assert shown["data"]["text/plain"].startswith("<Generation g") and "waiting" in shown["data"]["text/plain"]
        (shown,) = run(kernel, "handle").of_type("display_data")
        assert WIDGET in shown["data"]
    finally:
        kernel.run("%autoawait on")
    kernel.run("%llm unload late\nSession.current.default = 'one'")


def rerun(kernel: Kernel, times: int) -> None:
    for _ in range(times):
        assert run(kernel, "%generate --model two --max-tokens 2 hi").status == "ok"


def open_models(kernel: Kernel) -> int:
    return int(kernel.value("len(__import__('ipywidgets').widgets.widget._instances)"))


def views_in_memory(kernel: Kernel) -> int:
    kernel.run(
        "import gc\nfrom llmkernel.notebook.widgets.stream_view import StreamView\ngc.collect()\n"
        "in_memory = sum(isinstance(one, StreamView) for one in gc.get_objects())"
    )
    return int(kernel.value("in_memory"))


@pytest.mark.parametrize("times", [100, pytest.param(500, marks=pytest.mark.soak)])
def test_re_runs_leave_widgets_files_and_memory_flat(kernel: Kernel, times: int) -> None:
    rerun(kernel, 2 * KEPT_OPEN)  # every model that is kept is there, each with its layout
    process = psutil.Process(kernel.pid)
    before, files, models = process.memory_info().rss, process.num_fds(), open_models(kernel)
    rerun(kernel, times)
    assert open_models(kernel) <= models <= 2 * KEPT_OPEN + 5
    assert process.num_fds() <= files + 3
    assert views_in_memory(kernel) <= KEPT_OPEN + 2
    # IPython keeps every cell and its value (measured with the text display: 8.5 KB each)
    assert process.memory_info().rss - before < 4_000_000 + 22_000 * times

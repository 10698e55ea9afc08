"""A load as a notebook page sees it: a bar that follows its stages, Cancel, and one line that stays."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.notebook.kernel import Cell, Kernel, running_kernel

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(
        tmp_path_factory.mktemp("load"), "%load_ext llmkernel\nfrom llmkernel import Session\nimport sys"
    ) as kernel:
        yield kernel


def run(kernel: Kernel, code: str, watch: Callable[[dict[str, Any]], object] = lambda _: None) -> Cell:
    """As a page runs a cell; `watch` sees each message at once."""
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = kernel.client.session.msg("execute_request", content, metadata={"cellId": "c1"})
    kernel.client.shell_channel.send(message)

    def seen(message: dict[str, Any]) -> bool:
        watch(message)
        return False

    return kernel.finish(message["header"]["msg_id"], timeout=30, interrupt_when=seen)


def shows_a_bar(message: dict[str, Any]) -> bool:
    return WIDGET in message["content"].get("data", {})


def states(cell: Cell) -> list[dict[str, Any]]:
    """What the bar was told, in order."""
    opened = [content["data"]["state"] for content in cell.of_type("comm_open")]
    updates = [content["data"].get("state", {}) for content in cell.of_type("comm_msg")]
    return [state["load"] for state in (*opened, *updates) if "load" in state]


def test_a_bar_follows_the_stages_and_one_line_stays(kernel: Kernel) -> None:
    cell = run(kernel, "%llm load fake:load_ms=1200 --name fake")
    kinds = [WIDGET in shown["data"] for shown in cell.of_type("display_data", "update_display_data")]
    assert kinds.count(True) == 1 and kinds[-2:] == [True, False]
    (stored,) = cell.displays
    assert list(stored["data"]) == ["text/plain"] and stored["metadata"] == {}
    assert stored["data"]["text/plain"].startswith("fake is ready (")
    *loading, last = states(cell)
    assert [state["title"] for state in loading] == ["Loading fake"] * len(loading)
    assert loading[-1]["stages"] == ["process", "importing", "weights", "kv cache", "warm-up"]
    places = [(state["at"], state.get("share", 0)) for state in loading if "at" in state]
    assert len(places) > 3 and places == sorted(places)
    assert (last["state"], last["words"]) == ("ready", stored["data"]["text/plain"])


def test_the_next_bar_needs_no_line_before_it_and_closes_the_last(kernel: Kernel) -> None:
    count = (
        "sum(type(one).__name__ == 'LoadBar' for one in __import__('ipywidgets').widgets.widget._instances.values())"
    )
    for _ in range(2):
        cell = run(kernel, "%llm unload\n%llm load fake:load_ms=50 --name fake")
        first, *_ = cell.of_type("display_data")
        assert WIDGET in first["data"]
        assert kernel.value(count) == 1


def test_two_cells_show_one_bar(kernel: Kernel) -> None:
    load = "%llm load fake:load_ms=900 --name twice"
    cell = run(kernel, f"def begin():\n    {load}\nbegin()\n{load}")
    shown = [one["data"][WIDGET]["model_id"] for one in cell.of_type("display_data") if WIDGET in one["data"]]
    assert len(shown) == 2 and len(set(shown)) == 1
    assert [list(one["data"]) for one in cell.displays] == [["text/plain"]] * 2
    kernel.run("%llm unload twice\nSession.current.default = 'fake'")


def test_cancel_ends_the_load_as_interrupt_does(kernel: Kernel) -> None:
    before = set(psutil.Process(kernel.pid).children(recursive=True))
    stop = kernel.value("get_ipython().magics_manager.registry['LLMMagics'].views.stop.model_id")

    def cancel(message: dict[str, Any]) -> None:
        if shows_a_bar(message):
            data = {"method": "custom", "content": {"t": "cancel", "model": "slow"}}
            click = kernel.client.session.msg("comm_msg", {"comm_id": stop, "data": data})
            kernel.client.shell_channel.send(click)

    cell = run(kernel, "%llm load fake:load_ms=60000 --name slow", cancel)
    assert (cell.ename, cell.evalue) == ("EngineStartupError", "The load of slow was ended; load it again.")
    assert [shown["data"] for shown in cell.displays] == [{"text/plain": "Loading slow: ended."}]
    assert set(psutil.Process(kernel.pid).children(recursive=True)) <= before
    assert kernel.value("('slow' in Session.current.models, Session.current.default)") == (False, "fake")
    assert kernel.run("Session.current.cancel_load('slow'); Session.current.cancel_load('fake')").status == "ok"
    assert kernel.value("Session.current.models['fake'].state") == "ready"


def test_a_failed_load_says_so_in_its_output(kernel: Kernel) -> None:
    cell = run(kernel, "%llm load fake:fail_load=1,load_ms=300 --name bad")
    assert cell.ename == "EngineStartupError"
    assert [shown["data"] for shown in cell.displays] == [{"text/plain": "Loading bad failed."}]
    assert states(cell)[-1]["state"] == "failed"


def test_who_draws_no_widgets_gets_lines(kernel: Kernel) -> None:
    cell = kernel.run("%llm load fake:load_ms=100 --name plain")
    assert not cell.of_type("comm_open") and list(cell.displays[0]["data"]) == ["text/plain"]

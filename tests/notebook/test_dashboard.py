"""The dashboard's kernel half: history, rows, the way of a request, and the widget in a real kernel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmkernel.llm.stats import IterationStats, PromptTokenStats
from llmkernel.notebook.widgets.engine_history import EngineHistory
from llmkernel.protocol.stats import PrefixCacheStats, SchedulerStats
from tests.notebook.kernel import Cell, Kernel, running_kernel

WIDGET = "application/vnd.jupyter.widget-view+json"


def test_history_turns_counts_into_rates_over_the_time_between_two_samples() -> None:
    history = EngineHistory(started=100.0)
    history.sample(100.5, memory=1, cpu_seconds=10.0)
    for _ in range(4):
        iteration = IterationStats(num_generation_tokens=5, prompt_token_stats=PromptTokenStats(total=20))
        cache = PrefixCacheStats(requests=1, queries=8, hits=2)
        history.record(
            SchedulerStats(num_running_reqs=3, num_preempted=1, prefix_cache_stats=cache, num_threads=2), iteration
        )
    sample = history.sample(102.5, memory=7, cpu_seconds=13.0)
    assert (sample.time, sample.tokens_out, sample.tokens_in) == (2.5, 10.0, 40.0)
    assert (sample.running, sample.preemptions, sample.hit_rate) == (3, 4, 0.25)
    assert (sample.memory, sample.cpu, sample.threads) == (7, 1.5, 2)
    idle = history.sample(104.5, memory=7, cpu_seconds=13.0)
    assert (idle.tokens_out, idle.tokens_in, idle.cpu, idle.hit_rate) == (0.0, 0.0, 0.0, 0.25)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder: Path = tmp_path_factory.mktemp("dashboard")
    with running_kernel(folder, "%load_ext llmkernel", "%llm load fake:step_ms=5 --name fake") as kernel:
        yield kernel


def dashboard_comm(kernel: Kernel) -> str:
    """Open the dashboard; the id of its comm."""
    return widget_comm(kernel.run_in_page("%llm dashboard"))


def widget_comm(cell: Cell) -> str:
    """The id of the comm of the widget that the cell showed first."""
    shown = next(one for one in cell.of_type("display_data") if WIDGET in one["data"])
    return str(shown["data"][WIDGET]["model_id"])


def say(kernel: Kernel, comm: str, **content: Any) -> str:
    """What the browser's half sends; the id of the message."""
    message = kernel.client.session.msg("comm_msg", {"comm_id": comm, "data": {"method": "custom", "content": content}})
    kernel.client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


def heard(kernel: Kernel, comm: str, kind: str) -> dict[str, Any]:
    """The next message of that kind on the comm."""

    def wanted(message: dict[str, Any]) -> bool:
        content = message["content"]
        is_ours = message["msg_type"] == "comm_msg" and content["comm_id"] == comm
        return is_ours and content["data"].get("content", {}).get("t") == kind

    return dict(kernel.next(wanted)["content"]["data"]["content"])


def test_a_dashboard_tells_samples_rows_and_the_way_of_a_request(kernel: Kernel) -> None:
    asked = kernel.run("%generate --max-tokens 20 -o one hello")
    (told,) = asked.of_type("execute_input")
    comm = dashboard_comm(kernel)
    say(kernel, comm, t="hello")
    everything = heard(kernel, comm, "all")
    assert (everything["model"], everything["engine_state"]) == ("fake", "ready")
    row = everything["rows"][-1]
    assert (row["state"], row["tokens"], row["model"]) == ("done", 20, "fake")
    assert row["cell"] == told["execution_count"]
    kernel.run("%generate --max-tokens 30 -o two hello again")
    say(kernel, comm, t="trace", id=kernel.value("two.rows[0].request_id"))
    way = heard(kernel, comm, "trace")
    names = [hop["name"] for hop in way["hops"]]
    assert names[:5] == ["submitted", "ADD sent", "received", "queued", "scheduled"] and names[-1] == "finished"
    times = [hop["at"] for hop in way["hops"]]
    assert times == sorted(times) and 0 < times[-1] < 10


@pytest.mark.row("A-147")
def test_a_page_tells_when_the_first_text_was_on_its_screen(kernel: Kernel) -> None:
    comm = widget_comm(kernel.run_in_page("%generate --max-tokens 5 -o seen hello"))
    assert "on screen" not in kernel.run("%llm trace").stdout
    say(kernel, comm, t="shown", rows=[0, 7])
    kernel.run("moment = seen.outputs[0].metrics.way.on_screen")
    assert "page    on screen" in kernel.run("%llm trace").stdout
    say(kernel, comm, t="shown", rows=[0])
    kernel.run("later = seen.outputs[0].metrics.way.on_screen")
    assert kernel.value("moment == later > seen.outputs[0].metrics.way.decoded"), "the first page says when"


def test_a_new_request_shows_up_in_a_later_frame(kernel: Kernel) -> None:
    comm = dashboard_comm(kernel)
    kernel.start("%generate --max-tokens 200 -o three hello")
    while True:
        frame = heard(kernel, comm, "stats")
        if any(row["state"] == "decoding" for row in frame["rows"]):
            break
    assert frame["sample"]["memory"] > 0
    while not any(row["state"] == "done" for row in frame["rows"]):
        frame = heard(kernel, comm, "stats")


def test_a_trace_in_text_and_a_dashboard_that_costs_nothing_when_closed(kernel: Kernel) -> None:
    kernel.run("%generate --max-tokens 5 -o four hello")
    text = kernel.run("%llm trace").stdout
    assert "first token" in text and "finished" in text and "ms" in text
    listed = kernel.run("%llm ps").stdout.splitlines()[-1]
    assert f"[{kernel.value('four.cell')}]  fake  done" in listed
    kernel.run("get_ipython().run_line_magic('reload_ext', 'llmkernel')", timeout=60)
    kernel.run("%llm load fake:step_ms=1 --name fake")
    assert kernel.value("len(__import__('llmkernel').Session.current.models['fake'].llm.stat_listeners)") == 0

"""Measures a page full of streams: what travels, how far the screen is behind, how free the kernel's loop stays."""

import itertools
import json
import os
import statistics
import time
from typing import Any

from playwright.sync_api import WebSocket

from tests.browser.notebook_page import NotebookPage

__all__ = ["SAMPLE", "Wire", "figures", "load_cells", "stream_cell", "why_too_busy"]

BUSY = 1.8
"""Load per core above which others are at work too: the browser, the server, kernel and engine take less."""

PROBE = """
import asyncio, json, time
from llmkernel import Session
gaps, grown = [], []
async def watch_loop():
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        gaps.append(time.perf_counter() - before - 0.01)
probe = asyncio.create_task(watch_loop())
"""
WATCH = """
from llmkernel.notebook.generation_row import GenerationRow
take = GenerationRow.take
def timed(row, output):
    take(row, output)
    if row.request_id.partition('.')[2] in ('', '1'):
        grown.append((time.time(), len(row.output.outputs[0].text)))
GenerationRow.take = timed
gaps.clear()
cpu = time.process_time()
"""
SAMPLE = """() => {
  window.samples = []; window.frames = [];
  const look = (now) => {
    window.frames.push(now);
    const text = document.querySelector('.llmk-plain');
    if (text) window.samples.push([(performance.timeOrigin + performance.now()) / 1000, text.firstChild.length]);
    if (window.sampling) requestAnimationFrame(look);
  };
  window.sampling = true;
  requestAnimationFrame(look);
}"""


class Wire:
    """Keeps when comm messages reach the page, and their sizes."""

    def __init__(self, notebook: NotebookPage) -> None:
        self._arrivals: list[tuple[float, int]] = []
        notebook.page.on("websocket", self._watch)

    def _watch(self, socket: WebSocket) -> None:
        socket.on("framereceived", self._count)

    def _count(self, payload: str | bytes) -> None:
        data = payload.encode() if isinstance(payload, str) else payload
        if b'"comm_msg"' in data:
            self._arrivals.append((time.time(), len(data)))

    def between(self, start: float, end: float) -> list[int]:
        """Bytes of each message that came between these times, in seconds since 1970."""
        return [size for when, size in self._arrivals if start <= when <= end]


def p(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def visible_lags(grown: list[list[float]], samples: list[list[float]]) -> list[float]:
    """Seconds from when the kernel had so much text until the page showed it."""
    lags, position = [], 0
    for when, length in grown:
        while position < len(samples) and samples[position][1] < length:
            position += 1
        if position < len(samples):
            lags.append(samples[position][0] - when)
    return lags


def load_cells(streams: int) -> tuple[str, ...]:
    """Cells that load a fake model of 20 tokens a second for so many streams, and the probe."""
    load = (
        f"%llm load fake:step_ms=50,num_blocks={64 * (streams + 8)},verify=0 --name fake --max-num-seqs {streams}"
        " --max-num-batched-tokens 8192\n%llm config raw=on"
    )
    return "%load_ext llmkernel", load, PROBE


def stream_cell(streams: int, tokens: int) -> str:
    """The cell that is measured."""
    return (
        WATCH + f"prompts = [f'question {{n}}' for n in range({streams})]\n"
        f"%generate --background --prompts prompts --max-tokens {tokens}"
    )


def figures(notebook: NotebookPage, wire: Wire) -> dict[str, Any]:
    """What was measured from the first text of `stream_cell` to its last, after SAMPLE."""
    page = notebook.page
    samples = page.evaluate("() => { window.sampling = false; return window.samples; }")
    frames = page.evaluate("() => window.frames")
    told = json.loads(notebook.execute("print(json.dumps([gaps, grown, time.process_time() - cpu]))"))
    lags = visible_lags(told[1], samples)
    start, end = told[1][0][0], told[1][-1][0]
    seconds, sizes = end - start, wire.between(start, end)
    return {
        "seconds": seconds,
        "messages_per_second": len(sizes) / seconds,
        "bytes_per_second": sum(sizes) / seconds,
        "kernel_cpu_share": told[2] / seconds,
        "frames_per_second": 1000 / statistics.mean(b - a for a, b in itertools.pairwise(frames)),
        "visible_lag_p50_ms": p(lags, 0.5) * 1000,
        "visible_lag_p95_ms": p(lags, 0.95) * 1000,
        "loop_lag_p99_ms": p(told[0], 0.99) * 1000,
        "loop_lag_max_ms": max(told[0]) * 1000,
    }


def why_too_busy(notebook: NotebookPage) -> str:
    """What of the machine alone, with nothing of ours running, is beyond what could be promised; "" if nothing is."""
    notebook.page.evaluate(SAMPLE)
    notebook.page.wait_for_timeout(1000)
    frames = notebook.page.evaluate("() => { window.sampling = false; return window.frames; }")
    per_second = 1000 / statistics.mean(b - a for a, b in itertools.pairwise(frames))
    lag = float(notebook.execute("print(sorted(gaps)[int(len(gaps) * 0.99)] * 1000); gaps.clear()"))
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if per_second < 57 or lag > 4 or load > BUSY:
        return (
            f"an idle page makes {per_second:.0f} frames a second, an idle kernel's loop lags {lag:.1f} ms (p99),"
            f" the machine's load is {load:.1f} per core"
        )
    return ""

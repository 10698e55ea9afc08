"""%load_ext, %unload_ext, %reload_ext: what comes in, what goes out again."""

from collections.abc import Iterator

import psutil
import pytest

from tests.notebook.kernel import Kernel, running_kernel

HUNG_IN = (
    "def hung_in():\n    import sys\n    ip = get_ipython()\n"
    "    ours = lambda things: sorted(str(getattr(t, '__qualname__', t)) for t in things"
    " if 'llmkernel' in (getattr(t, '__module__', '') or ''))\n"
    "    callbacks = [c for event in ip.events.callbacks.values() for c in event]\n"
    "    return dict(transformers=ours(ip.input_transformers_post), matchers=ours(ip.Completer.custom_matchers),\n"
    "        events=ours(callbacks), magics=sorted(n for k in ('line', 'cell') for n in ip.magics_manager.magics[k]"
    " if n in ('generate', 'llm')), registry=[n for n in ip.magics_manager.registry if 'LLM' in n])"
)


@pytest.fixture
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(tmp_path_factory.mktemp("extension"), HUNG_IN) as kernel:
        yield kernel


def engines(kernel: Kernel) -> list[psutil.Process]:
    children = psutil.Process(kernel.pid).children(recursive=True)
    return [child for child in children if "llmkernel.engine" in child.cmdline()]


def test_loading_is_light(kernel: Kernel) -> None:
    """Its time is printed by benchmarks/load_ext.py."""
    kernel.run("import sys\nbefore = set(sys.modules)\n%load_ext llmkernel\nnew = set(sys.modules) - before")
    brought = kernel.value("sorted({name.split('.')[0] for name in new})")
    heavy = {"torch", "transformers", "numpy", "tokenizers", "jinja2", "zmq", "ipywidgets", "anywidget", "markdown_it"}
    assert "llmkernel" in brought and not heavy & set(brought)
    kernel.run("%llm load fake: --name fake")
    kernel.run("%generate --max-tokens 3 hi")
    assert not kernel.value("{'torch', 'transformers'} & set(sys.modules)")


def test_loading_twice_puts_nothing_in_twice(kernel: Kernel) -> None:
    assert not any(kernel.value("hung_in()").values())
    kernel.run("%load_ext llmkernel")
    once = kernel.value("hung_in()")
    assert once["magics"] == ["generate", "generate", "llm"] and len(once["transformers"]) == 1
    assert "already loaded" in kernel.run("%load_ext llmkernel").stdout
    assert kernel.value("hung_in()") == once
    for _ in range(3):
        assert kernel.run("%reload_ext llmkernel").status == "ok"
    assert kernel.value("hung_in()") == once
    kernel.run(
        "import sys\nfor name in [n for n in sys.modules if n.split('.')[0] == 'llmkernel']:\n    del sys.modules[name]"
    )
    assert kernel.run("%reload_ext llmkernel").status == "ok"
    assert kernel.value("hung_in()") == once
    kernel.run("%llm load fake:echo=1 --name fake")
    assert kernel.run("%generate --raw hi").answers[0]["data"]["text/plain"] == "hi"


def test_unloading_ends_the_engine_and_leaves_no_trace(kernel: Kernel) -> None:
    clean = kernel.value("hung_in()")
    kernel.run("%load_ext llmkernel\n%llm load fake:step_ms=20 --name fake")
    kernel.run("%generate -b --max-tokens 2000 -o running hi")
    assert len(engines(kernel)) == 1
    cell = kernel.run("%unload_ext llmkernel")
    assert cell.status == "ok" and cell.stdout.startswith("Unloaded fake: ")
    assert kernel.value("hung_in()") == clean and not engines(kernel)
    assert kernel.value("running.state") == "cancelled"
    assert "not found" in kernel.run("%generate hi").evalue
    assert kernel.run("%load_ext llmkernel").status == "ok"
    assert "No model is loaded" in kernel.run("%llm status").stdout


def test_without_a_model_the_default_one_is_loaded_and_said(kernel: Kernel) -> None:
    kernel.run("%load_ext llmkernel\nimport llmkernel.notebook.session as home")
    assert kernel.value("home.DEFAULT_MODEL") == "smollm2"
    kernel.run("home.DEFAULT_MODEL = 'fake:echo=1,load_ms=300'")
    cell = kernel.run("%%generate --raw\nhello")
    load, answer = cell.displays
    told = [content["data"]["text/plain"] for content in cell.of_type("display_data", "update_display_data")]
    assert told[0].startswith("Loading fake:echo=1,load_ms=300, the default model: ")
    assert any(": weights" in text for text in told)
    assert load["data"]["text/plain"].startswith("fake:echo=1,load_ms=300 is ready (")
    assert answer["data"]["text/plain"] == "hello" and "waiting" not in "".join(told)
    assert len(kernel.run("%%generate --raw\nagain").displays) == 1


def test_a_default_load_that_fails_leaves_no_empty_answer(kernel: Kernel) -> None:
    kernel.run("%load_ext llmkernel\nimport llmkernel.notebook.session as home")
    for run in (kernel.run, kernel.run_in_page):
        kernel.run("home.DEFAULT_MODEL = 'fake:fail_load=1,load_ms=600'")
        cell = run("%%generate --raw\nhello")
        assert cell.ename == "EngineStartupError"
        assert [shown["data"]["text/plain"] for shown in cell.displays] == [
            "Loading fake:fail_load=1,load_ms=600 failed."
        ]
        kernel.run("home.DEFAULT_MODEL = 'fake:echo=1,load_ms=300'")
        cell = run("%%generate --raw\nhello")
        load, answer = cell.displays
        assert load["data"]["text/plain"].startswith("fake:echo=1,load_ms=300 is ready (")
        assert answer["data"] == {"text/markdown": "hello", "text/plain": "hello"}
        kernel.run("%llm unload")


def test_shutting_the_kernel_down_ends_the_engine(kernel: Kernel) -> None:
    kernel.run("%load_ext llmkernel\n%llm load fake: --name fake")
    (engine,) = engines(kernel)
    kernel.stop()
    engine.wait(timeout=5)

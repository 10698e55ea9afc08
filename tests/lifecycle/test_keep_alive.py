"""keep_alive: an engine waits for its kernel to come back, and is found by that kernel and by no other one."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from llmkernel import LLM, AsyncLLM, EngineArgs, InvalidRequestError, SamplingParams, Session, cli
from llmkernel.client.running_engines import running_engines, stop_engine
from llmkernel.engine.ownership import ALARM_GRACE
from llmkernel.errors import EngineDeadError
from llmkernel.protocol.control import Attach, EngineStatus
from tests.client.fake_engine import wait_gone
from tests.llm.engines import FAKE, answer
from tests.notebook.kernel import Kernel, running_kernel

GONE = 2.0
"""Seconds after which nothing may be left of an engine that is to end."""

LOAD = "%llm load fake:step_ms=2,max_model_len=4000,num_blocks=3000 --name fake --keep-alive 10m"
READY = "await Session.current.slot('fake').ready()"
ASK = f"assert (await Session.current.generate('x', raw=True, max_tokens=8)).text == {answer('x', 8)!r}"
PID = "Session.current.slot('fake').process.pid"


@pytest.fixture
def base() -> Iterator[Path]:
    """A short folder for the run directories of one test."""
    with TemporaryDirectory(prefix="llmk-test-", dir="/tmp") as folder:
        yield Path(folder)


@contextlib.contextmanager
def kernel_with(base: Path, folder: Path, *cells: str, **environment: str) -> Iterator[Kernel]:
    places = {"XDG_RUNTIME_DIR": str(base), "XDG_STATE_HOME": str(folder)} | environment
    with running_kernel(folder, "%load_ext llmkernel\nfrom llmkernel import Session", *cells, **places) as kernel:
        yield kernel


def status(base: Path) -> EngineStatus:
    """Of the only engine."""
    (engine,) = running_engines(base)
    with engine.control() as control:
        return control.status()


def wait_for(base: Path, reached: Callable[[EngineStatus], bool]) -> EngineStatus:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, EngineDeadError):  # there is none yet
            if reached(found := status(base)):
                return found
        time.sleep(0.01)
    raise AssertionError("It does not come so far.")


def wait_for_nothing(engine: int, base: Path) -> None:
    """Neither the process nor its run directory is left."""
    deadline = time.monotonic() + GONE
    wait_gone(engine, GONE)
    while list(base.glob("llmk-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_kept(found: EngineStatus) -> bool:
    return found.lease_left is not None


def run(kernel: Kernel, *cells: str) -> None:
    for code in cells:
        cell = kernel.run(code)
        assert cell.status == "ok", (code, cell.traceback)


def re_attach(kernel: Kernel) -> float:
    """Load the extension, ask the model of the earlier kernel; seconds until it takes requests."""
    cell = kernel.run(
        "import time; started = time.monotonic()\n%load_ext llmkernel\nfrom llmkernel import Session\n"
        f"{READY}; seconds = time.monotonic() - started"
    )
    assert cell.status == "ok", cell.traceback
    assert "was kept alive" in cell.displays[0]["data"]["text/plain"]
    run(kernel, ASK)
    return float(kernel.value("seconds"))


def kill(kernel: Kernel) -> None:
    kernel.kill()
    kernel.restart()


def restart_now(kernel: Kernel) -> None:
    kernel.restart()


def restart(kernel: Kernel) -> None:
    kernel.restart(now=False)


def test_a_kernel_finds_its_engine_again_however_it_was_restarted(base: Path, tmp_path: Path) -> None:
    with kernel_with(base, tmp_path, LOAD) as kernel:
        engine = kernel.value(PID)
        for way in (kill, restart_now, restart, kill):
            kernel.start("generation = %generate -b --raw -n 4 --max-tokens 3500 hello")
            wait_for(base, lambda found: found.running == 4)
            way(kernel)
            found = wait_for(base, is_kept)
            assert (found.pid, found.keep_alive, found.clients) == (engine, 600.0, [])
            assert found.lease_left is not None and 500 < found.lease_left <= 600
            wait_for(base, lambda found: found.running == 0)  # what the earlier kernel had asked has ended
            assert re_attach(kernel) < 3  # 1 s is promised for a quiet machine, and measured in benchmarks
            assert kernel.value(PID) == engine
            assert status(base).owner_pid == kernel.pid and not is_kept(status(base))
            assert "re-attached, lease 10m" in kernel.run("%llm status").stdout
        cell = kernel.run("%llm load fake: --name other --keep-alive banana")
        assert (cell.ename, len(cell.traceback.splitlines())) == ("InvalidRequestError", 1), cell.traceback
        assert "keep_alive = 'banana' is not a time" in cell.evalue
        run(kernel, "%llm unload")
        wait_for_nothing(engine, base)


def test_a_re_attached_engine_is_as_any_other(base: Path, tmp_path: Path) -> None:
    with kernel_with(base, tmp_path, LOAD) as kernel:
        engine = kernel.value(PID)
        kill(kernel)
        re_attach(kernel)
        cell = kernel.run(
            "%generate --raw --max-tokens 3500 hello", interrupt_when=lambda message: "display" in message["msg_type"]
        )
        assert (cell.ename, kernel.value(PID)) == ("KeyboardInterrupt", engine)
        wait_for(base, lambda found: found.running == 0)
        assert "client 0 is gone" in kernel.run("%llm logs").stdout
        run(
            kernel,
            "import threading\nfrom llmkernel import LLM, SamplingParams",
            "guest = LLM(engine=Session.current.slot().llm)",
        )
        run(
            kernel, f"assert guest.generate('x', SamplingParams(max_tokens=8))[0].outputs[0].text == {answer('x', 8)!r}"
        )
        run(kernel, "%llm restart", ASK)
        wait_gone(engine, GONE)
        again = kernel.value(PID)
        assert "re-attached" not in kernel.run("%llm status").stdout
        kill(kernel)
        re_attach(kernel)
        assert kernel.value(PID) == again
        os.kill(again, signal.SIGKILL)
        cell = kernel.run("await Session.current.generate('x', raw=True, max_tokens=8)")
        assert (cell.ename, cell.seconds < 2) == ("EngineDeadError", True)
        run(kernel, "%llm restart", ASK, "%llm unload")
        assert list(base.glob("llmk-*")) == []


def test_several_models_and_one_that_was_loading(base: Path, tmp_path: Path) -> None:
    with kernel_with(base, tmp_path, LOAD, "%llm load fake: --name other --keep-alive 90 --auto-restart") as kernel:
        kernel.start("%llm load fake:load_ms=1500 --name slow --keep-alive 60")
        while len(running_engines(base)) < 3:
            time.sleep(0.01)
        kill(kernel)
        run(kernel, "%load_ext llmkernel", "from llmkernel import Session", READY)
        assert kernel.value("list(Session.current.models), Session.current.default") == (
            ["fake", "other", "slow"],
            "slow",
        )
        assert kernel.value("Session.current.slot('other').auto_restart") is True
        assert kernel.value("Session.current.slot('slow').args.keep_alive") == "60"
        run(kernel, "%llm load fake:load_ms=1500 --name slow --keep-alive 60")  # the notebook's own cell, run again
        run(kernel, ASK, "%llm unload --all")
        assert list(base.glob("llmk-*")) == []


@pytest.mark.parametrize("way", ["shutdown", "exit", "shutdown under a blocking cell"])
def test_a_kernel_that_ends_for_good_takes_its_engine_along(base: Path, tmp_path: Path, way: str) -> None:
    with kernel_with(base, tmp_path, LOAD) as kernel:
        engine = kernel.value(PID)
        if way == "exit":
            kernel.start("exit")
        else:
            if way != "shutdown":
                kernel.start("import time; print('here', flush=True); time.sleep(60)")
                kernel.next(lambda message: message["msg_type"] == "stream")
            kernel.client.shutdown()
            if way != "shutdown":
                kernel.client.get_control_msg(timeout=10)
                kernel.kill()  # what a server does when the kernel does not end
        wait_for_nothing(engine, base)


@pytest.mark.parametrize("busy", [False, True])
def test_a_lease_ends(base: Path, tmp_path: Path, busy: bool) -> None:
    step = 30_000 if busy else 1
    load = f"%llm load fake:step_ms={step} --keep-alive 1.5 --name fake"
    with kernel_with(base, tmp_path, load) as kernel:
        engine = kernel.value(PID)
        if busy:
            kernel.start("%generate --raw hello")
            wait_for(base, lambda found: found.step_age > 0)
        kernel.kill()
        wait_for(base, is_kept)
        waited = wait_gone(engine, 1.5 + GONE)
        assert waited > 1.0
        wait_for_nothing(engine, base)


@pytest.mark.slow
def test_the_system_ends_an_engine_that_cannot_end_its_lease(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Python code can run in it any more."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    executor = "tests.client.broken_executor:GilHoldingExecutor"
    load = f"await Session.current.load('fake:', name='fake', executor_class='{executor}', keep_alive=3)"
    with kernel_with(base, tmp_path, load, PYTHONPATH=os.getcwd()) as kernel:
        engine = kernel.value(PID)
        with LLM(engine=engine) as guest:
            kernel.kill()
            wait_for(base, is_kept)
            with pytest.raises(EngineDeadError):
                guest.generate("x")
        wait_gone(engine, 3 + ALARM_GRACE + GONE)


def test_ps_shows_the_lease_and_stop_ends_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with kernel_with(base, tmp_path, LOAD) as kernel:
        kernel.kill()
        wait_for(base, is_kept)
        (engine,) = running_engines(base)
        monkeypatch.setattr("llmkernel.protocol.run_directory._candidates", lambda: [base])
        assert cli.main(["ps"]) == 0
        row = capsys.readouterr().out.splitlines()[1]
        assert "kept alive for 9:5" in row and row.endswith("gone")
        assert stop_engine(engine) > 0
        wait_for_nothing(engine.pid, base)
        kernel.restart()
        cell = kernel.run("%load_ext llmkernel\nfrom llmkernel import Session\nassert not Session.current.models")
        assert (cell.status, cell.displays) == ("ok", [])


def test_another_notebook_does_not_find_it_and_nobody_takes_it_from_its_owner(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with kernel_with(base, tmp_path, LOAD) as kernel:
        (engine,) = running_engines(base)
        take = Attach(f"ipc://{engine.run_path}/i000000", f"ipc://{engine.run_path}/o000000", os.getpid(), owner=True)
        with (
            engine.control() as control,
            pytest.raises(InvalidRequestError, match=f"has an owner, process {kernel.pid}"),
        ):
            control.attach(take)
        with LLM(engine=engine.pid) as guest:
            kernel.kill()
            wait_for(base, is_kept)
            with kernel_with(base, tmp_path) as other:
                assert other.value("Session.current.models") == {}
            assert is_kept(status(base))
            params = SamplingParams(max_tokens=8)
            assert guest.generate("x", params)[0].outputs[0].text == answer("x", 8)  # a guest has its place meanwhile
            kernel.restart()
            re_attach(kernel)
            assert guest.generate("x", params)[0].outputs[0].text == answer("x", 8)
            with pytest.raises(EngineDeadError, match="ends with its owner, process"):
                run(kernel, "%llm unload")
                guest.generate("x", params)


def test_an_engine_without_keep_alive_has_no_lease(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with LLM("fake:", executor_class=FAKE, quiet=True):
        (engine,) = running_engines(base)
        take = Attach(f"ipc://{engine.run_path}/i000000", f"ipc://{engine.run_path}/o000000", os.getpid(), owner=True)
        with engine.control() as control:
            for question in (lambda: control.attach(take), lambda: control.keep_alive(60)):
                with pytest.raises(InvalidRequestError, match="not kept alive; it ends with its owner"):
                    question()


def test_an_extension_that_is_loaded_by_the_configuration(base: Path, tmp_path: Path) -> None:
    """Before the kernel's loop turns: the engine is taken up with the first cell."""
    profile = tmp_path / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_config.py").write_text("c = get_config()\nc.InteractiveShellApp.extensions = ['llmkernel']\n")
    with running_kernel(tmp_path, "from llmkernel import Session", LOAD, XDG_RUNTIME_DIR=str(base)) as kernel:
        engine = kernel.value(PID)
        kill(kernel)
        cell = kernel.run(f"from llmkernel import Session\n{READY}")
        assert (cell.status, kernel.value(PID)) == ("ok", engine)
        run(kernel, ASK, "%llm unload")


def test_over_ports_and_on_a_poor_system(base: Path, tmp_path: Path) -> None:
    """Without socket files, pidfds and flock."""
    places = os.pathsep.join([str(Path("tests/client/poor_system").absolute()), os.getcwd()])
    with kernel_with(base, tmp_path, LOAD, LLMKERNEL_TRANSPORT="tcp", PYTHONPATH=places) as kernel:
        assert not kernel.value("hasattr(__import__('os'), 'pidfd_open')")
        engine = kernel.value(PID)
        for way in (kill, restart):
            way(kernel)
            re_attach(kernel)
            assert kernel.value(PID) == engine
        run(kernel, "%llm unload")
        wait_for_nothing(engine, base)


@pytest.mark.parametrize(
    ("time", "said"),
    [
        ("banana", "keep_alive = 'banana' is not a time; write seconds or a unit, for example '10m'."),
        ("-5m", "keep_alive = '-5m' is not a time; write seconds or a unit, for example '10m'."),
        ("0", "keep_alive = '0' must be more than 0 and at most 7d, or left out."),
        ("30d", "keep_alive = '30d' must be more than 0 and at most 7d, or left out."),
    ],
)
def test_a_time_that_is_none(time: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineArgs(keep_alive=time)
    assert str(caught.value) == said


async def test_it_is_refused_where_nobody_would_find_the_engine() -> None:
    starts: list[Callable[[], object]] = [
        lambda: LLM("fake:", keep_alive="10m"),
        lambda: AsyncLLM(EngineArgs(model="fake:", keep_alive=600)),
        lambda: Session().load("fake:", keep_alive="10m"),
    ]
    for start in starts:
        with pytest.raises(InvalidRequestError, match="keep_alive is for %llm load in a Jupyter kernel"):
            start()


@pytest.mark.slow
def test_smollm2_answers_the_kernel_that_comes_back(base: Path, tmp_path: Path) -> None:
    options = "raw=True, max_tokens=8, temperature=0"
    ask = f"print((await Session.current.generate('The capital of France is', {options})).text)"
    with kernel_with(base, tmp_path, "%llm load smollm2 --name fake --keep-alive 10m --max-model-len 512") as kernel:
        engine, said = kernel.value(PID), kernel.run(ask).stdout
        assert "Paris" in said
        for way in (kill, restart):
            way(kernel)
            run(kernel, "%load_ext llmkernel\nfrom llmkernel import Session", READY)
            assert (kernel.value(PID), kernel.run(ask).stdout) == (engine, said)
        memory = psutil.Process(engine).memory_info().rss
        run(kernel, "given_back = await Session.current.unload()")
        assert kernel.value("given_back['fake']") > memory / 2
        wait_gone(engine, GONE)

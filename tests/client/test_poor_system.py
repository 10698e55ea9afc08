"""A system without pidfds, flock, pread, alarms and socket files: the whole way through, engine process included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmkernel.client.attached_process import AttachedProcess
from llmkernel.protocol.private_file import open_private, read_at, write_private
from tests.client.fake_engine import run_directories
from tests.llm.engines import FAKE, answer

SCRIPT = f"""
import os
from llmkernel import LLM, EngineDeadError, SamplingParams
from llmkernel.client.running_engines import stop_engine
assert not hasattr(os, "pidfd_open")
params = SamplingParams(max_tokens=8)
with LLM("fake:", executor_class={FAKE!r}, quiet=True) as llm:
    print(llm.generate("x", params)[0].text)
    with LLM(engine=llm.llm_engine.facts.pid) as guest:
        print(guest.generate("x", params)[0].text)
        stop_engine(llm.llm_engine.running_engine)
        try:
            guest.generate("x", params)
        except EngineDeadError as error:
            print(str(error).partition(" (")[0])
llm = LLM("fake:", executor_class={FAKE!r}, quiet=True)
"""


def test_engines_and_guests_on_a_poor_system(base: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent / "poor_system"), os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": paths, "LLMKERNEL_TRANSPORT": "tcp"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [answer("x", 8), answer("x", 8), "The shared engine has ended"]
    assert run_directories(base) == []


def test_the_end_of_a_process_is_seen_without_a_pidfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr("llmkernel.client.attached_process.POLL_SECONDS", 0.02)
    with subprocess.Popen(["sleep", "60"]) as other:
        watched = AttachedProcess(other.pid, tmp_path / "log")
        assert not watched.wait(0.1)
        other.kill()
        assert watched.wait(5)
        watched.shutdown()


@pytest.mark.parametrize("has_pread", [True, False])
def test_files_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pread: bool) -> None:
    if not has_pread:
        monkeypatch.delattr(os, "pread")
    write_private(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "file", b"")
    descriptor = open_private(tmp_path / "file", os.O_RDWR | os.O_APPEND)
    try:
        assert read_at(descriptor, 3, 4) == b"456"
        assert read_at(descriptor, 30, 8) == b"89"
        os.write(descriptor, b"!")
        assert read_at(descriptor, 30, 8) == b"89!"
    finally:
        os.close(descriptor)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", os.O_RDONLY)

"""Run directories: private, short, alive while locked, swept when dead, never touched when alive."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from llmkernel.protocol.run_directory import RunDirectory, RunDirectoryError, default_base, remove_dead, sweep_dead
from llmkernel.protocol.transport import make_zmq_socket

HOLDER = """
import sys
from llmkernel.protocol.run_directory import RunDirectory
run = RunDirectory(sys.argv[1]) if sys.argv[2] == "make" else RunDirectory.join(sys.argv[1])
print(run.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("b")  # private: pytest makes it with mode 0700


def hold(path: Path, how: str) -> "subprocess.Popen[str]":
    """A process that makes or joins a run directory and holds it until it is killed or its stdin closes."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


def test_a_run_is_private_short_and_gone_when_closed(base: Path) -> None:
    with RunDirectory(base) as run:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert (run.path.parent, len(run.path.name)) == (base, len("llmk-01234567"))
        assert run.address("in0") == f"ipc://{run.path}/in0"
        assert len(str(run.file("12345678"))) < 100
        assert not run.closed
    assert run.closed
    assert list(base.iterdir()) == []
    run.close()


def test_closing_takes_sockets_and_logs_away(base: Path, ctx: zmq.Context) -> None:
    with RunDirectory(base) as run, make_zmq_socket(ctx, run.address("in0"), zmq.ROUTER):
        run.file("log").write_text("words")
        assert stat.S_ISSOCK(run.file("in0").stat().st_mode)
    assert not run.path.exists()


def test_the_mode_does_not_hang_on_the_umask(base: Path) -> None:
    before = os.umask(0o277)
    try:
        with RunDirectory(base) as run:
            assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "UPPER", "toolongname", "a.b", "in0\n"])
def test_names_are_short_and_plain(base: Path, name: str) -> None:
    with RunDirectory(base) as run, pytest.raises(ValueError, match="not a name"):
        run.address(name)


def test_two_runs_have_two_directories(base: Path) -> None:
    with RunDirectory(base) as one, RunDirectory(base) as other:
        assert one.path != other.path


def test_a_base_that_is_a_link_is_refused(base: Path) -> None:
    (base / "real").mkdir(mode=0o700)
    (base / "link").symlink_to(base / "real")
    with pytest.raises(RunDirectoryError, match="link is refused"):
        RunDirectory(base / "link")


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770, 0o500])
def test_a_base_of_another_mode_is_refused(base: Path, mode: int) -> None:
    folder = base / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RunDirectoryError, match="not 0700"):
        RunDirectory(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_base_of_another_owner_is_refused(base: Path) -> None:
    folder = base / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(RunDirectoryError, match="another user"):
        RunDirectory(folder)


def test_a_base_that_is_no_folder_is_refused(base: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be used"):
        RunDirectory(base / "nothing")
    (base / "file").touch(mode=0o700)
    with pytest.raises(RunDirectoryError, match="not a folder"):
        RunDirectory(base / "file")


def test_a_base_whose_paths_would_be_too_long_is_refused(base: Path) -> None:
    folder = base / ("x" * 90)
    folder.mkdir(mode=0o700)
    with pytest.raises(RunDirectoryError, match="short enough"):
        RunDirectory(folder)


def test_the_runtime_folder_is_used_when_it_is_private(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    assert default_base() == base
    with RunDirectory() as run:
        assert run.path.parent == base


@pytest.mark.parametrize("flaw", ["open", "long", "missing", "link"])
def test_an_unfit_runtime_folder_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch, flaw: str) -> None:
    folder = base / ("x" * 90 if flaw == "long" else flaw)
    if flaw == "link":
        folder.symlink_to(base)
    elif flaw != "missing":
        folder.mkdir(mode=0o700)
    if flaw == "open":
        folder.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_base() not in (folder, base)


def test_no_fit_folder_at_all_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "missing"))
    monkeypatch.setattr("llmkernel.protocol.run_directory._check_base", refuse)
    with pytest.raises(RunDirectoryError, match="set XDG_RUNTIME_DIR"):
        default_base()


def refuse(folder: Path, *, for_sockets: bool) -> None:
    raise RunDirectoryError(f"{folder} is refused.")


def test_dead_runs_are_swept_and_live_ones_never_touched(base: Path) -> None:
    dying, living = hold(base, "make"), hold(base, "make")
    dead, alive = Path(first_line(dying)), Path(first_line(living))
    (dead / "in0").touch()
    with RunDirectory(base) as own:
        assert sweep_dead(base) == []
        kill(dying)
        assert sweep_dead(base) == [dead]
        assert (dead.exists(), alive.exists(), own.path.exists()) == (False, True, True)
        assert remove_dead(alive) is False
        kill(living)
        assert remove_dead(alive) is True
    assert list(base.iterdir()) == []


def test_a_run_lives_while_anybody_holds_it(base: Path) -> None:
    maker = hold(base, "make")
    path = Path(first_line(maker))
    joiner = RunDirectory.join(path)
    kill(maker)
    assert sweep_dead(base) == []
    joiner.close()
    assert not path.exists()


def test_one_that_joined_does_not_take_the_run_from_its_maker(base: Path) -> None:
    with RunDirectory(base) as run:
        joiner = hold(run.path, "join")
        assert first_line(joiner) == str(run.path)
        joiner.communicate("", timeout=10)
        with RunDirectory.join(run.path):
            pass
        assert run.path.exists()


def test_a_dead_or_foreign_directory_cannot_be_joined(base: Path) -> None:
    with RunDirectory(base) as run:
        link = base / "llmk-00000000"
        link.symlink_to(run.path)
        with pytest.raises(RunDirectoryError, match="link"):
            RunDirectory.join(link)
        run.path.chmod(0o755)
        with pytest.raises(RunDirectoryError, match="0755"):
            RunDirectory.join(run.path)
        run.path.chmod(0o700)
    with pytest.raises(FileNotFoundError):
        RunDirectory.join(run.path)


def test_the_sweep_leaves_alone_what_is_not_a_dead_run_of_ours(base: Path) -> None:
    with RunDirectory(base) as run:
        (base / "llmk-11111111").symlink_to(run.path)
        (base / "llmk-22222222").touch()
        (base / "llmk-33333333").mkdir(mode=0o755)
        (base / "llmk-other").mkdir(mode=0o700)
        (base / "llmk-44444444.new").mkdir(mode=0o700)  # a start that is under way
        before = sorted(base.iterdir())
        assert sweep_dead(base) == []
        assert sorted(base.iterdir()) == before


def test_the_rest_of_a_start_or_of_an_end_is_swept(base: Path) -> None:
    started, ended = base / "llmk-44444444.new", base / "llmk-55555555"
    for folder in (started, ended):
        folder.mkdir(mode=0o700)
    os.utime(started, (0, 0))
    assert sweep_dead(base) == [started, ended]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_removes_nor_holds_the_run(base: Path) -> None:
    run = RunDirectory(base)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        run.close()
        os.write(ready[1], b"1" if run.path.exists() else b"0")
        os.read(go[0], 1)
        os._exit(0)
    assert os.read(ready[0], 1) == b"1"
    run.close()
    run.path.mkdir(mode=0o700)
    assert sweep_dead(base) == [run.path]
    os.write(go[1], b"1")
    os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_outlives_its_parent_does_not_keep_the_run_alive(base: Path) -> None:
    script = """
import os, sys
from llmkernel.protocol.run_directory import RunDirectory
run = RunDirectory(sys.argv[1])
if os.fork() == 0:
    print(run.path, flush=True)
    sys.stdin.read()
    os._exit(0)
os._exit(0)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path = Path(first_line(parent))
    parent.wait(10)
    assert sweep_dead(base) == [path]
    parent.communicate("", timeout=10)

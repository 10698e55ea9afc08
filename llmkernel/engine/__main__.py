"""The engine process: `python -P -m llmkernel.engine --handshake ADDRESS --run-dir PATH --parent-pid PID ...`.

Started by llmkernel.client.process only. What ends this process (parent_watch, departure) stands before anything that
takes time is imported.
"""

import argparse
import faulthandler
import logging
import os
import sys

from llmkernel.engine.departure import Departure
from llmkernel.engine.log_file import trim_log
from llmkernel.engine.owner_process import OwnerProcess
from llmkernel.engine.parent_watch import ParentWatch

SWITCH_INTERVAL = 5e-5
"""Seconds after which the I/O threads hand the GIL back to the busy loop (cpu.md section 6)."""

KEY_SIZE = 80
"""Bytes of a CurveKey, which is not imported before the guards stand."""


def main(argv: list[str] | None = None) -> None:
    options = _parse(argv)
    sys.setswitchinterval(SWITCH_INTERVAL)
    faulthandler.enable()
    key = _read_key() if options.key_on_stdin else b""
    owner = OwnerProcess(options.parent_pid) if options.keep_alive is None else None
    departure = Departure(owner, options.run_dir)
    departure.install_signals()
    watch = ParentWatch(owner, on_gone=departure.owner_is_gone, on_quit=departure.request, each_poll=trim_log)
    watch.start(death_signal=options.death_signal)
    _configure_logging()
    code = 1
    try:
        code = _serve(options, departure, key)
    except SystemExit as left:  # SIGTERM while loading
        code = left.code if isinstance(left.code, int) else 0
    except Exception:  # the last word of this process goes to its log, then the exit code says the rest
        logging.getLogger("llmkernel.engine").exception("The engine died.")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        departure.exit(code)


def _serve(options: argparse.Namespace, departure: Departure, key_text: bytes) -> int:
    from llmkernel.protocol.curve_key import CurveKey  # not before the guards stand
    from llmkernel.protocol.private_file import write_private
    from llmkernel.protocol.run_directory import RunDirectory

    key = CurveKey.parse(key_text) if key_text else None
    run = RunDirectory.join(options.run_dir, "ipc" if key is None else "tcp")
    departure.on_exit(run.close)
    from llmkernel.engine.control_door import EngineDoor
    from llmkernel.engine.control_server import ControlServer
    from llmkernel.engine.ownership import Ownership

    ownership = Ownership(options.parent_pid, options.keep_alive)
    door = EngineDoor(run, ownership, departure)
    control = ControlServer(run.address("ctl"), door, ownership, key)
    control.start()  # before anything heavy is imported: it works while we load
    if key is not None:
        write_private(run.file("ctladdr"), control.address.encode())
    from llmkernel.engine.startup import run_engine

    return run_engine(options.handshake, options.engine_index, run, departure, door, key)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llmkernel.engine", description=__doc__)
    parser.add_argument("--handshake", required=True, help="address of the owner's handshake socket")
    parser.add_argument("--run-dir", required=True, help="run directory to hold")
    parser.add_argument("--parent-pid", type=int, required=True, help="pid of the owner")
    parser.add_argument("--engine-index", type=int, default=0)
    parser.add_argument("--keep-alive", type=float, help="seconds to stay when the owner is gone")
    parser.add_argument("--death-signal", action="store_true", help="the owner's main thread started us")
    parser.add_argument("--key-on-stdin", action="store_true", help="the key of the run comes first on stdin")
    return parser.parse_args(argv)


def _read_key() -> bytes:
    """What the owner writes first, never shown in argv or the environment; shorter if it is gone already."""
    found = b""
    while len(found) < KEY_SIZE and (more := os.read(sys.stdin.fileno(), KEY_SIZE - len(found))):
        found += more
    return found


def _configure_logging() -> None:
    """Everything goes to stderr, which is the log file."""
    level = os.environ.get("LLMKERNEL_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.getLevelNamesMapping().get(level, logging.INFO),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


if __name__ == "__main__":
    main()

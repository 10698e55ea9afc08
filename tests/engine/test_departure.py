"""Departure: two guards that see the owner go at the same moment clean up once, and wholly."""

import subprocess
import sys

TWO_GUARDS = """
import os, threading, time
from llmkernel.engine.departure import Departure

departure, begun = Departure(os.getppid()), threading.Event()

def clean_up():
    begun.set()
    time.sleep(0.3)  # a slow disk
    os.write(1, b"clean")

departure.on_exit(clean_up)
threading.Thread(target=departure.exit, args=(0,)).start()
begun.wait()
departure.exit(0)
"""


def test_the_second_guard_waits_for_the_first_ones_clean_up() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_GUARDS], capture_output=True, timeout=30, check=True)
    assert done.stdout == b"clean"

"""What usually helps: from the way an engine failed to one sentence that says what to change."""

import re
import signal
import sys

__all__ = ["describe_exit", "hint_for"]

_OUT_OF_MEMORY = "Memory ran out: use a smaller model, a smaller kv_cache_memory, or free memory of other programs."

_HINTS: tuple[tuple[str, str], ...] = (
    (r"\bNo module named '?llmkernel\b", "Install llmkernel in {python}, the Python that runs this kernel."),
    (r"\bNo module named '?([\w.]+)", "Install what is missing: {python} -m pip install {group}."),
    (
        r"GatedRepo|gated repo|\b401\b|\b403\b|Unauthorized",
        "Accept the licence on the model's page and set HF_TOKEN.",
    ),
    (
        r"RepositoryNotFound|\b404\b|is not a local folder",
        "Check the model's name: an id, a folder or a .gguf file.",
    ),
    (
        r"OfflineMode|LocalEntryNotFound|Name or service not known|Temporary failure in name resolution|"
        r"Network is unreachable|Connection refused|ConnectionError|MaxRetryError",
        "There is no way to the Hugging Face Hub: load a local folder or .gguf file, or check the network.",
    ),
    (r"No space left on device|Errno 28", "The disk is full: free some space, or set HF_HOME to another disk."),
    (
        r"HeaderTooLarge|deserializing header|InvalidHeader|incomplete metadata",
        "A weight file is damaged: fetch it again.",
    ),
    (
        r"does not recognize this architecture|model type `",
        "Upgrade it: {python} -m pip install -U transformers.",
    ),
    (r"trust_remote_code", "Set trust_remote_code=True if you trust the authors of the model with your machine."),
    (r"MemoryError|[Oo]ut of memory|bad_alloc|Cannot allocate memory|not enough memory", _OUT_OF_MEMORY),
    (r"[Pp]ermission denied|Errno 13", "The engine may not read or write a file there: check its permissions."),
)

_SIGNAL_HINTS = {
    "SIGKILL": "The system ends programs this way when memory runs out: use a smaller model or kv_cache_memory.",
    "SIGILL": "This CPU lacks an instruction that the installed torch uses: install another build of torch.",
    "SIGSEGV": "Native code crashed; the log holds the Python stack.",
    "SIGABRT": "Native code gave up; the log holds the reason.",
    "SIGBUS": "A mapped file vanished or memory ran out: check the disk and /dev/shm.",
}


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words: "was killed by SIGKILL", "ended with exit code 1"."""
    if exitcode is None:
        return "ended"
    return f"was killed by {_signal_name(exitcode)}" if exitcode < 0 else f"ended with exit code {exitcode}"


def hint_for(exitcode: int | None, *texts: str) -> str:
    """The hint for the first known cause in `texts` (exception type, message, log), else for the exit; "" if none."""
    for text in texts:
        for pattern, hint in _HINTS:
            found = re.search(pattern, text)
            if found:
                return hint.format(python=sys.executable, group=found.group(1) if found.groups() else "")
    if exitcode is not None and exitcode < 0:
        return _SIGNAL_HINTS.get(_signal_name(exitcode), "")
    return ""


def _signal_name(exitcode: int) -> str:
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"

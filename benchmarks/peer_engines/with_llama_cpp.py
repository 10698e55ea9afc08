"""llama.cpp through llama-cpp-python, one stream: its own token loop, without text."""

import argparse
import os
import time

import llama_cpp
from answers import serve


class LlamaCppEngine:
    """auto: as many threads as cores, llama.cpp's own default; the Python binding's is half of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        threads = len(os.sched_getaffinity(0)) if options.threads == "auto" else int(options.threads)
        self.llama = llama_cpp.Llama(
            options.model, n_ctx=options.max_model_len, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.facts = {
            "version": llama_cpp.__version__,
            "build": llama_cpp.llama_print_system_info().decode().strip(),
            "threads": threads,
        }

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int]]:
        """See answers.PeerEngine."""
        if len(prompts) != 1:
            raise ValueError("this peer is measured with one stream only")
        started = time.perf_counter()
        moments: list[tuple[float, int]] = []
        for _ in self.llama.generate(prompts[0], temp=0.0, repeat_penalty=1.0, reset=True):
            moments.append((time.perf_counter() - started, len(moments) + 1))
            if len(moments) == tokens:
                break
        self.llama.reset()
        return moments


if __name__ == "__main__":
    serve(LlamaCppEngine)

"""A process that shares the engine with the given pid. `guest_script.py PID answer PROMPT` or `... hold PROMPT`."""

import sys

from llmkernel.llm.llm import LLM
from llmkernel.protocol.sampling_params import SamplingParams

if __name__ == "__main__":
    pid, verb, prompt = sys.argv[1:]
    with LLM(engine=int(pid)) as llm:
        if verb == "answer":
            print(llm.generate(prompt, SamplingParams(max_tokens=10))[0].text)
        else:
            for number, _ in enumerate(llm.stream(prompt, SamplingParams(max_tokens=3900))):
                if number == 0:
                    print("begun", flush=True)

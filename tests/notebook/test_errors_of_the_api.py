"""A mistake in Python in a cell: the message and the line of the cell, no traceback through our code."""

from pathlib import Path

from tests.notebook.kernel import running_kernel

IMPORTS = "from llmkernel import LLM, AsyncLLM, EngineArgs, SamplingParams"
FAKE = "executor_class='llmkernel.engine.fake_executor:FakeExecutor'"
STREAM = f"""async with AsyncLLM(EngineArgs(model="fake:"), {FAKE}) as llm:
    async for output in llm.generate({{"prompt_token_ids": [99999]}}, SamplingParams(max_tokens=3)):
        pass
"""
CASES = [
    ("x = 1\nSamplingParams(max_tokens=0)", "max_tokens = 0 must be", "line 2: SamplingParams(max_tokens=0)"),
    ("LLM('smolm2')", "did you mean 'smollm2'?", "line 1: LLM('smolm2')"),
    ("LLM('fake:', max_num_sqs=3)", "did you mean 'max_num_seqs'?", "line 1: LLM('fake:', max_num_sqs=3)"),
    (STREAM, "ids of this model go from 0 to 511", "line 2: async for output in llm.generate("),
    ("import mine\nmine.ask()", "temperature = 9 must be", "mine.py, line 4: return SamplingParams(temperature=9)"),
]


def test_the_message_and_the_line_of_the_cell(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{IMPORTS}\n\ndef ask():\n    return SamplingParams(temperature=9)\n")
    with running_kernel(tmp_path, IMPORTS) as kernel:
        for code, words, place in CASES:
            cell = kernel.run(code)
            assert cell.status == "error" and words in cell.evalue
            message, where = cell.traceback.split("\n")
            assert message == f"{cell.ename}: {cell.evalue}"
            assert where.strip().startswith(place)

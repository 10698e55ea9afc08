"""A notebook with a loaded model takes next to nothing while nobody asks anything."""

import json
import sys

import pytest

from benchmarks.idle import PROMISED, measure


@pytest.mark.parametrize(
    "model", [pytest.param("fake:", marks=pytest.mark.soak), pytest.param("smollm2", marks=pytest.mark.slow)]
)
def test_ten_seconds_of_nothing(model: str) -> None:
    """CPU time, not a duration: other programs on the machine do not add to it."""
    cells = ["%load_ext llmkernel", f"%llm load {model} --name m", "%generate --max-tokens 20 hello"]
    found = measure(cells, 10)
    print(json.dumps({"model": model, **found}), file=sys.stderr)
    assert found["percent"] < PROMISED, found

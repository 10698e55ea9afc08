"""The package's public names: all there, loaded lazily, and without torch."""

import subprocess
import sys

import pytest

import llmkernel

_CODE = """
import sys
import llmkernel
assert not any(name.startswith("llmkernel.") for name in sys.modules), "importing the package loads nothing"
for name in llmkernel.__all__:
    if name not in {"Generation", "Session"}:
        assert getattr(llmkernel, name).__name__ == name, name
import llmkernel.llm.async_llm, llmkernel.llm.llm
heavy = {"torch", "transformers", "IPython", "ipywidgets"} & set(sys.modules)
assert not heavy, heavy
"""


def test_names_are_lazy_and_light() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)


def test_dir_tells_them_and_an_unknown_name_is_an_attribute_error() -> None:
    assert set(llmkernel.__all__) <= set(dir(llmkernel))
    with pytest.raises(AttributeError, match="nonsense"):
        llmkernel.nonsense  # noqa: B018

"""The reference pages name things that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md")) + [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
FOLDERS = [ROOT, *(path for path in (ROOT / "llmkernel").rglob("*") if path.is_dir()), ROOT / "llmkernel"]
ELSEWHERE = ("v1/", "entrypoints/", "config/", "text/")  # paths of vLLM, and media types
REFERENCE = {
    "docs/engine-core.md": ("llmkernel.engine.core", "EngineCore"),
    "docs/engine-core-proc.md": ("llmkernel.engine.core_proc", "EngineCoreProc"),
    "docs/clients.md": ("llmkernel.client.inproc_client", "InprocClient"),
}


def code(page: Path) -> list[str]:
    """What stands between backticks, outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.row("A-146")
@pytest.mark.parametrize("name", REFERENCE)
def test_each_system_has_its_page(name: str) -> None:
    module, cls = REFERENCE[name]
    assert (ROOT / name).read_text().startswith("# ")
    methods = vars(getattr(importlib.import_module(module), cls))
    named = set(re.findall(r"`(\w+)\(", (ROOT / name).read_text()))
    assert named & set(methods) or cls in (ROOT / name).read_text()


@pytest.mark.row("A-146")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for path in code(page):
        if re.fullmatch(r"[\w.-]+/[\w./-]*|[\w-]+\.(py|md|toml|ts|ipynb)", path) and not path.startswith(ELSEWHERE):
            assert any((folder / path).exists() for folder in FOLDERS), f"{page.name} names {path}, which is not there"

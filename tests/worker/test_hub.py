"""Models by Hub id: fetched with progress, from the cache when offline, each refusal in one line."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_loader import load_model
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
from llmkernel.errors import EngineStartupError, InvalidRequestError, LLMKernelError
from tests.worker.conftest import Reports
from tests.worker.fake_hub import FakeHub, Repository
from tests.worker.tiny_gguf import families, random_model, write_gguf

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small model as repositories have it: safetensors and pickled weights, other formats, a tokenizer, a README."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny = families()["qwen2"]
    model = random_model(tiny)
    model.save_pretrained(folder)
    write_gguf(folder / "tiny.gguf", tiny, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMKERNEL_CACHE", str(folder / "cache"))
        converted = resolve_model(EngineArgs(model=str(folder / "tiny.gguf")), lambda *_: None).folder
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".gguf"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = (converted / name).read_bytes()
    extra = {"README.md": b"# tiny", "pytorch_model.bin": b"pickle", "model.py": b"raise SystemExit", "LICENSE": b""}
    extra |= {"onnx/model.onnx": b"onnx", "model.fp16.safetensors": b"half", "consolidated.safetensors": b"other"}
    return files | extra


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny = families()["llama"]
    write_gguf(path, tiny, random_model(tiny))
    return path.read_bytes()


@pytest.fixture
def hub(tiny_files: dict[str, bytes], gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repositories = {
        "org/tiny": Repository(tiny_files, revisions=("main", "v2")),
        "org/gated": Repository(tiny_files, gated=True),
        "org/closed": Repository({}, status=403),
        "org/broken": Repository({}, status=503),
        "org/pickled": Repository({"config.json": b"{}", "pytorch_model.bin": b"pickle"}),
        "org/dataset": Repository({"README.md": b"", "data.csv": b""}),
        "org/one-gguf": Repository({"README.md": b"", "tiny.gguf": gguf_bytes}),
        "org/many-gguf": Repository({"tiny-Q4_0.gguf": gguf_bytes, "tiny-Q8_0.gguf": b"GGUF"}),
    }
    with FakeHub(repositories) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def _refused(model: str, **options: object) -> str:
    with pytest.raises(LLMKernelError) as caught:
        resolve_model(EngineArgs.from_options(model, **options), Reports())
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_a_hub_id_is_fetched_with_progress_in_bytes(
    hub: FakeHub, tiny_files: dict[str, bytes], reports: Reports
) -> None:
    files = resolve_model(EngineArgs(model="org/tiny"), reports)
    assert files.source == f"org/tiny@{'1' * 12}"
    assert set(hub.fetched) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    total = sum(len(tiny_files[name]) for name in set(hub.fetched))
    assert reports.stages == ["download"]
    assert {report[2] for report in reports} == {total}
    assert all(0 <= report[1] <= total for report in reports)
    assert reports[-1][1] == total
    args = EngineArgs(model="org/tiny", dtype="float32", device="cpu")
    assert load_model(files, args, reports, attn_implementation="eager").num_parameters > 1000
    assert read_tokenizer_facts(files, args).chat_template


def test_progress_is_told_while_a_large_file_comes_in(hub: FakeHub) -> None:
    half = threading.Event()
    files = {"config.json": b"{}", "model.safetensors": bytes(24 * 2**20)}
    hub.repositories["org/large"] = Repository(files, half=half)
    caller = threading.current_thread()
    seen = []

    def report(stage: str, done: int, total: int, detail: str) -> None:
        assert threading.current_thread() is caller
        seen.append(done)
        if 0 < done < total:
            half.set()

    resolve_model(EngineArgs(model="org/large"), report)
    assert half.is_set()
    assert seen == sorted(seen)
    assert seen[-1] == 24 * 2**20 + 2


def test_what_is_cached_is_not_fetched_again(hub: FakeHub, reports: Reports) -> None:
    first = resolve_model(EngineArgs(model="org/tiny"), reports)
    before = len(hub.fetched)
    again = Reports()
    assert resolve_model(EngineArgs(model="org/tiny"), again).folder == first.folder
    assert len(hub.fetched) == before
    assert again == []


def test_a_revision_is_a_part_of_the_source(hub: FakeHub) -> None:
    assert resolve_model(EngineArgs(model="org/tiny", revision="v2"), Reports()).source == "org/tiny@v2"


def test_an_unknown_revision_is_refused(hub: FakeHub) -> None:
    assert "org/tiny has no revision 'v9'; leave revision out" in _refused("org/tiny", revision="v9")


def test_a_missing_repository_is_refused(hub: FakeHub) -> None:
    message = _refused("org/nothing")
    assert f"There is no model 'org/nothing' at {hub.endpoint}; check the name" in message
    with pytest.raises(InvalidRequestError):
        resolve_model(EngineArgs(model="org/nothing"), Reports())


def test_a_gated_repository_says_how_to_get_in(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    message = _refused("org/gated")
    assert f"org/gated is gated: accept its terms at {hub.endpoint}/org/gated, then log in" in message
    assert "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert resolve_model(EngineArgs(model="org/gated"), Reports()).folder.is_dir()


def test_a_repository_that_refuses_us_is_told(hub: FakeHub) -> None:
    assert "refuses org/closed (HTTP 403); check the token" in _refused("org/closed")


def test_a_hub_in_trouble_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    assert "answered HTTP 503; check the network" in _refused("org/broken")


def test_a_hub_that_cannot_be_reached_is_told(hub: FakeHub) -> None:
    hub.stop()
    message = _refused("org/tiny")
    assert "org/tiny is not in the local Hugging Face cache" in message
    assert f"{hub.endpoint} cannot be reached (ConnectError)" in message


def test_a_cached_model_loads_when_the_hub_cannot_be_reached(hub: FakeHub) -> None:
    first = resolve_model(EngineArgs(model="org/tiny"), Reports())
    hub.stop()
    assert resolve_model(EngineArgs(model="org/tiny"), Reports()).folder == first.folder


def test_half_a_snapshot_is_not_taken_for_a_model(hub: FakeHub) -> None:
    folder = resolve_model(EngineArgs(model="org/tiny"), Reports()).folder
    (folder / "model.safetensors").unlink()
    hub.stop()
    assert "is not in the local Hugging Face cache" in _refused("org/tiny")


def test_offline_mode_asks_nothing_and_says_so(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; unset it" in _refused("org/tiny")
    assert hub.requests == []


def test_pickled_weights_are_refused_before_they_are_fetched(hub: FakeHub) -> None:
    assert "only pickled weights" in _refused("org/pickled")
    assert hub.fetched == []


def test_a_repository_without_a_model_is_refused(hub: FakeHub) -> None:
    assert "no config.json" in _refused("org/dataset")


def test_a_repository_of_one_gguf_file_is_that_file(hub: FakeHub, reports: Reports) -> None:
    files = resolve_model(EngineArgs(model="org/one-gguf"), reports)
    assert reports.stages == ["download", "convert"]
    assert hub.fetched == ["tiny.gguf"]
    assert files.gguf is not None
    assert files.gguf.name == "tiny.gguf"
    hub.stop()
    assert resolve_model(EngineArgs(model="org/one-gguf"), Reports()).folder == files.folder


def test_of_several_gguf_files_one_is_named(hub: FakeHub) -> None:
    message = _refused("org/many-gguf")
    assert "org/many-gguf/FILE.gguf: tiny-Q4_0.gguf, tiny-Q8_0.gguf" in message
    files = resolve_model(EngineArgs(model="org/many-gguf/tiny-Q4_0.gguf"), Reports())
    assert files.source == f"org/many-gguf@{'1' * 12}/tiny-Q4_0.gguf"
    assert hub.fetched == ["tiny-Q4_0.gguf"]
    assert "has no file tiny-Q5_0.gguf; its GGUF files: tiny-Q4_0.gguf" in _refused("org/many-gguf/tiny-Q5_0.gguf")


def test_too_little_space_is_noticed_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30 - 1024, 1024))
    message = _refused("org/tiny")
    assert "Not enough disk space for org/tiny" in message
    assert "needed, 1.0 KiB free; free some, or set HF_HOME" in message
    assert hub.fetched == []


def test_a_disk_that_fills_up_during_the_download_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    message = _refused("org/tiny")
    assert "Not enough disk space for org/tiny" in message
    assert " 0 B needed" not in message


def test_a_tokenizer_from_another_repository(hub: FakeHub, smollm2_files: ModelFiles) -> None:
    facts = read_tokenizer_facts(smollm2_files, EngineArgs(tokenizer="org/tiny"))
    assert facts.path is not None
    assert Path(facts.path).name == "tokenizer.json"
    assert constants.HF_HUB_CACHE in facts.path
    assert "model.safetensors" not in hub.fetched
    with pytest.raises(LLMKernelError, match="There is no model 'org/no'"):
        read_tokenizer_facts(smollm2_files, EngineArgs(tokenizer="org/no"))
    with pytest.raises(EngineStartupError, match=r"has no tokenizer"):
        read_tokenizer_facts(smollm2_files, EngineArgs(tokenizer="org/dataset"))


def test_the_environment_of_a_fresh_process_is_honoured(hub: FakeHub, tmp_path: Path) -> None:
    code = """
import sys
import threading
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_source import resolve_model
try:
    print(resolve_model(EngineArgs(model="org/tiny"), lambda *_: None).folder)
except Exception as error:
    print(error)
"""
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}

    def run(**extra: str) -> str:
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | extra, timeout=60
        )
        return child.stdout.strip()

    assert "HF_HUB_OFFLINE is set" in run(HF_HUB_OFFLINE="1")
    online = run()
    assert online.startswith(str(tmp_path / "home"))
    assert run(HF_HUB_OFFLINE="1") == online

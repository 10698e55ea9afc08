"""GGUF files: decoded exactly, in transformers' layout; broken and foreign ones are refused with one line."""

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.gguf_reader import GGUFFile
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_loader import load_model
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
from llmkernel.errors import EngineStartupError
from tests.worker.conftest import Reports
from tests.worker.tiny_gguf import TEMPLATE, Tiny, add_metadata, add_vocabulary, families, random_model, write_gguf

pytestmark = pytest.mark.usefixtures("own_cache")


def _ids(tiny: Tiny) -> torch.Tensor:
    return torch.randint(0, tiny.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))


def _resolve(path: Path) -> ModelFiles:
    return resolve_model(EngineArgs(model=str(path)), lambda *_: None)


def _load(path: Path) -> torch.nn.Module:
    args = EngineArgs(model=str(path), dtype="float32", device="cpu")
    return load_model(_resolve(path), args, lambda *_: None, attn_implementation="eager").model


def _one_line(error: BaseException, *parts: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert message.endswith(".")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", families())
def test_a_family_gives_the_logits_of_its_transformers_model(name: str, tmp_path: Path) -> None:
    tiny = families()[name]
    model = random_model(tiny)
    write_gguf(tmp_path / "tiny.gguf", tiny, model)
    ids = _ids(tiny)
    with torch.inference_mode():
        expected, found = model(ids).logits, _load(tmp_path / "tiny.gguf")(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_every_weight_is_the_reference_decoding_of_its_blocks(kind: Type, tmp_path: Path) -> None:
    tiny = families()["qwen2"]
    model = random_model(tiny)
    write_gguf(tmp_path / "tiny.gguf", tiny, model, kind)
    files = _resolve(tmp_path / "tiny.gguf")
    assert files.quantization == kind.name
    assert bool(files.notes) == kind.name.startswith("Q")
    weights = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
    with safe_open(files.folder / "model.safetensors", "np") as stored:
        assert np.array_equal(stored.get_tensor("model.layers.1.mlp.up_proj.weight"), expected)


def test_the_default_model_is_decoded_exactly(smollm2_files: ModelFiles) -> None:
    """Against the gguf package's own reader: every tensor; queries and keys with transformers' order of rows."""
    assert smollm2_files.gguf is not None
    reader = gguf.GGUFReader(smollm2_files.gguf)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    originals = {tensor.name: tensor for tensor in reader.tensors}
    seen = set()
    with safe_open(smollm2_files.folder / "model.safetensors", "np") as stored:
        for name in stored.keys():  # noqa: SIM118 - not a dict
            source = f"{names.get_name(name.removesuffix('.weight'))}.weight"
            expected = gguf.quants.dequantize(originals[source].data, originals[source].tensor_type)
            if "attn_q" in source or "attn_k" in source:
                heads = 9 if "attn_q" in source else 3
                expected = np.concatenate(
                    [head.reshape(32, 2, 576).transpose(1, 0, 2).reshape(64, 576) for head in np.split(expected, heads)]
                )
            assert np.array_equal(stored.get_tensor(name), expected), name
            seen.add(source)
    assert seen == set(originals)


def test_the_converted_folder_opens_in_transformers(smollm2_files: ModelFiles) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_files.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_files.folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=7, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert model.generation_config.eos_token_id == 2


_PIECES = ["Hello", " world", "  two", "\n\n", "\t", "don't", "naïve", "日本語", "🙂", "👩‍👩‍👧", "x=1", "42", " 3.14"]
_PIECES += [
    "<|im_start|>",
    "<|im_end|>user",
    "http://a.b/c?d=e",
    "ÅÄÖ",
    "e\u0301",
    "\u00a0",
    "\r\n",
    "ＡＢ",
    "²",
    "#!/bin/sh",
]


def test_the_default_tokenizer_is_transformers_own(smollm2_files: ModelFiles) -> None:
    """Equal to AutoTokenizer on the GGUF file, but where transformers misses that SmolLM splits digits off first."""
    assert smollm2_files.gguf is not None
    theirs = AutoTokenizer.from_pretrained(smollm2_files.gguf.parent, gguf_file=smollm2_files.gguf.name)
    facts = read_tokenizer_facts(smollm2_files, EngineArgs())
    assert facts.path is not None
    ours = Tokenizer.from_file(facts.path)
    random = np.random.default_rng(5)
    texts = ["", " ", *_PIECES, *("".join(random.choice(_PIECES, random.integers(1, 12))) for _ in range(400))]
    texts = [text for text in texts if not _spaces_before_a_digit(text)]
    assert len(texts) > 300
    assert [ours.encode(text).ids for text in texts] == [theirs(text)["input_ids"] for text in texts]
    assert ours.encode("a   7").tokens == ["a", "ĠĠĠ", "7"]  # as the original tokenizer; transformers: a ĠĠ Ġ 7
    assert facts.chat_template == theirs.chat_template
    assert (facts.bos_token_id, facts.eos_token_id, facts.pad_token_id) == (1, 2, 2)


def _spaces_before_a_digit(text: str) -> bool:
    return any(
        after.isnumeric() and before.isspace() and two.isspace()
        for two, before, after in zip(text, text[1:], text[2:], strict=False)
    )


@pytest.mark.parametrize("name", ["llama", "llama-2", "qwen2", "gemma2"])
def test_a_family_gives_the_tokenizer_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = families()[name]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    files = _resolve(tmp_path / "tiny.gguf")
    facts = read_tokenizer_facts(files, EngineArgs())
    ours = Tokenizer.from_file(str(facts.path))
    for text in ["the the", "  the", " a", "hello<|im_end|>the", "abc, xyz!", "é🙂", "<bos>the<end_of_turn>"]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    assert facts.chat_template == TEMPLATE
    assert facts.special_tokens["bos_token"] == theirs.bos_token
    ends = json.loads((files.folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == ([1, tiny.config.vocab_size - 1] if tiny.sentencepiece else tiny.config.vocab_size - 1)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = families()["llama"]
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny, random_model(tiny), Type.Q8_0)
    return path


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(share: float, tiny_file: Path, tmp_path: Path, own_cache: Path) -> None:
    whole = tiny_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: max(5, int(len(whole) * share))])
    with pytest.raises(EngineStartupError) as caught:
        _resolve(path)
    _one_line(caught.value, str(path), "truncated", "again")
    assert not own_cache.exists()


def test_every_cut_of_the_header_is_refused(tiny_file: Path, tmp_path: Path) -> None:
    whole = tiny_file.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 2000, 7), *range(2000, 20_000, 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(EngineStartupError, match="truncated"):
            GGUFFile(path)


def test_a_file_with_damaged_bytes_never_crashes_the_reader(tiny_file: Path, tmp_path: Path) -> None:
    whole = bytearray(tiny_file.read_bytes())
    random = np.random.default_rng(11)
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        damaged = bytearray(whole)
        for at in random.integers(4, 9000, 3):
            damaged[at] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            GGUFFile(path).close()
        except EngineStartupError as error:
            assert "\n" not in str(error)  # it may be harmless, or refused; nothing else


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"PK\x03\x04 this is a zip", "not a GGUF file"),
        (b"", "not a GGUF file"),
        (b"<!DOCTYPE html><html>404</html>", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64), "no tensor"),
    ],
)
def test_a_foreign_file_is_refused(content: bytes, part: str, tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineStartupError) as caught:
        _resolve(path)
    _one_line(caught.value, str(path), part)
    assert not own_cache.exists()


def _header_only(path: Path, architecture: str, extra: dict[str, int] | None = None) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["phi3", "mamba", "clip", "gemma4"])
def test_an_unsupported_architecture_is_refused_by_name(architecture: str, tmp_path: Path, own_cache: Path) -> None:
    _header_only(tmp_path / "other.gguf", architecture)
    with pytest.raises(EngineStartupError) as caught:
        _resolve(tmp_path / "other.gguf")
    _one_line(caught.value, architecture, "llama, qwen2, qwen3, gemma, gemma2, gemma3", "safetensors")
    assert not own_cache.exists()


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EngineStartupError, match="one of 3 parts; merge them"):
        _resolve(path)


def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    _header_only(tmp_path / "moe.gguf", "llama", {"llama.expert_count": 8})
    with pytest.raises(EngineStartupError, match="mixtures of experts"):
        _resolve(tmp_path / "moe.gguf")


def test_a_header_without_a_size_is_refused_by_its_key(tmp_path: Path) -> None:
    _header_only(tmp_path / "bare.gguf", "llama")
    with pytest.raises(EngineStartupError, match=r"lacks llama\.attention\.head_count"):
        _resolve(tmp_path / "bare.gguf")


def _patched(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    content = source.read_bytes()
    assert content.count(old) == 1
    target.write_bytes(content.replace(old, new))
    return target


def test_a_tensor_that_the_family_does_not_have_is_refused_by_name(tiny_file: Path, tmp_path: Path) -> None:
    path = _patched(tiny_file, tmp_path / "odd.gguf", b"blk.1.ffn_up.weight", b"blk.1.ffn_sq.weight")
    with pytest.raises(EngineStartupError, match=r"lacks tensor 'blk\.1\.ffn_up\.weight'"):
        _resolve(path)


def test_an_unknown_tensor_type_is_refused_by_number(tiny_file: Path, tmp_path: Path) -> None:
    name = b"blk.1.ffn_up.weight"
    start = name + struct.pack("<IQQ", 2, 64, 96)
    path = _patched(tiny_file, tmp_path / "new.gguf", start + struct.pack("<I", 8), start + struct.pack("<I", 777))
    with pytest.raises(EngineStartupError, match="unknown type 777; upgrade the gguf package"):
        _resolve(path)


def test_a_type_that_cannot_be_decoded_is_refused_and_leaves_nothing(
    tiny_file: Path, tmp_path: Path, own_cache: Path
) -> None:
    start = b"output_norm.weight" + struct.pack("<IQ", 1, 64)
    path = _patched(tiny_file, tmp_path / "odd.gguf", start + struct.pack("<I", 0), start + struct.pack("<I", 26))
    with pytest.raises(EngineStartupError, match="stored as I32, which cannot be decoded"):
        _resolve(path)
    assert not [entry for entry in own_cache.iterdir() if entry.is_dir()]


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny = families()["qwen2"]
    writer = gguf.GGUFWriter(tmp_path / "mute.gguf", tiny.architecture)
    add_metadata(writer, tiny)
    write_gguf(tmp_path / "whole.gguf", tiny, random_model(tiny))
    with GGUFFile(tmp_path / "whole.gguf") as whole:
        for name in whole.tensors:
            writer.add_tensor(name, whole.read(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EngineStartupError, match="holds no tokenizer"):
        _resolve(tmp_path / "mute.gguf")


def test_a_tokenizer_of_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    tiny = families()["llama"]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny))
    path = _patched(
        tmp_path / "tiny.gguf",
        tmp_path / "odd.gguf",
        b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"gpt2",
        b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"rwkv",
    )
    with pytest.raises(EngineStartupError) as caught:
        _resolve(path)
    _one_line(caught.value, "rwkv", "tokenizer=")


def test_a_folder_that_holds_one_gguf_file_is_that_file(tiny_file: Path, tmp_path: Path, reports: Reports) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny_file, folder / "only.gguf")
    files = resolve_model(EngineArgs(model=str(folder)), reports)
    assert files.gguf == folder / "only.gguf"
    assert reports.stages == ["convert"]
    assert reports[-1][1] == reports[-1][2] > 20
    again = Reports()
    assert resolve_model(EngineArgs(model=str(folder / "only.gguf")), again).folder == files.folder
    assert again == []


def test_a_file_that_changed_is_converted_again(tmp_path: Path, own_cache: Path) -> None:
    tiny = families()["llama"]
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, random_model(tiny))
    first = (_resolve(path).folder / "model.safetensors").read_bytes()
    write_gguf(path, tiny, random_model(tiny), Type.Q8_0)
    files = _resolve(path)
    assert (files.folder / "model.safetensors").read_bytes() != first
    assert files.quantization == "Q8_0"
    assert len([entry for entry in own_cache.iterdir() if entry.is_dir()]) == 1


def test_vocabulary_helpers_match_the_models() -> None:
    """The tiny vocabularies and the tiny models agree, else the tests above compare padding."""
    for tiny in families().values():
        writer = gguf.GGUFWriter("unused.gguf", tiny.architecture)
        add_vocabulary(writer, tiny)
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        assert len(tokens) == tiny.config.vocab_size

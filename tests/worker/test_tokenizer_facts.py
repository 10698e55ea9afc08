"""What clients learn of a tokenizer: enough to do as transformers does, without transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from llmkernel.config import EngineArgs
from llmkernel.engine.worker import tokenizer_facts
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
from llmkernel.errors import EngineStartupError, InvalidRequestError, LLMKernelError
from llmkernel.protocol.handshake import TokenizerFacts
from tests.worker.tiny_gguf import BYTE_LEVEL, MERGES, TEMPLATE

pytestmark = pytest.mark.usefixtures("own_cache")

_IDS = {text: index for index, text in enumerate(BYTE_LEVEL)}
_TEXTS = ["", "the the", "a<|im_end|>b", "<|im_start|>user\nhi", " x", "é"]


def _backend(*added: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=_IDS, merges=[tuple(merge.split()) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def _folder(
    path: Path,
    tokenizer: tokenizers.Tokenizer | None,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **texts: str,
) -> Path:
    path.mkdir(exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(model or {"model_type": "llama"}))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    for name, text in texts.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def _read(folder: Path, **options: Any) -> TokenizerFacts:
    return read_tokenizer_facts(ModelFiles("tiny", "tiny", folder), EngineArgs(**options))


def _build(facts: TokenizerFacts) -> tokenizers.Tokenizer:
    assert (facts.json is None) != (facts.path is None)
    text = facts.json if facts.json is not None else Path(str(facts.path)).read_text()
    return tokenizers.Tokenizer.from_str(text)


def _refused(folder: Path, **options: Any) -> str:
    with pytest.raises(LLMKernelError) as caught:
        _read(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"},
        {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "add_bos_token": True},
        {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}},
    ],
)
@pytest.mark.parametrize("starts", [False, True])
def test_plain_prompts_are_encoded_as_transformers_does(config: dict[str, Any], starts: bool, tmp_path: Path) -> None:
    """tokenizer.json alone says whether a start token is added; add_bos_token beside it is for older files."""
    tokenizer = _backend("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    if starts:
        start = [("<|im_start|>", _IDS["<|im_start|>"])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair=None, special_tokens=start
        )
    folder = _folder(tmp_path / "model", tokenizer, config)
    theirs, facts = AutoTokenizer.from_pretrained(folder), _read(folder)
    ours = _build(facts)
    assert [ours.encode(text).ids for text in _TEXTS] == [theirs(text)["input_ids"] for text in _TEXTS]
    assert (ours.encode("a").tokens[0] == "<|im_start|>") is starts
    assert facts.special_tokens["eos_token"] == theirs.eos_token
    assert (facts.bos_token_id, facts.eos_token_id, facts.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert facts.path == str(folder / "tokenizer.json")


def test_special_tokens_that_an_older_file_does_not_mark_are_kept_whole(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _backend(), {"eos_token": "<|im_end|>"})
    assert _build(_read(folder)).encode("a<|im_end|>").tokens == ["a", "<|im_end|>"]


def test_ids_fall_back_to_the_models_configuration(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _backend("<|im_end|>"), model={"eos_token_id": [7, 9], "bos_token_id": 3})
    facts = _read(folder)
    assert (facts.bos_token_id, facts.eos_token_id, facts.pad_token_id) == (3, 7, None)
    (folder / "generation_config.json").write_text('{"eos_token_id": 11}')
    assert _read(folder).eos_token_id == 11


def test_special_tokens_map_is_read_where_the_configuration_is_silent(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _backend("<|im_end|>"), {"eos_token": None})
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert _read(folder).special_tokens == {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TEMPLATE, TEMPLATE),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}], TEMPLATE),
        ([{"name": "rag", "template": TEMPLATE}], TEMPLATE),
        (None, None),
    ],
)
def test_the_chat_template(given: object, expected: str | None, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _backend(), {"chat_template": given})
    assert _read(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("from the file")
    assert _read(folder).chat_template == "from the file"


def test_further_chat_templates_have_names(tmp_path: Path) -> None:
    given = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}]
    folder = _folder(tmp_path / "model", _backend(), {"chat_template": given})
    assert _read(folder).named_chat_templates == {"tool_use": "t"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    assert _read(folder).named_chat_templates == {"tool_use": "t", "rag": "documents"}


def test_another_tokenizer_may_be_given_as_a_folder(tmp_path: Path) -> None:
    mute = _folder(tmp_path / "mute", None, model={"eos_token_id": 5})
    other = _folder(tmp_path / "other", _backend("<|im_end|>"), {"chat_template": "x"})
    facts = _read(mute, tokenizer=str(other))
    assert (facts.path, facts.chat_template, facts.eos_token_id) == (str(other / "tokenizer.json"), "x", 5)
    assert "neither a folder nor a Hub id" in _refused(mute, tokenizer="nothing-here")
    with pytest.raises(InvalidRequestError):
        _read(mute, tokenizer="nothing-here")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "has no tokenizer (tokenizer.json); give one with tokenizer=" in _refused(_folder(tmp_path / "m", None))


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "9"}', ""])
def test_a_broken_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    assert "Cannot read" in _refused(_folder(tmp_path / "m", None, tokenizer__json=text))


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    assert "is not JSON" in _refused(_folder(tmp_path / "m", _backend(), tokenizer_config__json="{"))


def _slow_folder(path: Path, kind: str) -> Path:
    """The files of an older tokenizer: vocab.json and merges.txt."""
    merges = "#version: 0.2\n" + "\n".join(MERGES) + "\n"
    config = {"tokenizer_class": kind, "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    return _folder(path, None, config, {"model_type": "gpt2"}, vocab__json=json.dumps(_IDS), merges__txt=merges)


def test_an_older_tokenizer_is_converted_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _slow_folder(tmp_path / "gpt2", "GPT2Tokenizer")
    theirs, facts = AutoTokenizer.from_pretrained(folder), _read(folder)
    ours = _build(facts)
    assert [ours.encode(text).ids for text in _TEXTS] == [theirs(text)["input_ids"] for text in _TEXTS]
    assert facts.path is not None
    assert Path(facts.path).is_relative_to(own_cache)
    assert facts.chat_template == TEMPLATE
    assert not (folder / "tokenizer.json").exists()
    monkeypatch.setattr(tokenizer_facts, "_backend", lambda *_: pytest.fail("converted twice"))
    assert _read(folder) == facts


def test_an_older_tokenizer_that_changed_is_converted_again(tmp_path: Path) -> None:
    folder = _slow_folder(tmp_path / "gpt2", "GPT2Tokenizer")
    before = _build(_read(folder)).get_vocab_size()
    (folder / "vocab.json").write_text(json.dumps(_IDS | {"zz": len(_IDS)}))
    assert _build(_read(folder)).get_vocab_size() == before + 1


def test_a_tokenizer_without_a_tokenizers_back_end_is_refused_with_that_reason(tmp_path: Path, own_cache: Path) -> None:
    message = _refused(_slow_folder(tmp_path / "ctrl", "CTRLTokenizer"))
    assert "CTRLTokenizer) has no `tokenizers` back end" in message
    assert not [entry for entry in own_cache.iterdir() if entry.is_dir()]


def test_an_older_tokenizer_that_transformers_cannot_read_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", None, {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama"})
    (folder / "tokenizer.model").write_bytes(b"not sentencepiece")
    with pytest.raises(EngineStartupError):
        _read(folder)
    assert "cannot be read by transformers" in _refused(folder)


def test_the_default_models_facts(smollm2_files: ModelFiles, tmp_path: Path) -> None:
    facts = read_tokenizer_facts(smollm2_files, EngineArgs())
    assert facts.path == str(smollm2_files.folder / "tokenizer.json")
    assert facts.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in str(facts.chat_template)
    copy = shutil.copytree(smollm2_files.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    assert read_tokenizer_facts(smollm2_files, EngineArgs(tokenizer=str(copy))).path == str(copy / "tokenizer.json")

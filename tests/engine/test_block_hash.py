import hashlib
import struct

from llmkernel.engine.kv_cache.block_hash import NONE_HASH, BlockHasher
from llmkernel.engine.request import Request
from llmkernel.protocol.sampling_params import SamplingParams


def hashes(prompt: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    hasher = BlockHasher(block_size)
    return Request("r", prompt, SamplingParams(), cache_salt=salt, hash_new_blocks=hasher).block_hashes


def test_a_hash_is_sha256_of_parent_and_tokens() -> None:
    first = hashlib.sha256(NONE_HASH + struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]


def test_only_full_blocks_have_one() -> None:
    assert [len(hashes(list(range(count)))) for count in (1, 3, 4, 5, 7, 8)] == [0, 0, 1, 1, 1, 2]


def test_the_chain_tells_equal_blocks_apart() -> None:
    a, b = hashes([1, 2, 3, 4] * 2)
    assert a != b
    assert hashes([9, 9, 9, 9, 5, 6, 7, 8])[1] != hashes([1, 1, 1, 1, 5, 6, 7, 8])[1]


def test_a_salt_changes_every_block_from_the_first_on() -> None:
    prompt = list(range(12))
    plain, salted, other = hashes(prompt), hashes(prompt, salt="a"), hashes(prompt, salt="b")
    assert len({*plain, *salted, *other}) == 9
    assert hashes(prompt, salt="a") == salted
    assert hashes(prompt, salt="") != plain


def test_the_salt_stands_in_the_first_block_only() -> None:
    first, second = hashes(list(range(8)), salt="secret")
    assert second == hashlib.sha256(first + struct.pack("<4I", 4, 5, 6, 7)).digest()


def test_a_salt_cannot_pass_for_tokens() -> None:
    """Length and tag are part of it: a shorter prompt with a salt never equals a longer one without."""
    block = struct.pack("<4I", 1, 2, 3, 4)
    assert hashes([1, 2, 3, 4], salt="x") != [hashlib.sha256(NONE_HASH + block + b"x").digest()]


def test_hashes_grow_with_the_answer() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(), hash_new_blocks=BlockHasher(4))
    assert request.block_hashes == []
    request.append_output_token(4)
    assert request.block_hashes == hashes([1, 2, 3, 4])
    for token_id in (5, 6, 7, 8):
        request.append_output_token(token_id)
    assert request.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8])

# SPDX-License-Identifier: Apache-2.0
"""The identity of tokens and blocks of a trace, and the bytes that stand for them.

No model runs here, so the bytes of a token's key and value are made up: a cheap seeded function
of (content, position, layer).  The content of a prompt token is the hash id of its 512-token
block, that of a generated token its request.  Equal prefixes therefore hold equal bytes, and
every other row differs, so that a row that landed wrong is seen.

All arithmetic is modulo 2**64; ``mix`` is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014)::

    content(prompt token)    = mix(mix(seed ^ PROMPT) ^ hash id)
    content(generated token) = mix(mix(seed ^ GENERATED) ^ index of the request)
    token                    = mix(content + position * GOLDEN)
    word[w]                  = token ^ mix(mix(seed ^ COLUMN) + (2 * layer + lane) * 2**32 + w)

The words, little-endian, are the row of a lane (0 key, 1 value) of a layer, cut to its length.
A word costs one exclusive-or, so making the bytes is no slower than moving them.  Two rows of a
lane differ by the same word all along; a comparison of whole rows misses nothing by that.

`token_words` and `TokenRows` are the fast form; `expected_row` is the definition, one row at a
time in plain integers, and shares no code with it: the replay writes with one and checks with
the other.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.traces.reader import HASH_BLOCK_TOKENS, TraceRequest

__all__ = ["TokenRows", "block_keys", "content_words", "expected_row", "token_words"]

WORD_BYTES = 8
GOLDEN = 0x9E3779B97F4A7C15
PROMPT = 0x70726F6D7074
GENERATED = 0x67656E6572
COLUMN = 0x636F6C756D6E
MASK = 2**64 - 1

_GENERATED_SEGMENT = -1
SEGMENT = struct.Struct("<qqq")  # what it is of, tokens of it here, tokens that it has in all


def block_keys(
    request: TraceRequest, block_size: int, num_tokens: int, *, first: int = 0, before: bytes = b""
) -> list[bytes]:
    """Names of the blocks that hold the request's first ``num_tokens`` tokens.

    Equal keys mean equal tokens in that block *and in all before it* (a chained hash, 128 bits).
    A block that reaches into the last, partial 512-token block of a prompt is equal only to one
    of a prompt that ends at the same length.  A partial last block is named by what it holds.
    first, before: start at this block, the one before it having the key ``before``.
    """
    keys: list[bytes] = []
    length, ids, pack = request.input_length, request.hash_ids, SEGMENT.pack
    for start in range(first * block_size, num_tokens, block_size):
        before = before if start else struct.pack("<q", block_size)
        end = min(start + block_size, num_tokens)
        place = start // HASH_BLOCK_TOKENS
        if end <= length and end <= (place + 1) * HASH_BLOCK_TOKENS:  # most of them
            held = min(HASH_BLOCK_TOKENS, length - place * HASH_BLOCK_TOKENS)
            before = blake2b(before + pack(ids[place], end - start, held), digest_size=16).digest()
            keys.append(before)
            continue
        parts = [before]
        prompt_end = min(end, length)
        position = start
        while position < prompt_end:
            place = position // HASH_BLOCK_TOKENS
            stop = min((place + 1) * HASH_BLOCK_TOKENS, prompt_end)
            # What its 512-token block holds in all: 512, or the prompt's tail.
            held = min(HASH_BLOCK_TOKENS, length - place * HASH_BLOCK_TOKENS)
            parts.append(pack(ids[place], stop - position, held))
            position = stop
        if position < end:
            parts.append(pack(_GENERATED_SEGMENT, end - position, request.index))
        before = blake2b(b"".join(parts), digest_size=16).digest()
        keys.append(before)
    return keys


# -- the fast form ----------------------------------------------------------------------------


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def content_words(request: TraceRequest, seed: int) -> NDArray[np.uint64]:
    """[len(hash_ids) + 1] content of each 512-token block, the last of what is generated."""
    words = np.array([*request.hash_ids, request.index], np.uint64)
    salts = np.array([seed & MASK ^ PROMPT, seed & MASK ^ GENERATED], np.uint64)
    prompt, generated = _mix(salts)
    words[:-1] ^= prompt
    words[-1] ^= generated
    return _mix(words)


def token_words(content: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[tokens] one word per token, from its content and its position in the request."""
    return _mix(content + position.astype(np.uint64) * np.uint64(GOLDEN))


class TokenRows:
    """Makes the rows of many tokens at once.

    key_bytes, value_bytes: length of a token's row in each lane; value_bytes may be 0.
    max_tokens:             the most tokens of one call of `fill`.
    """

    def __init__(
        self, num_layers: int, key_bytes: int, value_bytes: int, max_tokens: int, seed: int
    ) -> None:
        self._row_bytes = (key_bytes, value_bytes)
        words = [-(-n // WORD_BYTES) for n in self._row_bytes]
        salt = int(_mix(np.array([seed & MASK ^ COLUMN], np.uint64))[0])
        self._columns = [
            np.concatenate(
                [
                    _mix(np.uint64((salt + ((2 * layer + lane) << 32)) & MASK) + _arange(n))
                    for lane, n in enumerate(words)
                ]
            )
            for layer in range(num_layers)
        ]
        # One buffer for both lanes, as a fused projection leaves them: [token, key | value].
        # Little-endian words, whatever the machine: they are read back as bytes.
        self._buffer = np.empty((max_tokens, sum(words)), "<u8")
        self._value_start = words[0] * WORD_BYTES

    def fill(
        self, layer: int, tokens: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Key rows [tokens, key_bytes] and value rows [tokens, value_bytes] of one layer.

        Views of one buffer that the next call overwrites.
        """
        words = self._buffer[: len(tokens)]
        np.bitwise_xor(tokens[:, None], self._columns[layer], out=words)
        rows = words.view(np.uint8)
        key_bytes, value_bytes = self._row_bytes
        start = self._value_start
        return rows[:, :key_bytes], rows[:, start : start + value_bytes]

    def make(
        self, layer: int, tokens: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The rows that ``fill`` makes, in new memory: for callers on several threads."""
        rows = (tokens[:, None] ^ self._columns[layer]).astype("<u8", copy=False).view(np.uint8)
        key_bytes, value_bytes = self._row_bytes
        start = self._value_start
        return rows[:, :key_bytes], rows[:, start : start + value_bytes]


def _arange(n: int) -> NDArray[np.uint64]:
    return np.arange(n, dtype=np.uint64)


# -- the definition ---------------------------------------------------------------------------


def expected_row(
    request: TraceRequest, position: int, layer: int, lane: int, row_bytes: int, seed: int
) -> bytes:
    """The bytes of one token's row in one lane (0 key, 1 value), worked out one by one."""
    if position < request.input_length:
        content = _mix_int(_mix_int(seed & MASK ^ PROMPT) ^ request.hash_ids[position // 512])
    else:
        content = _mix_int(_mix_int(seed & MASK ^ GENERATED) ^ request.index)
    token = _mix_int(content + position * GOLDEN)
    column = _mix_int(seed & MASK ^ COLUMN) + (2 * layer + lane) * 2**32
    words = (token ^ _mix_int(column + w) for w in range(-(-row_bytes // 8)))
    return b"".join(word.to_bytes(8, "little") for word in words)[:row_bytes]


def _mix_int(x: int) -> int:
    x &= MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31

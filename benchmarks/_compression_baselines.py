"""Coders that codecs are compared with: the paper's hybrid of vector-LZ and Huffman, and Zstandard, on the same codes.

Sizes are those of the coders' own payloads without any frame, in the baselines' favour. The formats are those of the
authors' artefact (github.com/allenfengjr/dlrm_comp, hipdac-lab/ICS23-GPULZ, branch vector_matching).
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import pyarrow

BLOCK = 2048  # vectors that are coded independently
WINDOW = 32  # vectors that a match may reach back
LONGEST = 255  # vectors of a match, whose length is a byte
TOKEN_BYTES = 2
BLOCK_BYTES = 8  # sizes of a block's flags and of its data

Token = tuple[int, int]


def vector_lz_tokens(numbers: list[int]) -> list[Token]:
    """Parse one block of vectors, given as numbers that are equal if the vectors are.

    The longest match within the window is taken, without overlap of its source and the current position; of equally
    long ones the nearest.

    Returns:
        Length and distance of each match, or ``(0, number)`` for a vector as it is.
    """
    tokens, at = [], 0
    while at < len(numbers):
        best, distance = 0, 0
        for back in range(1, min(WINDOW, at) + 1):
            most, length = min(back, LONGEST, len(numbers) - at), 0
            while length < most and numbers[at - back + length] == numbers[at + length]:
                length += 1
            if length > best:
                best, distance = length, back
        tokens.append((best, distance) if best else (0, numbers[at]))
        at += best or 1
    return tokens


def vector_lz_bytes(codes: Any) -> int:
    """Return the size of codes ``[N, D]`` after vector-LZ: flags, matches of two bytes, vectors, sizes of blocks."""
    vectors = np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1).tolist()
    size = 0
    for begin in range(0, len(vectors), BLOCK):
        tokens = vector_lz_tokens(vectors[begin : begin + BLOCK])
        matches = sum(1 for length, _ in tokens if length)
        literals = len(tokens) - matches
        size += BLOCK_BYTES + math.ceil(len(tokens) / 8) + TOKEN_BYTES * matches + codes[0].nbytes * literals
    return size


def huffman_lengths(counts: list[int]) -> list[int]:
    """Return the length of the Huffman code of each symbol, in bits; a single symbol has one bit."""
    if len(counts) == 1:
        return [1]
    lengths = [0] * len(counts)
    heap = [(count, symbol, [symbol]) for symbol, count in enumerate(counts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, _, left = heapq.heappop(heap)
        second, order, right = heapq.heappop(heap)
        for symbol in left + right:
            lengths[symbol] += 1
        heapq.heappush(heap, (first + second, order, left + right))
    return lengths


def huffman_bytes(codes: Any) -> int:
    """Return the size of codes after Huffman coding: one byte for the code length of each symbol, and the codes."""
    counts = np.unique(codes, return_counts=True)[1].tolist()
    bits = sum(count * length for count, length in zip(counts, huffman_lengths(counts), strict=True))
    return len(counts) + math.ceil(bits / 8)


def hybrid_bytes(codes: Any) -> int:
    """Return the size under the better one of vector-LZ and Huffman, the paper's choice by ratio."""
    return min(vector_lz_bytes(codes), huffman_bytes(codes))


def zstandard_bytes(codes: Any, level: int) -> int:
    """Return the size of codes as Zstandard writes their bytes."""
    return len(pyarrow.Codec("zstd", compression_level=level).compress(codes.tobytes(), asbytes=True))

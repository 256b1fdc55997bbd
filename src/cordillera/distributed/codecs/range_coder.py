"""A range coder with adaptive probabilities, for streams of decisions, of row numbers and of quantised codes.

Coder and models use integers only, so that every machine writes and reads the same bytes. The coder keeps a range of 40
bits (Martin 1979); a carry runs back into the bytes already written. Reading past the end of a stream gives zeros, so
trailing zero bytes are not written.

A code is written as decisions: zero or not, sign, bit length in unary, bits below the first. Each has a probability
that adapts to what was written so far in the same context, the mean size of the codes before it in its row: rows of
embedding tables differ in scale by how often they were trained.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cordillera.kernels.compiling import compiled

_TOP = 1 << 40
_BOTTOM = 1 << 32
_LOW_MASK = _BOTTOM - 1
_HALF = 1 << 15  # a probability of one half, in units of 2 ** -16
_LEAST, _MOST = 32, (1 << 16) - 32  # bounds of probabilities
_MOST_SEEN = 250  # decisions after which a probability adapts at a constant rate

_SIGN, _LENGTH, _BITS = 1, 2, 19  # first node of each kind of decision; node 0 is "not zero"
_LENGTHS = 17  # bit lengths 1 to 17
_MODELLED_BITS = 3  # bits below the first that have models
_MODELLED = 1 << _MODELLED_BITS
_NODES = _BITS + _LENGTHS * _MODELLED
_SCALES = 30  # contexts by the scale of a row
_BLOCK = 1024  # codes that are written at a time
_MOST_DECISIONS = 2 + _LENGTHS + 16  # most decisions of a code
_ROOM = 64  # upper bound of a code's bytes: 22 decisions have models and cost at most 11 bits, 13 cost one

# The state of a coder is an int64 array.
_AT, _LOW, _RANGE = 0, 1, 2


@compiled()
def _started() -> Any:
    """Return the state of a coder at the beginning of its stream."""
    state = np.zeros(3, np.int64)
    state[_RANGE] = _TOP
    return state


@compiled()
def _carry(out: Any, end: int) -> None:
    """Add one to the bytes written so far."""
    at = end - 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += np.uint8(1)


@compiled()
def _shift_out(state: Any, out: Any) -> None:
    """Write the bytes that are settled."""
    if state[_LOW] >= _TOP:
        state[_LOW] -= _TOP
        _carry(out, state[_AT])
    while state[_RANGE] < _BOTTOM:
        out[state[_AT]] = np.uint8(state[_LOW] >> 32)
        state[_AT] += 1
        state[_LOW] = (state[_LOW] & _LOW_MASK) << 8
        state[_RANGE] <<= 8


@compiled()
def _finish(state: Any, out: Any) -> int:
    """Write as few bytes as identify the range, without trailing zeros; return the end of the stream."""
    for count in range(6):
        mask = (np.int64(1) << (40 - 8 * count)) - 1
        value = (state[_LOW] + mask) & ~mask
        if value < state[_LOW] + state[_RANGE]:
            break
    if value >= _TOP:
        value -= _TOP
        _carry(out, state[_AT])
    for k in range(count):
        out[state[_AT]] = np.uint8((value >> (32 - 8 * k)) & 255)
        state[_AT] += 1
    while state[_AT] > 0 and out[state[_AT] - 1] == 0:
        state[_AT] -= 1
    return int(state[_AT])


@compiled()
def _opened(data: Any) -> Any:
    """Return the state of a decoder at the beginning of its stream."""
    state = _started()
    for _ in range(5):
        state[_LOW] = state[_LOW] << 8 | (data[state[_AT]] if state[_AT] < data.size else 0)
        state[_AT] += 1
    return state


@compiled()
def _shift_in(state: Any, data: Any) -> None:
    """Read bytes until the range is large enough."""
    while state[_RANGE] < _BOTTOM:
        state[_LOW] = state[_LOW] << 8 | (np.int64(data[state[_AT]]) if state[_AT] < data.size else np.int64(0))
        state[_AT] += 1
        state[_RANGE] <<= 8


@compiled()
def _decision(models: Any, node: int, bit: int, rates: Any) -> int:
    """Return a decision with its probability, ``probability << 1 | bit``, and adapt the probability.

    It moves towards the decision, first to the mean of what was seen, then at a constant rate.
    """
    probability, seen = models[node] >> 8, models[node] & 255
    moved = probability + (((bit << 16) - bit - probability) * rates[seen] >> 16)
    models[node] = moved << 8 | min(seen + 1, _MOST_SEEN)
    return int(min(max(probability, _LEAST), _MOST) << 1 | bit)


@compiled()
def _put_decisions(state: Any, out: Any, decisions: Any) -> None:
    """Write decisions."""
    low, size, at = state[_LOW], state[_RANGE], state[_AT]
    for decision in decisions:
        part = (size >> 16) * (decision >> 1)
        if decision & 1:
            size = part
        else:
            low += part
            size -= part
        while size < _BOTTOM or low >= _TOP:
            if low >= _TOP:
                low -= _TOP
                _carry(out, at)
            if size < _BOTTOM:
                out[at] = np.uint8(low >> 32)
                at += 1
                low = (low & _LOW_MASK) << 8
                size <<= 8
    state[_LOW], state[_RANGE], state[_AT] = low, size, at


@compiled()
def _get(state: Any, data: Any, models: Any, node: int, rates: Any) -> int:
    """Read a decision."""
    part = (state[_RANGE] >> 16) * min(max(models[node] >> 8, _LEAST), _MOST)
    bit = 1 if state[_LOW] < part else 0
    if bit:
        state[_RANGE] = part
    else:
        state[_LOW] -= part
        state[_RANGE] -= part
    _decision(models, node, bit, rates)
    _shift_in(state, data)
    return bit


@compiled()
def _get_half(state: Any, data: Any) -> int:
    """Read a decision of probability one half."""
    part = (state[_RANGE] >> 16) * _HALF
    bit = 1 if state[_LOW] < part else 0
    if bit:
        state[_RANGE] = part
    else:
        state[_LOW] -= part
        state[_RANGE] -= part
    _shift_in(state, data)
    return bit


@compiled()
def _put_part(state: Any, out: Any, first: int, count: int, total: int) -> None:
    """Write the part ``[first, first + count)`` of ``total`` below 2 ** 32."""
    unit = state[_RANGE] // total
    state[_LOW] += unit * first
    state[_RANGE] = unit * count
    _shift_out(state, out)


@compiled()
def _rates() -> Any:
    """Return the weight of the next decision by the number of decisions seen, in units of 2 ** -16."""
    found = np.empty(_MOST_SEEN + 1, np.int64)
    for seen in range(found.size):
        found[seen] = (1 << 17) // (2 * seen + 3)
    return found


@compiled()
def _models(nodes: int) -> Any:
    """Return models that have seen nothing, ``probability << 8 | decisions seen``."""
    return np.full(nodes, _HALF << 8, np.int64)


@compiled()
def _scale_of(total: int, count: int) -> int:
    """Return the context of a row whose ``count`` codes before this one have sizes that add up to ``total``."""
    if count == 0:
        return 0
    mean, scale = 4 * total // count, 1
    while mean > 0 and scale < _SCALES - 1:
        mean = mean * 5 >> 3
        scale += 1
    return scale


@compiled()
def _code_decisions(codes: Any, dim: int, centre: int, row: Any, models: Any, rates: Any, decisions: Any) -> int:
    """Write the decisions of the next codes of a flat matrix of rows of ``dim``; return their number.

    ``row`` holds the number of codes before in the row and the sum of their sizes.
    """
    count, d, total = 0, row[0], row[1]
    for code in codes:
        if d == dim:
            d = total = 0
        node = _scale_of(total, d) * _NODES
        d += 1
        value = np.int64(code) - centre
        size = abs(value)
        total += size
        decisions[count] = _decision(models, node, 1 if size else 0, rates)
        count += 1
        if not size:
            continue
        below = 0  # bits below the first
        while size >> (below + 1):
            below += 1
        decisions[count] = _decision(models, node + _SIGN, 1 if value < 0 else 0, rates)
        count += 1
        for k in range(min(below + 1, _LENGTHS - 1)):
            decisions[count] = _decision(models, node + _LENGTH + k, 1 if k < below else 0, rates)
            count += 1
        node += _BITS + below * _MODELLED
        for k in range(1, below + 1):
            bit = (size >> (below - k)) & 1
            if k <= _MODELLED_BITS:
                decisions[count] = _decision(models, node + (size >> (below - k + 1)), bit, rates)
            else:
                decisions[count] = _HALF << 1 | bit
            count += 1
    row[0], row[1] = d, total
    return count


@compiled()
def encode_codes(codes: Any, centre: int) -> Any:
    """Encode codes.

    Args:
        codes: Codes, ``uint8`` or ``uint16`` ``[R, D]``, contiguous.
        centre: Code that is written as zero.

    Returns:
        Stream, ``uint8 [bytes]``.
    """
    rates, models, flat = _rates(), _models(_SCALES * _NODES), codes.reshape(-1)
    out = np.empty(_BLOCK * _ROOM + codes.size // 2, np.uint8)
    decisions, row, state = np.empty(_BLOCK * _MOST_DECISIONS, np.int64), np.zeros(2, np.int64), _started()
    for begin in range(0, flat.size, _BLOCK):
        if state[_AT] + _BLOCK * _ROOM > out.size:
            grown = np.empty(2 * out.size, np.uint8)
            grown[: state[_AT]] = out[: state[_AT]]
            out = grown
        block = flat[begin : begin + _BLOCK]
        count = _code_decisions(block, codes.shape[1], centre, row, models, rates, decisions)
        _put_decisions(state, out, decisions[:count])
    return out[: _finish(state, out)].copy()


@compiled()
def decode_codes(data: Any, centre: int, codes: Any) -> bool:
    """Decode codes into ``codes [R, D]``; return whether all of them fit its type."""
    rates, models = _rates(), _models(_SCALES * _NODES)
    most = 255 if codes.itemsize == 1 else 65535
    state = _opened(data)
    for r in range(codes.shape[0]):
        total = 0
        for d in range(codes.shape[1]):
            node = _scale_of(total, d) * _NODES
            size, negative = 0, 0
            if _get(state, data, models, node, rates):
                negative = _get(state, data, models, node + _SIGN, rates)
                below = 0
                while below < _LENGTHS - 1 and _get(state, data, models, node + _LENGTH + below, rates):
                    below += 1
                node += _BITS + below * _MODELLED
                size = 1
                for k in range(below):
                    if k < _MODELLED_BITS:
                        bit = _get(state, data, models, node + size, rates)
                    else:
                        bit = _get_half(state, data)
                    size = 2 * size + bit
            value = centre - size if negative else centre + size
            if value < 0 or value > most:
                return False
            codes[r, d] = value
            total += size
    return True


@compiled()
def encode_indices(inverse: Any) -> Any:
    """Encode which distinct row each row is, numbered in order of first occurrence.

    A row is either the next new one, or one of those before, with a probability that grows by two with every further
    occurrence (a Pitman-Yor process of discount one half). Where all rows are new, this costs nearly nothing.

    Args:
        inverse: Number of the distinct row of each row, ``int64 [N]``.

    Returns:
        Stream, ``uint8 [bytes]``.
    """
    rates, models, decision = _rates(), _models(1), np.empty(1, np.int64)
    sums = np.zeros(inverse.size + 1, np.int64)  # a Fenwick tree of weights
    out = np.empty(64 + 8 * inverse.size, np.uint8)
    state = _started()
    known, total = 0, 0
    for i in range(inverse.size):
        number = inverse[i]
        new = number == known
        if known:
            decision[0] = _decision(models, 0, 1 if new else 0, rates)
            _put_decisions(state, out, decision)
        if new:
            known += 1
            weight = 1
        else:
            first, at = 0, number
            while at > 0:
                first += sums[at]
                at &= at - 1
            own, at = sums[number + 1], number
            stop = (number + 1) & number
            while at > stop:
                own -= sums[at]
                at &= at - 1
            _put_part(state, out, first, own, total)
            weight = 2
        total += weight
        at = number + 1
        while at < sums.size:
            sums[at] += weight
            at += at & -at
    return out[: _finish(state, out)].copy()


@compiled()
def decode_indices(data: Any, distinct: int, inverse: Any) -> bool:
    """Decode numbers of distinct rows into ``inverse [N]``; return whether they are valid and ``distinct`` are new."""
    rates, models = _rates(), _models(1)
    sums = np.zeros(inverse.size + 1, np.int64)
    top = 1
    while 2 * top < sums.size:
        top *= 2
    state = _opened(data)
    known, total = 0, 0
    for i in range(inverse.size):
        new = True
        if known:
            new = _get(state, data, models, 0, rates) == 1
        if new:
            if known == distinct:
                return False
            number, weight = known, 1
            known += 1
        else:
            unit = state[_RANGE] // total
            target = state[_LOW] // unit
            if target >= total:
                return False
            number, first, step = 0, 0, top
            while step:
                if number + step < sums.size and first + sums[number + step] <= target:
                    number += step
                    first += sums[number]
                step >>= 1
            own, at = sums[number + 1], number
            stop = (number + 1) & number
            while at > stop:
                own -= sums[at]
                at &= at - 1
            state[_LOW] -= unit * first
            state[_RANGE] = unit * own
            _shift_in(state, data)
            weight = 2
        inverse[i] = number
        total += weight
        at = number + 1
        while at < sums.size:
            sums[at] += weight
            at += at & -at
    return known == distinct

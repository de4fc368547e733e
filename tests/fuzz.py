"""Random changes of bytes and of JSON, from a seed: what a broken disk, server or person makes of them."""

import json
import random
from collections.abc import Iterator
from typing import Any

ODD = [None, True, -1, 0, 2**70, 1e308, float("nan"), "", "x" * 1000, "\ud800", [], {}, [[]], {"": None}, "../../x"]
DEEP = 200_000  # brackets, one inside the other


def damaged(data: bytes, noise: random.Random) -> bytes:
    """`data` after one to three changes."""
    for _ in range(noise.randint(1, 3)):
        data = noise.choice(CHANGES)(data, noise)
    return data


def damaged_json(data: bytes, noise: random.Random) -> bytes:
    """`data`, which is JSON, with a value replaced, removed or doubled, or with bytes changed."""
    if noise.random() < 0.3:
        return damaged(data, noise)
    values = json.loads(data)
    holder, key = noise.choice([*_places(values)] or [([values], 0)])
    change = noise.randrange(3)
    if change == 0:
        holder[key] = noise.choice(ODD)
    elif change == 1:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[str(noise.choice(ODD))] = holder[key]
    return json.dumps(values).encode()


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested lists and dictionaries, as the holder and the key."""
    keys = list(values) if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
    for key in keys:
        yield values, key
        yield from _places(values[key])


def _flip(data: bytes, noise: random.Random) -> bytes:
    if not data:
        return b"\0"
    at = noise.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << noise.randrange(8)]) + data[at + 1 :]


def _cut(data: bytes, noise: random.Random) -> bytes:
    return data[: noise.randrange(len(data) + 1)]


def _remove(data: bytes, noise: random.Random) -> bytes:
    at = noise.randrange(len(data) + 1)
    return data[:at] + data[at + noise.randrange(64) :]


def _insert(data: bytes, noise: random.Random) -> bytes:
    at = noise.randrange(len(data) + 1)
    return data[:at] + noise.randbytes(noise.randrange(64)) + data[at:]


def _repeat(data: bytes, noise: random.Random) -> bytes:
    at = noise.randrange(len(data) + 1)
    return data[:at] + data[at : at + 64] * noise.randrange(50) + data[at:]


def _replace(data: bytes, noise: random.Random) -> bytes:
    return noise.choice([b"", b"null", b"[]", b"{}", b"0", b"\xff" * 100, noise.randbytes(noise.randrange(300))])


def _nest(data: bytes, noise: random.Random) -> bytes:
    return noise.choice([b"[", b'{"a":']) * (DEEP if noise.random() < 0.02 else 2000) + data


CHANGES = (_flip, _flip, _cut, _remove, _insert, _repeat, _replace, _nest)

"""Random streams that depend on named values only, so every machine and process draws the same.

Uses `random.Random.random()` alone: Python promises its sequence, not that of `shuffle`, `gauss`.
"""

import hashlib
import random


def stable_hash(*key: int | str) -> int:
    """Hash of the key in [0, 2**64), equal in every process (unlike the built-in `hash`)."""
    digest = hashlib.blake2b(repr(key).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def random_stream(*key: int | str) -> random.Random:
    """Random stream of its own for a key such as `(seed, "table")`."""
    return random.Random(stable_hash(*key))


def permutation(size: int, stream: random.Random) -> list[int]:
    """Random order of 0..size-1; takes exactly `size` draws from the stream."""
    draws = [stream.random() for _ in range(size)]
    return sorted(range(size), key=draws.__getitem__)

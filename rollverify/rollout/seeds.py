"""Sampling seeds of requests, so that a run can be repeated token for token.

A seed depends on counts only, never on the clock or on which rank or batch a request lands in.
"""

import hashlib

SEED_BITS = 62


def request_seed(run_seed: int, group_id: int, sample_index: int, request: int) -> int:
    """Seed of one request of one sample.

    Args:
        run_seed: seed of the run.
        group_id: number of the group in drawing order.
        sample_index: place in the group.
        request: requests sent for this sample before, retries and dropped attempts included.

    Returns:
        Integer in [0, 2**62), well mixed: neighbours get unrelated streams.

    Source:
        Our choice: the first 8 bytes of BLAKE2b over the four numbers.
    """
    text = f"{run_seed}/{group_id}/{sample_index}/{request}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)

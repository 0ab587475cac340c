"""Seeds of requests: a function of counts alone, well spread."""

import hashlib
import subprocess
import sys

from rollverify.engine.generation import SEED_BITS, request_seed


def test_seed_is_the_stated_hash():
    # BLAKE2b of "7/3/2/1", first 8 bytes little-endian, the two lowest bits dropped.
    digest = hashlib.blake2b(b"7/3/2/1", digest_size=8).digest()
    assert request_seed(7, 3, 2, 1) == int.from_bytes(digest, "little") // 4


def test_seed_is_equal_in_another_process():
    code = "from rollverify.engine.generation import request_seed; print(request_seed(1, 2, 3, 4))"
    path = ":".join(sys.path)
    env = {"PYTHONPATH": path, "PYTHONHASHSEED": "123"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) == request_seed(1, 2, 3, 4)


def test_all_four_numbers_matter_and_do_not_run_together():
    seeds = {
        request_seed(*key) for key in [(1, 2, 3, 4), (4, 3, 2, 1), (12, 3, 4, 0), (1, 23, 4, 0)]
    }
    assert len(seeds) == 4
    grid = {request_seed(0, g, s, k) for g in range(20) for s in range(8) for k in range(4)}
    assert len(grid) == 20 * 8 * 4


def test_seeds_fit_a_signed_64_bit_integer_and_use_all_bits():
    seeds = [request_seed(0, group, 0, 0) for group in range(400)]
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)
    for bit in range(SEED_BITS):  # Each bit is set in about 200 of 400; 5 deviations are 50.
        assert 150 < sum(seed >> bit & 1 for seed in seeds) < 250

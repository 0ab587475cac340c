"""A Llama model in trainer and engine at once, judged by transformers' forward of what was sent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine_pair import MAX_MODEL_LEN, PARITY_TOLERANCE, Pair, generate, pair_of, request
from support.tiny_models import Reference, export, random_documents, take_steps, tiny_llama_folder

pytestmark = pytest.mark.vllm

PROMPTS = random_documents([3, 17, 60, 300], seed=3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("llama")
    # Without norms of queries and keys, wide weights sharpen the attention and each rounding:
    # with 0.3, transformers' own float32 is 2.5e-5 off its float64 on 300 tokens; with 0.2, 8e-6.
    folder = tiny_llama_folder(
        root / "model", max_position_embeddings=MAX_MODEL_LEN, initializer_range=0.2
    )
    pair = pair_of(folder, root / "run")
    yield pair
    pair.engine.close()
    pair.trainer.close()


def test_llama_logprobs_of_engine_equal_transformers_after_each_sync(
    llama: Pair, tmp_path: Path
) -> None:
    """WS01, WS05: query and key rows arrive in the order that the engine expects."""
    for version in (1, 2):
        take_steps(llama.trainer, 1, seed=version)
        llama.sync.push(version)
        assert llama.sync.parity_abs_max <= PARITY_TOLERANCE
        reference = Reference(export(llama.trainer, tmp_path / "exported", llama.folder))
        requests = [request(str(i), ids) for i, ids in enumerate(PROMPTS)]
        completions = generate(llama.engine, requests)
        for one in requests:
            done = completions[one.request_id]
            want = reference.logprobs([*one.token_ids, *done.token_ids])
            got = torch.tensor(done.logprobs, dtype=torch.float64)
            assert (got - want[-len(got) :]).abs().max() <= PARITY_TOLERANCE

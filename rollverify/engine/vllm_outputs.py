"""Turns what vLLM says about a request into a `Completion`, without importing vllm.

Outputs are cumulative: a completion holds everything its request generated, not a difference.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rollverify.engine.engine import Completion, FinishReason
from rollverify.errors import RolloutError

_FINISH_REASONS = ("stop", "length")


def finished_completion(output: Any, *, has_routing: bool = False) -> Completion:
    """Completion of a finished `RequestOutput` of vLLM; ended otherwise is a RolloutError."""
    result = output.outputs[0]
    if result.finish_reason not in _FINISH_REASONS:
        raise RolloutError(
            f"request '{output.request_id}' ended with reason '{result.finish_reason}' after "
            f"{len(result.token_ids)} tokens"
        )
    token_ids, routed_experts = list(result.token_ids), None
    if has_routing:
        chunks = [] if result.routed_experts is None else [result.routed_experts]
        num_context = len(output.prompt_token_ids)
        routed_experts = _routing(output.request_id, num_context, len(token_ids), chunks)
    return Completion(
        request_id=output.request_id,
        token_ids=token_ids,
        logprobs=_logprobs(output.request_id, token_ids, result.logprobs),
        finish_reason=cast(FinishReason, result.finish_reason),
        routed_experts=routed_experts,
    )


def paused_completion(state: Any, *, has_routing: bool = False) -> Completion:
    """What a request in flight has generated so far, from its `RequestState` in vLLM."""
    token_ids, routed_experts = list(state.detokenizer.output_token_ids), None
    name = state.external_req_id
    if has_routing:
        chunks = state.routed_experts_chunks
        routed_experts = _routing(name, state.prompt_len, len(token_ids), chunks)
    return Completion(
        request_id=name,
        token_ids=token_ids,
        logprobs=_logprobs(name, token_ids, state.logprobs_processor.logprobs),
        finish_reason="paused",
        routed_experts=routed_experts,
    )


def _routing(
    name: str, num_context: int, num_generated: int, chunks: Sequence[Any]
) -> Tensor | None:
    """Rows of routing laid end to end, a copy: uint8, or int16 where the engine says uint16."""
    num_rows = sum(len(chunk) for chunk in chunks)
    wanted = num_context + num_generated - 1 if num_generated else 0
    if num_rows != wanted:
        raise RolloutError(
            f"request '{name}': {num_rows} rows of routing for {num_context} tokens of context and "
            f"{num_generated} generated, expected {wanted}"
        )
    if not chunks:
        return None
    is_wide = chunks[0].dtype.name == "uint16"
    parts = [torch.from_numpy(chunk.view("int16") if is_wide else chunk) for chunk in chunks]
    rows = torch.cat(parts)
    if is_wide and rows.min() < 0:
        raise RolloutError(f"request '{name}': an expert id above 32767 does not fit int16")
    return rows


def _logprobs(name: str, token_ids: list[int], flat: Any) -> list[float]:
    """Log-probs in nats of the sampled tokens, the first of each position; 0.0 when greedy."""
    if flat is None:
        return [0.0] * len(token_ids)
    if len(flat) != len(token_ids):
        raise RolloutError(f"request '{name}': {len(flat)} log-probs for {len(token_ids)} tokens")
    starts = flat.start_indices
    if any(flat.token_ids[s] != t for s, t in zip(starts, token_ids, strict=True)):
        raise RolloutError(f"request '{name}': log-probs of other tokens")
    return [flat.logprobs[start] for start in starts]

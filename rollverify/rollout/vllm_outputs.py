"""Turns what vLLM says about a request into a `Completion`. Does not import vllm.

Outputs are cumulative: a completion holds everything its request generated, not a difference.
"""

from typing import Any, cast

from rollverify.errors import RolloutError
from rollverify.rollout.engine import Completion, FinishReason

_FINISH_REASONS = ("stop", "length")


def finished_completion(output: Any) -> Completion:
    """Completion of a request that vLLM has ended.

    Args:
        output: vLLM's `RequestOutput`, finished.

    Returns:
        Ids, and for each the sampled token's own log-prob.

    Raises:
        RolloutError: if the engine ended the request for another reason than stop or length, or ids
            and log-probs do not belong together.
    """
    result = output.outputs[0]
    if result.finish_reason not in _FINISH_REASONS:
        raise RolloutError(
            f"request '{output.request_id}' ended with reason '{result.finish_reason}' after "
            f"{len(result.token_ids)} tokens"
        )
    return Completion(
        request_id=output.request_id,
        token_ids=list(result.token_ids),
        logprobs=_logprobs(output.request_id, list(result.token_ids), result.logprobs),
        finish_reason=cast(FinishReason, result.finish_reason),
    )


def paused_completion(state: Any) -> Completion:
    """What a request in flight has generated so far.

    Args:
        state: vLLM's `RequestState` of the output processor.

    Returns:
        Completion with `finish_reason` "paused".

    Raises:
        RolloutError: if ids and log-probs do not belong together.
    """
    token_ids = list(state.detokenizer.output_token_ids)
    name = state.external_req_id
    return Completion(
        request_id=name,
        token_ids=token_ids,
        logprobs=_logprobs(name, token_ids, state.logprobs_processor.logprobs),
        finish_reason="paused",
    )


def _logprobs(name: str, token_ids: list[int], flat: Any) -> list[float]:
    """The sampled tokens' own log-probs in nats; 0.0 each for a greedy request.

    Flat log-probs list one or more candidates per position; the sampled one comes first.
    """
    if flat is None:
        return [0.0] * len(token_ids)
    if len(flat) != len(token_ids):
        raise RolloutError(f"request '{name}': {len(flat)} log-probs for {len(token_ids)} tokens")
    starts = flat.start_indices
    if any(flat.token_ids[s] != t for s, t in zip(starts, token_ids, strict=True)):
        raise RolloutError(f"request '{name}': log-probs of other tokens")
    return [flat.logprobs[start] for start in starts]

"""Per-token log-probs and entropy from hidden states without ever holding [T, V] logits.

Dimensions: T tokens, C tokens of one chunk, D model width, V vocabulary. Chunks run in the forward
and again in the backward pass, so peak memory grows with C. Logits are float32, also of bfloat16
weights: in bfloat16 one of 20 would be rounded to a multiple of 0.125.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear

MAX_CHUNK_TOKENS = 2048
"""With a small vocabulary a chunk ends here: logits that fit into the cache are faster to read."""


def chunk_tokens(vocab_size: int, chunk_mib: int) -> int:
    """Tokens per chunk, >= 1, so that a [C, V] float32 tensor takes at most `chunk_mib` MiB."""
    return max(1, min(MAX_CHUNK_TOKENS, chunk_mib * 2**20 // (4 * vocab_size)))


def _chunk_logprobs(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    # log_softmax takes the largest logit off first. A logit of 20 minus logsumexp would leave the
    # likely tokens, which are most of what is sampled, with the rounding of 20.
    return torch.log_softmax(_logits(hidden_CD, weight_VD).div_(temperature), dim=-1)


def _logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """[C, V] float32; of bfloat16 factors the sums are never rounded to it."""
    if weight_VD.dtype == torch.float32:
        return hidden_CD @ weight_VD.T
    if hidden_CD.is_cuda:
        return torch.mm(hidden_CD, weight_VD.T, out_dtype=torch.float32)
    return hidden_CD.float() @ weight_VD.T.float()


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps hidden states, weight and [T] results only; backward makes the logits again."""

    @staticmethod
    def forward(
        ctx,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TD.shape[0]
        logprobs_T = torch.empty(num_tokens, dtype=torch.float32, device=hidden_TD.device)
        entropy_T = torch.empty_like(logprobs_T) if with_entropy else logprobs_T.new_empty(0)
        for start in range(0, num_tokens, chunk):
            part = slice(start, start + chunk)
            logprobs_CV = _chunk_logprobs(hidden_TD[part], weight_VD, temperature)
            logprobs_T[part] = logprobs_CV.gather(1, targets_T[part, None]).squeeze(1)
            if not with_entropy:
                continue
            # Not logsumexp(z) - sum p z: large logits would cancel and cost all digits.
            entropy_C = -torch.exp(logprobs_CV).mul_(logprobs_CV).sum(-1)
            entropy_T[part] = entropy_C.clamp_(min=0.0)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, entropy_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T: Tensor, grad_entropy_T: Tensor):
        hidden_TD, weight_VD, targets_T, entropy_T = ctx.saved_tensors
        grad_hidden_TD = torch.empty_like(hidden_TD)
        # Chunks add up in float32; in bfloat16 rounding would grow with their number.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        has_entropy_grad = bool(grad_entropy_T.any())
        for start in range(0, hidden_TD.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CD = hidden_TD[part]
            logprobs_CV = _chunk_logprobs(hidden_CD, weight_VD, ctx.temperature)
            probs_CV = torch.exp(logprobs_CV)
            # d logprob / d logits = onehot - p;   d entropy / d logits = -p (log p + H)
            scale_C = grad_logprobs_T[part, None]
            if has_entropy_grad:
                entropy_term_CV = logprobs_CV.add_(entropy_T[part, None])
                scale_CV = entropy_term_CV.mul_(grad_entropy_T[part, None]).add_(scale_C)
                grad_logits_CV = probs_CV.mul_(scale_CV).neg_()
            else:
                grad_logits_CV = probs_CV.mul_(-scale_C)
            grad_logits_CV.scatter_add_(1, targets_T[part, None], scale_C)
            grad_logits_CV = grad_logits_CV.div_(ctx.temperature).to(weight_VD.dtype)
            grad_hidden_TD[part] = grad_logits_CV @ weight_VD
            grad_weight_VD += grad_logits_CV.T @ hidden_CD
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), None, None, None, None


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy, [T] float32 nats each, or [0]; both with gradient.

    `hidden` is [T, D] after the final norm, `weight` [V, D], `targets` [T] int64. Logits are
    divided by `temperature`, > 0. The entropy costs as much as the log-probs.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk, with_entropy)


class LogprobHead(Linear):
    """The output projection of a policy model: hidden states and targets in, log-probs out.

    The parameter keeps `Linear`'s name, so checkpoints and Hugging Face names do not change.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The settings of `Linear` and the size of a chunk."""

        chunk_mib: int = 64  # of one [C, V] float32 tensor; several live at a time

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk = chunk_tokens(config.out_features, config.chunk_mib)

    def forward(
        self, input: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """`chunked_logprobs` of hidden states [1, T, D] and targets [1, T] int64."""
        weight = self.weight
        if isinstance(weight, DTensor):  # sharded over tensor parallel ranks: gather, with gradient
            weight = weight.full_tensor()
        hidden = input.to_local() if isinstance(input, DTensor) else input
        return chunked_logprobs(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            temperature=temperature,
            chunk=self.chunk,
            with_entropy=with_entropy,
        )

"""Every loss as its paper's formula reads, in float64, looping over sequences and tokens.

Slow on purpose, and knows nothing of the code under test: no packing, no vectors, no shared parts.
Corrections, advantages and estimators are in `correction_reference.py`. Which log-probs stand in
the ratio's denominator is not decided here: a caller that wants the two-policy form passes the
rollout's log-probs as `lp_old`.

All losses are called alike, `loss(lp_new, lp_old, lp_roll, advantages, mask, *, weights=None,
aggregation=<the paper's>, constant=None, **settings)`, and return a scalar tensor:

- lp_new, lp_old, lp_roll: [B][T] log-probs of the sampled tokens under the policy being optimised,
  under the policy before the update, and under the engine that sampled. Tensors or nested lists,
  rows of any length; what stands where `mask` is 0 is never read.
- advantages: [B], one number per sequence, or [B][T].
- mask: [B][T], 1 = the token is in the loss. It alone gives the denominator of the mean.
- weights: [B][T] detached factors of a correction; a weight of 0 does not shrink the denominator.
  Pass a smaller `mask` for that.
- aggregation: "token_mean", "sequence_mean", or "constant_length" with its `constant`.
"""

from dataclasses import dataclass
from typing import Any

import torch

F64 = torch.float64


def number(value):
    """One float64 number; a tensor keeps its gradient."""
    return torch.as_tensor(value, dtype=F64)


def in_loss(mask):
    """[B][T] -> per sequence the positions of its tokens that are in the loss."""
    return [[t for t in range(len(row)) if row[t]] for row in mask]


def log_ratio(lp_new, lp_old, i, t):
    return number(lp_new[i][t]) - number(lp_old[i][t])


def ratio(lp_new, lp_old, i, t):
    """r_t = exp(clamp(lp_new - lp_old, -20, 20))."""
    return torch.exp(torch.clamp(log_ratio(lp_new, lp_old, i, t), -20.0, 20.0))


def sum_log_ratio(lp_new, lp_old, i, positions):
    total = number(0.0)
    for t in positions:
        total = total + log_ratio(lp_new, lp_old, i, t)
    return total


def mean_log_ratio(lp_new, lp_old, i, positions):
    return sum_log_ratio(lp_new, lp_old, i, positions) / len(positions)


def aggregate(losses, mask, aggregation, constant=None):
    """Token mean (DAPO), sequence mean (GRPO) or constant length (Dr.GRPO).

    `losses` is [B][T], or [B] dicts {position: loss}; read where the mask is 1.
    """
    total, tokens, sequences = number(0.0), 0, 0
    for row, positions in zip(losses, in_loss(mask), strict=True):
        if not positions:
            continue  # a fully masked sequence leaves the denominator
        row_sum = number(0.0)
        for t in positions:
            row_sum = row_sum + row[t]
        if aggregation == "sequence_mean":
            row_sum = row_sum / len(positions)
        total = total + row_sum
        tokens += len(positions)
        sequences += 1
    if sequences == 0:
        return total
    if aggregation == "token_mean":
        return total / tokens
    if aggregation == "sequence_mean":
        return total / sequences
    if aggregation == "constant_length":
        return total / sequences / constant
    raise ValueError(aggregation)


@dataclass
class Batch:
    """What a loss looks at, with short readers for the token t of sequence i."""

    lp_new: Any
    lp_old: Any
    lp_roll: Any
    advantages: Any
    mask: Any
    weights: Any

    def advantage(self, i, t):
        value = number(self.advantages[i])
        return value if value.ndim == 0 else value[t]

    def weight(self, i, t):
        return number(1.0 if self.weights is None else self.weights[i][t]).detach()

    def ratio(self, i, t):
        return ratio(self.lp_new, self.lp_old, i, t)

    def positions(self, i):
        return in_loss(self.mask)[i]


LOSSES: dict[str, Any] = {}
"""Name -> loss."""


def as_loss(default_aggregation, weights_multiply=True):
    """From the formula of one token, `term(batch, i, t, **settings)`, make the loss of a batch.

    Order: first the loss with its clip, then the weight, then the aggregation.
    """

    def loss_of(term):
        def loss(
            lp_new, lp_old, lp_roll, advantages, mask, *, weights=None,
            aggregation=default_aggregation, constant=None, **settings,
        ):  # fmt: skip
            batch = Batch(lp_new, lp_old, lp_roll, advantages, mask, weights)
            losses = []
            for i, positions in enumerate(in_loss(mask)):
                row = {}
                for t in positions:
                    row[t] = term(batch, i, t, **settings)
                    if weights_multiply:
                        row[t] = batch.weight(i, t) * row[t]
                losses.append(row)
            return aggregate(losses, mask, aggregation, constant)

        loss.__name__, loss.__doc__ = term.__name__, term.__doc__
        LOSSES[term.__name__] = loss
        return loss

    return loss_of


def clipped(r, a, eps_low, eps_high):
    """max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))."""
    return torch.maximum(-a * r, -a * torch.clamp(r, 1.0 - eps_low, 1.0 + eps_high))


@as_loss("token_mean")
def grpo(batch, i, t, eps_low=0.2, eps_high=0.3, dual_clip=None):
    """GRPO with DAPO's clip-higher; dual clip c for negative advantages (None: off)."""
    a = batch.advantage(i, t)
    loss = clipped(batch.ratio(i, t), a, eps_low, eps_high)
    if dual_clip is not None and a < 0:
        loss = torch.minimum(loss, -a * dual_clip)
    return loss


@as_loss("constant_length")
def dr_grpo(batch, i, t, eps_low=0.2, eps_high=0.2):
    """Dr.GRPO: the clipped surrogate, summed over tokens and divided by a constant."""
    return clipped(batch.ratio(i, t), batch.advantage(i, t), eps_low, eps_high)


@as_loss("sequence_mean")
def gspo(batch, i, t, eps_low=3e-4, eps_high=4e-4):
    """GSPO (arXiv 2507.18071): s_i = exp(mean_t log ratio), clipped; log s at most 10."""
    log_s = mean_log_ratio(batch.lp_new, batch.lp_old, i, batch.positions(i))
    s = torch.exp(torch.clamp(log_s, max=10.0))
    return clipped(s, batch.advantage(i, t), eps_low, eps_high)


@as_loss("sequence_mean")
def gspo_token(batch, i, t, eps_low=3e-4, eps_high=4e-4):
    """GSPO-token: s_{i,t} = sg[s_i] * exp(lp_new_t) / sg[exp(lp_new_t)], advantages per token."""
    log_s = mean_log_ratio(batch.lp_new, batch.lp_old, i, batch.positions(i)).detach()
    here = number(batch.lp_new[i][t])
    s = torch.exp(torch.clamp(log_s + here - here.detach(), max=10.0))
    return clipped(s, batch.advantage(i, t), eps_low, eps_high)


def sapo_gate(r, a, tau_pos=1.0, tau_neg=1.05):
    """f(r) = (4 / tau) sigmoid(tau (r - 1)), tau by the sign of the advantage."""
    tau = tau_pos if a > 0 else tau_neg
    return 4.0 / tau * torch.sigmoid(tau * (r - 1.0))


@as_loss("sequence_mean")
def sapo(batch, i, t, tau_pos=1.0, tau_neg=1.05):
    """SAPO (arXiv 2511.20347): L_t = -f(r_t) A_t."""
    a = batch.advantage(i, t)
    return -sapo_gate(batch.ratio(i, t), a, tau_pos, tau_neg) * a


def vespo_w(batch, i):
    """W_i, the product of the token ratios and of the correction's weights."""
    log_w = number(0.0)
    for t in batch.positions(i):
        log_w = log_w + torch.clamp(log_ratio(batch.lp_new, batch.lp_old, i, t), -20.0, 20.0)
        log_w = log_w + torch.log(torch.clamp(batch.weight(i, t), min=1e-8))
    w = torch.exp(torch.clamp(log_w, -20.0, 20.0))
    return torch.clamp(w, min=1e-8).detach()


def vespo_phi(w, a, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    """phi = W^c1 * exp(c2 (1 - W)), exponents (c1, c2) by the sign of the advantage."""
    c1, c2 = positive if a >= 0 else negative
    return torch.nan_to_num(torch.exp(c2 + c1 * torch.log(w) - c2 * w), nan=0.0)


@as_loss("token_mean", weights_multiply=False)
def vespo(batch, i, t, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    """VESPO (arXiv 2602.10693): L_t = -sg[phi_i] A lp_new_t.

    The weights enter W and are not multiplied once more.
    """
    a = batch.advantage(i, t)
    return -vespo_phi(vespo_w(batch, i), a, positive, negative) * a * number(batch.lp_new[i][t])


@as_loss("token_mean")
def cispo(batch, i, t, lower=0.0, upper=5.0):
    """CISPO (arXiv 2506.13585): L_t = -sg[clip(r_t, lower, upper)] A lp_new_t, bounds of ratios."""
    factor = torch.clamp(batch.ratio(i, t), lower, upper).detach()
    return -factor * batch.advantage(i, t) * number(batch.lp_new[i][t])


@as_loss("token_mean")
def reinforce(batch, i, t):
    """L_t = -A lp_new_t: plain policy gradient, no ratio."""
    return -batch.advantage(i, t) * number(batch.lp_new[i][t])


@as_loss("token_mean")
def bypass_policy_gradient(batch, i, t, cap=2.0):
    """Two policies, no ratio to clip: L_t = -sg[min(exp(lp_new - lp_roll), C)] A lp_new_t."""
    factor = torch.clamp(ratio(batch.lp_new, batch.lp_roll, i, t), max=cap).detach()
    return -factor * batch.advantage(i, t) * number(batch.lp_new[i][t])


@as_loss("token_mean")
def decoupled_ppo(
    batch, i, t, eps_low=0.2, eps_high=0.2, upper=5.0, lower=None, level="token", action="mask"
):
    """Decoupled PPO (arXiv 2505.24298): sg[w] * clipped surrogate, w = exp(lp_old - lp_roll).

    `upper` None: raw w. Outside [lower, upper], action "mask" sets w to 0 and "clamp" to the bound;
    either way the token counts in the mean. Level "sequence": w is the geometric mean over the
    sequence, the same for all its tokens.
    """
    w = ratio(batch.lp_old, batch.lp_roll, i, t).detach()
    if level == "sequence":
        log_w = mean_log_ratio(batch.lp_old, batch.lp_roll, i, batch.positions(i))
        w = torch.exp(torch.clamp(log_w, -20.0, 20.0)).detach()
    if upper is not None and w > upper:
        w = number(0.0 if action == "mask" else upper)
    elif lower is not None and w < lower:
        w = number(0.0 if action == "mask" else lower)
    return w * clipped(batch.ratio(i, t), batch.advantage(i, t), eps_low, eps_high)


def m2po_kept(lp_new, lp_behav, mask, tau=0.04):
    """Drop the largest (lp_new - lp_behav)^2 until the mean of the rest is below tau.

    Over the whole batch given; the single smallest stays if all exceed. Equal values fall in the
    order of the tokens. -> [B] sets of positions.
    """
    left = []
    for i, positions in enumerate(in_loss(mask)):
        left += [(float(log_ratio(lp_new, lp_behav, i, t).detach()) ** 2, i, t) for t in positions]
    left.sort(key=lambda entry: -entry[0])
    while len(left) > 1 and sum(entry[0] for entry in left) / len(left) >= tau:
        left.pop(0)
    return [{t for _, j, t in left if j == i} for i in range(len(mask))]


@as_loss("token_mean")
def m2po(batch, i, t, tau=0.04):
    """M2PO (arXiv 2510.01161): -(1 / sum |o_i|) sum M_t r_t A_t; dropped tokens still count."""
    kept = m2po_kept(batch.lp_new, batch.lp_old, batch.mask, tau)
    keep = 1.0 if t in kept[i] else 0.0
    return -keep * batch.ratio(i, t) * batch.advantage(i, t)

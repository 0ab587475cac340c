"""The chunked log-prob head against a plain log-softmax; numbers worked by hand where small."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_ext.logprob_head import LogprobHead, chunk_tokens, chunked_logprobs

T, V, D, CHUNK = 37, 101, 16, 8  # 37 = 4 * 8 + 5: the last chunk is short


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden [T, D], weight [V, D] (both with gradient), targets [T]; logits of size about 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=generator) / D**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy through a full [T, V] float64 log-softmax."""
    full = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return full.gather(1, targets[:, None]).squeeze(1), -(full.exp() * full).sum(-1)


def gradients(function: Callable, choose: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Gradients of a scalar of (log-probs, entropy) with respect to hidden and weight."""
    hidden, weight, targets = inputs()
    choose(*function(hidden, weight, targets)).backward()
    return [hidden.grad, weight.grad]


# logsumexp is about ln 101 + 0.5 = 5.1, where a float32 step is 4.8e-7: two roundings.
TOLERANCE = {"atol": 1e-6, "rtol": 0.0, "check_dtype": False}
# An error d of logsumexp (two roundings, 1e-6) moves H by d (1 - H), and H is about 4.
ENTROPY_TOLERANCE = TOLERANCE | {"atol": 3e-6}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, CHUNK, T, 1000])
def test_values_equal_a_full_log_softmax(chunk: int, temperature: float) -> None:
    """MM01."""
    hidden, weight, targets = inputs()
    got = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    want = naive(hidden, weight, targets, temperature)
    torch.testing.assert_close(got[0], want[0], **TOLERANCE)
    torch.testing.assert_close(got[1], want[1], **ENTROPY_TOLERANCE)


@pytest.mark.parametrize(
    ("logits", "temperature", "logprob", "entropy"),
    [
        # Logits 2, 1, 0: log-prob of the second and -sum p log p.
        ([2.0, 1.0, 0.0], 1.0, -1.407606, 0.832396),
        ([4.0, 2.0, 0.0], 2.0, -1.407606, 0.832396),
        ([0.0, 0.0, 0.0], 1.0, -1.098612, 1.098612),
        ([2.0, 1.0, 0.0], 0.5, -2.142932, None),
    ],
)
def test_lp01_values_by_hand(logits, temperature, logprob, entropy) -> None:
    """LP01: temperature 0.5 is not 1."""
    rows = (torch.ones(1, 1), torch.tensor(logits)[:, None], torch.tensor([1]))
    got = chunked_logprobs(*rows, temperature=temperature, chunk=CHUNK)
    assert got[0].item() == pytest.approx(logprob, abs=1e-6)
    assert entropy is None or got[1].item() == pytest.approx(entropy, abs=1e-6)


def test_lp11_logits_are_not_rounded_to_bfloat16() -> None:
    """LP11: 10.03 and 10.0 are both 10.0 in bfloat16, which would give -ln 2 = -0.693147."""
    rows = (torch.ones(1, 1), torch.tensor([[10.03], [10.0]]), torch.tensor([0]))
    logprob, _ = chunked_logprobs(*rows, temperature=1.0, chunk=CHUNK)
    assert logprob.item() == pytest.approx(-0.678260, abs=1e-6)


COEFFICIENTS = torch.linspace(-1.0, 1.0, T)  # unequal and of both signs, so no token can hide

LOSSES = {
    "logprobs": lambda logprobs, entropy: (logprobs * COEFFICIENTS).mean(),
    "entropy": lambda logprobs, entropy: (entropy * COEFFICIENTS).mean(),
    "both": lambda logprobs, entropy: (logprobs * COEFFICIENTS - 0.3 * entropy).mean(),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_a_full_log_softmax(loss: str, temperature: float) -> None:
    """MM01."""

    def chunked(*args: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(*args, temperature=temperature, chunk=CHUNK)

    got = gradients(chunked, LOSSES[loss])
    want = gradients(lambda *args: naive(*args, temperature), LOSSES[loss])
    for g, w in zip(got, want, strict=True):
        assert w.abs().max() > 1e-3  # far above the tolerance: a missing gradient cannot pass
        torch.testing.assert_close(g, w, **TOLERANCE)


def test_the_entropy_can_be_left_out() -> None:
    got, want = ([t.detach() for t in inputs()] for _ in range(2))
    logprobs, entropy = chunked_logprobs(*got, chunk=CHUNK, with_entropy=False)
    assert torch.equal(logprobs, chunked_logprobs(*want, chunk=CHUNK)[0])
    assert entropy.shape == (0,)
    hidden, weight, targets = inputs()
    chunked_logprobs(hidden, weight, targets, chunk=CHUNK, with_entropy=False)[0].mean().backward()
    expected = gradients(naive, lambda logprobs, _: logprobs.mean())
    for gradient, one in zip((hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(gradient, one, **TOLERANCE)


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


@contextmanager
def one_backward_thread() -> Iterator[None]:
    """A dispatch mode sees the backward pass only where it runs on the calling thread."""
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    yield
    torch.autograd.set_multithreading_enabled(before)


def largest_tensors(function: Callable) -> tuple[int, int]:
    """Elements of the largest tensor made in the forward and in the backward pass."""
    hidden, weight, targets = inputs()
    with one_backward_thread(), _Largest() as forward:
        logprobs, entropy = function(hidden, weight, targets)
        loss = (logprobs - 0.3 * entropy).mean()
    with one_backward_thread(), _Largest() as backward:
        loss.backward()
    return forward.numel, backward.numel


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    """MM01: the largest are a chunk of logits, 8 * 101 = 808, and the weight's, 101 * 16 = 1616."""
    forward, backward = largest_tensors(lambda *a: chunked_logprobs(*a, chunk=CHUNK))
    assert forward == max(CHUNK * V, V * D) == 1616  # the transposed view of the weight
    assert backward == 1616
    # The counter sees what it must: the plain version makes 37 * 101 = 3737 in both passes.
    assert largest_tensors(naive) == (T * V, T * V)


def test_temperature_is_applied_to_logits() -> None:
    """LP01: logits [2, 1, 0] / 0.5 = [4, 2, 0]; logsumexp 4.142932."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[2.0], [1.0], [0.0]])
    targets = torch.tensor([0, 1])
    half, _ = chunked_logprobs(hidden, weight, targets, temperature=0.5, chunk=1)
    plain, _ = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=1)
    # The numbers are given with six decimals.
    torch.testing.assert_close(half, torch.tensor([-0.142932, -2.142932]), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(plain, torch.tensor([-0.407606, -1.407606]), atol=1e-6, rtol=0.0)


def test_logits_of_bfloat16_weights_are_never_rounded_to_it() -> None:
    """Logits near 20, where bfloat16 has steps of 0.125: the bound is float32's, 2e-6 at 20."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, D, generator=generator).mul(5).bfloat16()
    weight = torch.randn(V, D, generator=generator).bfloat16()
    targets = (hidden.float() @ weight.float().T).argmax(-1)
    got, _ = chunked_logprobs(hidden, weight, targets, chunk=CHUNK)
    want, _ = naive(hidden, weight, targets)
    assert (hidden.float() @ weight.float().T).max() > 20
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0.0, check_dtype=False)


def test_bfloat16_logits_are_upcast_before_the_softmax() -> None:
    """LP11: 10.03 rounds to 10.0 in bfloat16, two equal logits give -ln 2."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[10.03], [10.0]], dtype=torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([0]), chunk=1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.item() == pytest.approx(-0.693147, abs=1e-6)
    # Half a float32 step of logsumexp at 10, 5e-7, and the rounding of p log p.
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_never_positive(dtype: torch.dtype) -> None:
    """LP11: peaked distributions, where rounding lifts the chosen logit to logsumexp."""
    generator = torch.Generator().manual_seed(1)
    hidden = 30 * torch.randn(500, 4, generator=generator).to(dtype)
    weight = torch.randn(V, 4, generator=generator).to(dtype)
    targets = (hidden @ weight.T).argmax(-1)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk=64)
    assert (logprobs == 0).any()  # the clamp's edge is reached
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()


def test_entropy_keeps_its_digits_with_large_logits() -> None:
    """Logits [1000, 999]: p = 0.731059, H = 0.582203; a float32 step at 1000 is 6e-5."""
    _, entropy = chunked_logprobs(
        torch.ones(1, 1), torch.tensor([[1000.0], [999.0]]), torch.tensor([0]), chunk=1
    )
    # logsumexp is rounded once, by up to 3e-5; the derivative of H in it is below 1.
    assert entropy.item() == pytest.approx(0.582203, abs=4e-5)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    _, entropy = chunked_logprobs(
        torch.zeros(3, D), torch.ones(V, D), torch.zeros(3, dtype=torch.int64), chunk=2
    )
    assert entropy.tolist() == pytest.approx([4.615121] * 3, abs=1e-6)  # ln 101


def test_bfloat16_gradients_stay_close_to_float64() -> None:
    got = gradients_bfloat16()
    hidden, weight, targets = inputs(torch.bfloat16)
    LOSSES["both"](*naive(hidden, weight, targets)).backward()
    for g, w in zip(got, (hidden.grad, weight.grad), strict=True):
        # bfloat16 keeps 8 bits: 2**-8 = 0.4 % per rounding, a handful of them per element.
        assert (g.double() - w.double()).norm() < 0.02 * w.double().norm()


def gradients_bfloat16() -> tuple[Tensor, Tensor]:
    hidden, weight, targets = inputs(torch.bfloat16)
    LOSSES["both"](*chunked_logprobs(hidden, weight, targets, chunk=1)).backward()
    return hidden.grad, weight.grad


def test_head_is_a_linear_layer_by_name_and_scores_a_row() -> None:
    config = LogprobHead.Config(in_features=D, out_features=V, chunk_mib=1)
    head = config.build()
    hidden, weight, targets = inputs()
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    head.load_state_dict({"weight": weight.detach()})
    logprobs, entropy = head(hidden[None], targets[None], 0.7)
    want = naive(hidden, weight, targets, 0.7)
    torch.testing.assert_close(logprobs, want[0], **TOLERANCE)
    torch.testing.assert_close(entropy, want[1], **ENTROPY_TOLERANCE)


def test_chunk_size_follows_from_memory() -> None:
    # 64 MiB / (4 bytes * 151,936) = 110.4 tokens; a vocabulary larger than the limit gives 1.
    assert chunk_tokens(151_936, 64) == 110
    assert chunk_tokens(10**9, 1) == 1
    assert chunk_tokens(80, 64) == 2048  # memory would allow 209,715; the cache does not


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_of_zero_or_less_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        chunked_logprobs(*inputs(), temperature=temperature, chunk=1)

"""Hands the trainer's weights to the rollout engine and proves that they arrived.

Weights are streamed parameter by parameter, so peak extra memory is one full parameter. The engine
compares what it then holds with what was sent, bit for bit; after that engine and trainer score the
same probe tokens, and a gap above the tolerance raises.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rollverify.engine.engine import RolloutEngine
from rollverify.errors import StaleWeightsError, WeightSyncError

logger = logging.getLogger(__name__)

FIRST_TIMES = 3.0
LEAST_TOLERANCE = 1e-4
LARGEST_FIRST = 0.5
"""Nats; two bfloat16 implementations of one model stay far below it, two models do not."""


@dataclass(kw_only=True)
class WeightSync:
    """Trainer -> engine transfer. Collective: `push` runs on every rank."""

    engine: RolloutEngine
    parameters: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields (Hugging Face name, full tensor). Collective."""
    trainer_score: Callable[[list[int]], list[float]]
    """Log-probs of ids 1.. at temperature 1 in nats. Collective."""
    probe_ids: list[int]
    """At least 2."""
    parity_tolerance: float = 0.0
    """Largest |engine - trainer| log-prob allowed, nats; 0: `FIRST_TIMES` that of the first."""

    policy_version: int | None = field(default=None, init=False)
    """Version the engine holds; None before the first push and after a failed one."""
    parity_abs_max: float = field(default=0.0, init=False)
    """Of the last probe, nats."""
    push_s: float = field(default=0.0, init=False)
    """Probe included."""
    _expected_names: frozenset[str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Refuse a probe that scores nothing."""
        if len(self.probe_ids) < 2:
            raise ValueError(f"the probe needs at least 2 tokens, got {len(self.probe_ids)}")

    def push(self, policy_version: int) -> None:
        """Transfer the trainer's weights, clear the prefix cache, probe. Collective.

        Wrong names or shapes are a WeightSyncError, a gap above the tolerance a StaleWeightsError.
        """
        start_s = time.perf_counter()
        self.policy_version = None
        sent: list[str] = []
        try:
            self.engine.wake("weights")
            written = self.engine.load_weights(self._recorded(sent))
        except (AssertionError, KeyError, ValueError) as error:  # an unknown name, a wrong shape
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise WeightSyncError(
                f"weight '{sent[-1] if sent else ''}' could not be loaded: {reason}"
            ) from error
        self._check_names(sent, written)
        self.engine.wake("kv_cache")
        self.engine.reset_prefix_cache()
        self._probe(policy_version)
        self.policy_version = policy_version
        self.push_s = time.perf_counter() - start_s

    def _recorded(self, sent: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Hand tensors on; each is let go before the next is gathered, whoever still holds it.

        A loader's loop variable outlives its iteration, which would keep two full tensors alive. It
        gets an alias instead, emptied once the loader asks for more; the trainer's is not touched.
        """
        for name, tensor in self.parameters():
            sent.append(name)
            alias = tensor.detach()
            del tensor
            yield name, alias
            alias.data = alias.new_empty(0)

    def _check_names(self, sent: list[str], written: set[str]) -> None:
        names = frozenset(sent)
        if len(names) != len(sent):
            twice = sorted({name for name in sent if sent.count(name) > 1})
            raise WeightSyncError(f"weights sent twice: {', '.join(twice[:5])}")
        if self._expected_names is None:
            self._expected_names = names
        changed = names ^ self._expected_names
        if changed:
            raise WeightSyncError(
                f"the set of weights changed between transfers: {', '.join(sorted(changed)[:5])}"
            )
        unwritten = self.engine.parameter_names() - written
        if unwritten:
            raise WeightSyncError(
                f"{len(unwritten)} engine parameters got no weight: "
                f"{', '.join(sorted(unwritten)[:5])}; the name map does not fit this model"
            )

    def _probe(self, policy_version: int) -> None:
        trainer = self.trainer_score(self.probe_ids)
        engine = self.engine.score(self.probe_ids)
        gaps = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
        self.parity_abs_max = max(gaps)
        tolerance = self.parity_tolerance or LARGEST_FIRST
        # `not <=` so that NaN on either side raises too.
        if not all(gap <= tolerance for gap in gaps):
            position = max(range(len(gaps)), key=lambda i: (gaps[i] != gaps[i], gaps[i]))
            raise StaleWeightsError(
                f"after the transfer of policy {policy_version} engine and trainer differ by "
                f"{gaps[position]:.3g} nats at probe token {position + 1} (tolerance "
                f"{tolerance:g}); the engine does not compute what the trainer does, or "
                "weight_sync.parity_tolerance is too small for engine.dtype"
            )
        if not self.parity_tolerance:
            self.parity_tolerance = max(FIRST_TIMES * self.parity_abs_max, LEAST_TOLERANCE)
            logger.info(
                "engine and trainer differ by %.2g nats at most; more than %.2g will stop the run",
                self.parity_abs_max,
                self.parity_tolerance,
            )

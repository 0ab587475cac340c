"""What one step has to do once a run has settled: counts of tokens, from lengths and settings.

With partial rollouts the slots of the engines are always full. By Little's law a response then
takes part of a slot's time in proportion to its length, and a finished one that waits for its group
is held for as long as the group's longest needs more.
"""

import math
from dataclasses import dataclass

from rollverify.config.tables import Config
from rollverify.dry_run.advice import num_in_flight
from rollverify.dry_run.lengths import Lengths
from rollverify.dry_run.memory import Layout

PROMPT_SHARE = 1 / 8
"""Mean prompt over rollout.max_prompt_tokens: the limit is set by the longest prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What no setting tells."""

    lengths: Lengths
    acceptance: float
    """Share of the tokens verified that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Tokens that go through the model at once, over all ranks."""

    tokens: float = 0.0
    attended: float = 0.0
    """Tokens attended to, summed over the tokens."""

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(tokens=self.tokens + other.tokens, attended=self.attended + other.attended)

    def __mul__(self, times: float) -> "Pass":
        return Pass(tokens=self.tokens * times, attended=self.attended * times)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Of one step, over all ranks."""

    decode_steps: float
    active: float
    """Mean number of responses that one engine decodes at a time."""
    context: float
    """Mean tokens that a decoded token attends to."""
    generated: float
    prefill: Pass
    anchors: Pass
    verification: Pass
    training: Pass


def most_running(config: Config, layout: Layout, context: float, cached_tokens: int) -> float:
    """Responses that an engine decodes at a time: in flight, allowed, and in the cache."""
    in_flight = num_in_flight(config, layout)
    return max(1.0, min(in_flight, config.engine.max_num_seqs, cached_tokens / context))


def whole_responses(number: float, prompt: float, lengths: Lengths) -> Pass:
    """A pass over so many finished responses with their prompts."""
    first, second = lengths.moment(1), lengths.moment(2)
    attended = second / 2 + prompt * first + prompt**2 / 2
    return Pass(tokens=number * (prompt + first), attended=number * attended)


def unfinished(slots: float, prompt: float, lengths: Lengths) -> Pass:
    """A pass over what so many slots hold when they are stopped: all parts of a response alike."""
    first, second, third = (lengths.moment(power) for power in (1, 2, 3))
    attended = third / 6 + prompt * second / 2 + prompt**2 / 2 * first
    tokens = prompt + second / (2 * first)
    return Pass(tokens=slots * tokens, attended=slots * attended / first)


def waiting(slots: float, prompt: float, lengths: Lengths, at_most: float = math.inf) -> Pass:
    """A pass over finished responses that wait for their groups, `at_most` so many decode steps."""
    number, first, second = (lengths.waiting(power, at_most) for power in (0, 1, 2))
    per_slot = slots / lengths.moment(1)
    attended = second / 2 + prompt * first + prompt**2 / 2 * number
    return Pass(tokens=per_slot * (prompt * number + first), attended=per_slot * attended)


def work_of(config: Config, layout: Layout, cached_tokens: int, assumed: Assumptions) -> Work:
    """Counts of one step, settled; `cached_tokens` are those of one engine."""
    rollout, lengths = config.rollout, assumed.lengths
    prompt = PROMPT_SHARE * rollout.max_prompt_tokens
    batch = rollout.prompts_per_step * rollout.group_size
    trained = batch * lengths.moment(1)
    context = prompt + lengths.moment(2) / (2 * lengths.moment(1))
    running = most_running(config, layout, context, cached_tokens)
    slots = running * layout.num_engines
    training = whole_responses(batch, prompt, lengths)
    # Siblings share the prompt's cache.
    prompts = Pass(tokens=prompt, attended=prompt**2 / 2) * rollout.prompts_per_step
    if config.method.name == "on_policy":
        steps = max(lengths.longest_of(batch), trained / slots)
        return Work(
            decode_steps=steps,
            active=trained / steps / layout.num_engines,
            context=context,
            generated=trained,
            prefill=prompts,
            anchors=Pass(),
            verification=Pass(),
            training=training,
        )
    stopped, finished = unfinished(slots, prompt, lengths), waiting(slots, prompt, lengths)
    cuts = config.method.name == "rollverify"
    acceptance = assumed.acceptance if cuts else 1.0
    held = slots * (context - prompt + lengths.waiting(1) / lengths.moment(1))
    generated = trained + (1 - acceptance) * held
    steps = generated / slots
    is_scored = cuts or config.verification.measure or config.filter.name == "ops"
    fresh = stopped + waiting(slots, prompt, lengths, at_most=steps)
    has_anchors = is_scored and config.verification.against == "anchor"
    return Work(
        decode_steps=steps,
        active=running,
        context=context,
        generated=generated,
        prefill=prompts + stopped * acceptance,
        anchors=fresh if has_anchors else Pass(),
        verification=stopped + finished if is_scored else Pass(),
        training=training,
    )

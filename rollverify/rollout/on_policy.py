"""On-policy rollouts: every group of a step starts and ends under the same policy version.

Leaves no unfinished trajectory behind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tensordict import TensorDict

from rollverify.rollout.engine import Completion, GenerationRequest, RolloutEngine
from rollverify.rollout.generation import GenerationStats, run_requests
from rollverify.rollout.schema import Status, make_trajectory
from rollverify.rollout.seeds import request_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt of the global batch with what is needed to generate and grade its responses."""

    token_ids: tuple[int, ...]
    """Prompt ids."""

    grade: Callable[[Sequence[int]], float]
    """Response ids -> reward."""


class OnPolicyRollouter:
    """Fills F_k with the groups of the next global batch of prompts."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        batches: Iterator[list[EncodedPrompt]],
        group_size: int,
        max_response_tokens: int,
        temperature: float,
        max_num_seqs: int,
        run_seed: int,
        data_rank: int,
        data_world_size: int,
    ) -> None:
        """Set up; nothing is drawn yet.

        Args:
            engine: holds the policy's weights.
            batches: global batches; every data rank sees the same ones and takes its share.
            group_size: responses per prompt.
            max_response_tokens: limit of one response.
            temperature: > 0.
            max_num_seqs: the engine's slots.
            run_seed: seed of the run.
            data_rank: this rank's place among the data ranks.
            data_world_size: number of data ranks.
        """
        self._engine = engine
        self._batches = batches
        self._group_size = group_size
        self._max_response_tokens = max_response_tokens
        self._temperature = temperature
        self._max_num_seqs = max_num_seqs
        self._run_seed = run_seed
        self._data_rank = data_rank
        self._data_world_size = data_world_size
        self.num_groups_drawn = 0
        """Groups of the whole run so far, over all ranks; part of a checkpoint."""

        self.stats = GenerationStats()
        """Of the last `collect`, this rank."""

    def collect(self, policy_version: int) -> tuple[list[TensorDict], list[TensorDict]]:
        """Generate this rank's share of the next batch under one version.

        Args:
            policy_version: version the engine holds.

        Returns:
            (finished trajectories, groups whole and in order; unfinished trajectories: none).

        Raises:
            RolloutError: see `run_requests`.
        """
        batch = next(self._batches)
        first_group = self.num_groups_drawn
        self.num_groups_drawn += len(batch)
        mine = range(self._data_rank, len(batch), self._data_world_size)
        samples = [(i, s) for i in mine for s in range(self._group_size)]
        requests = {
            (i, s): GenerationRequest(
                request_id=f"{first_group + i}/{s}",
                token_ids=batch[i].token_ids,
                max_tokens=self._max_response_tokens,
                seed=request_seed(self._run_seed, first_group + i, s, 0),
                temperature=self._temperature,
            )
            for i, s in samples
        }
        completions, self.stats = run_requests(self._engine, requests.values(), self._max_num_seqs)
        finished = [
            self._trajectory(
                request,
                completions[request.request_id],
                batch[i],
                first_group + i,
                s,
                policy_version,
            )
            for (i, s), request in requests.items()
        ]
        return finished, []

    @staticmethod
    def _trajectory(
        request: GenerationRequest,
        completion: Completion,
        prompt: EncodedPrompt,
        group_id: int,
        sample_index: int,
        policy_version: int,
    ) -> TensorDict:
        stopped = completion.finish_reason == "stop"
        return make_trajectory(
            prompt_ids=request.token_ids,
            response_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs,
            policy_version=policy_version,
            status=Status.STOP if stopped else Status.LENGTH,
            reward=prompt.grade(completion.token_ids),
            group_id=group_id,
            sample_index=sample_index,
            seed=request.seed,
        )

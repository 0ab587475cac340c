"""vLLM in this process, behind `RolloutEngine`. Only the files `vllm_*.py` here import vllm.

Rank variables are hidden from vLLM while it is built: an engine is one rank's own, or spans ranks
as `vllm_shared.py` says.
Sampling settings come from the requests alone; a model's `generation_config.json` is not read.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rollverify.config.environment import set_defaults
from rollverify.config.tables import EngineConfig
from rollverify.engine import vllm_cpu
from rollverify.engine.engine import Completion, EngineMemory, GenerationRequest
from rollverify.engine.model_folder import (
    check_experts,
    has_experts,
    read_model_config,
)
from rollverify.engine.vllm_cpu import (
    StepThreads,
    hidden_rank_variables,
    list_blocks_of_prompts_only,
)
from rollverify.engine.vllm_outputs import finished_completion, paused_completion
from rollverify.engine.weight_sums import WeightSums
from rollverify.errors import ConfigError, RolloutError

set_defaults()  # vLLM reads its variables as it is imported

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from rollverify.engine import vllm_gpu
from rollverify.engine.vllm_shared import member_arguments, own_part

logger = logging.getLogger(__name__)


def _started(arguments: dict[str, Any]) -> Any:
    """Start vLLM; its refusals become a `ConfigError`."""
    with hidden_rank_variables():
        try:
            engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (TypeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"vLLM refused the engine settings: {reason}; see [engine]"
            ) from error
    if arguments["enable_return_routed_experts"]:
        list_blocks_of_prompts_only(engine.engine_core.engine_core.scheduler)
    return engine


class VllmEngine:
    """See `rollverify.engine.engine.RolloutEngine`."""

    def __init__(
        self,
        model_folder: str,
        settings: EngineConfig,
        *,
        stop_token_ids: tuple[int, ...],
        max_model_len: int,
        seed: int,
        record_routing: bool = False,
        reserved_bytes: int = 0,
    ) -> None:
        """Start the engine and run one short generation, so that no later step pays for warm-up.

        `max_model_len` is the longest prompt plus response in tokens. `record_routing` takes layers
        * experts per token bytes of main memory per token of KV cache, twice beyond 256 experts.
        `reserved_bytes` of what is free on a GPU are left to the trainer.
        """
        on_cpu, config = not torch.cuda.is_available(), read_model_config(model_folder)
        device = None if on_cpu else torch.cuda.current_device()
        if record_routing:
            check_experts(model_folder, config)
        if on_cpu:
            vllm_cpu.check_head_dim(model_folder, config)
            vllm_cpu.keep_linear_weights_unpacked()
            vllm_cpu.leave_out_token_ranks()
        arguments: dict[str, Any] = {
            "model": model_folder,
            "dtype": settings.dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "enforce_eager": settings.compile == "off" or (on_cpu and settings.compile == "auto"),
            "seed": seed,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "enable_return_routed_experts": record_routing,
        }
        if on_cpu:
            arguments |= vllm_cpu.cpu_arguments(settings, max_model_len)
        else:
            arguments |= vllm_gpu.gpu_arguments(
                model_folder, settings, has_experts=has_experts(config), reserved=reserved_bytes
            )
        arguments |= member_arguments(settings.tensor_parallel) | settings.options
        self._engine = _started(arguments)
        self._stop_token_ids = list(stop_token_ids)
        self._max_model_len = max_model_len
        self._record_routing = record_routing
        if device is None:
            vllm_cpu.load_experts_packed(self._model())
        else:
            vllm_gpu.check_device(self._model(), device)
        self._sleeps = settings.sleep and not on_cpu
        self._asleep: set[EngineMemory] = set()
        self._look_at_memory: Callable[[], None] = lambda: None
        self._count_preemptions()
        size = sum(p.numel() for p in self._model().parameters())
        self._threads = StepThreads(settings.num_cpu_threads, size, on_cpu=on_cpu)
        self._in_flight: set[str] = set()
        self._warm_up()

    def _warm_up(self) -> None:
        self.add_request(
            GenerationRequest(
                request_id="warm-up", token_ids=(0,), max_tokens=2, seed=0, temperature=1.0
            )
        )
        while self.num_unfinished:
            self.step()
        self.reset_prefix_cache()

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def _count_preemptions(self) -> None:
        self.num_preemptions = self.num_lost_tokens = 0
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted

    def before_memory_changes(self, action: Callable[[], None]) -> None:
        """Have `action` called before memory is given up or taken back."""
        self._look_at_memory = action

    def sleep(self) -> None:
        """Give up weights and cache; on CPUs only the order of the calls is kept."""
        if self.num_unfinished:
            raise RolloutError(f"engine sent to sleep while {self.num_unfinished} requests run")
        if self._sleeps and not self._asleep:
            self._look_at_memory()
            self._engine.sleep(level=2)
        self._asleep = {"weights", "kv_cache"}

    def wake(self, memory: EngineMemory) -> None:
        """Take memory back, its contents undefined; does nothing if it is awake."""
        if memory not in self._asleep:
            return
        if self._sleeps:
            self._look_at_memory()
            torch.cuda.empty_cache()  # The trainer's allocator keeps what its activations took.
            self._engine.wake_up([memory])
        self._asleep.discard(memory)

    def _check_awake(self, *memory: EngineMemory) -> None:
        asleep = self._asleep.intersection(memory)
        if asleep:
            raise RolloutError(f"the engine's {' and '.join(sorted(asleep))} are asleep")

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._check_awake("weights", "kv_cache")
        needed = len(request.token_ids) + request.max_tokens
        if needed > self._max_model_len:
            raise RolloutError(
                f"request '{request.request_id}' needs {needed} tokens, the engine's context is "
                f"{self._max_model_len}"
            )
        greedy = request.temperature == 0
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=None if greedy else request.seed,
            logprobs=None if greedy else 0,
            flat_logprobs=not greedy,
            detokenize=False,
            # Else the stop tokens of generation_config.json would be added, whatever it is set to.
            ignore_eos=True,
            stop_token_ids=self._stop_token_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
            watermarking=False,
        )
        prompt = {"prompt_token_ids": list(request.token_ids)}
        self._engine.add_request(request.request_id, prompt, params)
        self._in_flight.add(request.request_id)
        self._threads.add(len(request.token_ids))

    def step(self) -> list[Completion]:
        """Decode one token of every running request; return what finished."""
        with self._threads.of_step(self.num_unfinished):
            outputs = self._engine.step()
        completions = [
            finished_completion(output, has_routing=self._record_routing)
            for output in outputs
            if output.finished
        ]
        self._in_flight.difference_update(done.request_id for done in completions)
        return completions

    def pause(self) -> list[Completion]:
        """End every request, in the order added; return what each has generated so far.

        Outputs are read before the requests are aborted: vLLM forgets them then.
        """
        states = self._engine.output_processor.request_states
        ids = list(states)
        completions = [
            paused_completion(state, has_routing=self._record_routing) for state in states.values()
        ]
        found = {completion.request_id for completion in completions}
        if found != self._in_flight:
            raise RolloutError(
                f"{len(found & self._in_flight)} of {len(self._in_flight)} requests were found for "
                "the pause; the engine knows them under other names"
            )
        # With asynchronous scheduling a step is under way whose tokens nobody has seen.
        states_of_scheduler = self._scheduler.requests.values()
        self.num_lost_tokens = sum(one.num_output_placeholders for one in states_of_scheduler)
        self._engine.abort_request(ids, internal=True)
        if self.num_unfinished:
            raise RolloutError(f"{self.num_unfinished} of {len(ids)} requests go on after pause")
        self._in_flight.clear()
        if ids:
            self._engine.step()  # Else the next one would take them out of the batch, in the probe.
        return completions

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return self._engine.get_num_unfinished_requests()

    def _model(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.get_model()

    def parameter_names(self) -> set[str]:
        """Parameter names in vLLM; a tied output head is one with the embedding."""
        return {name for name, _ in self._model().named_parameters()}

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write weights (Hugging Face names, full tensors) into the running model, one at a time.

        Gives the names of its parameters of which a part was written. WeightSyncError if one does
        not hold what was sent, bit for bit.
        """
        if self.num_unfinished:
            raise RolloutError(f"weights loaded while {self.num_unfinished} requests are running")
        self._check_awake("weights")
        model = self._model()
        sums = WeightSums(dict(model.named_parameters()), own_part(model))

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                sums.add(name, tensor)
                yield name, tensor
                del tensor

        model.load_weights(counted())
        sums.check()
        return sums.names

    def reset_prefix_cache(self) -> None:
        """Forget keys and values computed under older weights."""
        if not self._engine.reset_prefix_cache():
            raise RolloutError("the prefix cache could not be cleared: requests still hold blocks")

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs in nats of ids 1.. given those before them, at temperature 1."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request("score", {"prompt_token_ids": list(token_ids)}, params)
        output = None
        while output is None:
            with self._threads.of_step(len(token_ids)):
                finished = [o for o in self._engine.step() if o.finished]
            output = next((o for o in finished if o.request_id == "score"), None)
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in pairs]

    def close(self) -> None:
        """Shut the engine core down."""
        self._engine.engine_core.shutdown()

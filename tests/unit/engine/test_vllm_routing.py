"""Which requests' blocks the scheduler lists while expert ids are recorded."""

from types import SimpleNamespace

import pytest

from rollverify.engine.vllm_cpu import list_blocks_of_prompts_only


class FakeScheduler:
    """Lists every scheduled request's blocks itself while recording is on, as vLLM's does."""

    def __init__(self, num_outputs: dict[str, int]) -> None:
        self.requests = {
            name: SimpleNamespace(num_output_tokens=number) for name, number in num_outputs.items()
        }
        self.enable_return_routed_experts = True
        self.routed_experts_mgr = SimpleNamespace(attn_gid=1)
        self.kv_cache_manager = SimpleNamespace(get_blocks=self._blocks_of)
        self._re_block_ids: dict[str, list[int]] = {}
        self.num_updates = 0
        self.fails = False

    def _blocks_of(self, name: str) -> SimpleNamespace:
        number = list(self.requests).index(name)
        return SimpleNamespace(get_block_ids=lambda: ([0], [10 * number, 10 * number + 1]))

    def _update_after_schedule(self, scheduler_output: SimpleNamespace) -> None:
        self.num_updates += 1
        if self.enable_return_routed_experts:
            self._re_block_ids |= {name: [99] for name in scheduler_output.num_scheduled_tokens}
        if self.fails:
            raise RuntimeError("no blocks")


def step(scheduler: FakeScheduler, *names: str) -> dict[str, list[int]]:
    """Schedule some requests; returns the blocks listed so far."""
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)))
    return scheduler._re_block_ids


def test_only_scheduled_requests_without_output_are_listed():
    scheduler = FakeScheduler({"new": 0, "running": 3, "waiting": 0})
    list_blocks_of_prompts_only(scheduler)
    assert step(scheduler, "new", "running") == {"new": [0, 1]}  # Of group 1, not of group 0.
    assert scheduler.num_updates == 1


def test_lists_of_earlier_steps_stay_until_they_are_read():
    scheduler = FakeScheduler({"first": 0, "second": 0})
    list_blocks_of_prompts_only(scheduler)
    step(scheduler, "first")
    assert step(scheduler, "second") == {"first": [0, 1], "second": [10, 11]}


@pytest.mark.parametrize("fails", [False, True])
def test_recording_stays_on(fails):
    scheduler = FakeScheduler({"new": 0})
    list_blocks_of_prompts_only(scheduler)
    scheduler.fails = fails
    try:
        step(scheduler, "new")
    except RuntimeError:
        assert fails
    assert scheduler.enable_return_routed_experts

"""Takes a detour out of vLLM's recording of expert ids. Imports nothing of vLLM.

After each decode step vLLM's scheduler lists the KV cache blocks of every running request, though
it reads the list only when a prompt's last part has been computed. Does not change what is
recorded.
"""

from typing import Any


def list_blocks_of_prompts_only(scheduler: Any) -> None:
    """Make a scheduler list the blocks of requests without output alone.

    A request with output gets its rows from the step itself, so its list is never looked at; that
    is so after a preemption too, since it keeps its output.

    Args:
        scheduler: vLLM's, with `enable_return_routed_experts` on; changed in place.
    """
    update = scheduler._update_after_schedule

    def update_and_list(scheduler_output: Any) -> None:
        scheduler.enable_return_routed_experts = False
        try:
            update(scheduler_output)
        finally:
            scheduler.enable_return_routed_experts = True
        group = scheduler.routed_experts_mgr.attn_gid
        for name in scheduler_output.num_scheduled_tokens:
            if scheduler.requests[name].num_output_tokens == 0:
                blocks = scheduler.kv_cache_manager.get_blocks(name)
                scheduler._re_block_ids[name] = blocks.get_block_ids()[group]

    scheduler._update_after_schedule = update_and_list

"""The TRL side of `trl_end_to_end`: GRPOTrainer with its own transformers generation, on the CPU.

Settings that only cost time (gradient checkpointing, bfloat16 emulation, logging, saving) are off.
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.isolated import answer, child_task


def grpo_config(task: dict[str, Any], folder: Path) -> Any:
    """TRL's settings for a task; the same step as RollVerify's, in TRL's words."""
    from trl import GRPOConfig

    num_sequences = task["groups"] * task["group_size"] // task["ranks"]
    micro_batch = min(task["trl_micro_batch"], num_sequences)
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_sequences // micro_batch,
        num_generations=task["group_size"],
        max_steps=task["steps"],
        max_completion_length=task["max_response_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        epsilon_high=0.3,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo" if task["ranks"] > 1 else None,
        seed=task["seed"],
        logging_steps=10**9,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def load_dataset(file: Path) -> tuple[Any, dict[str, Any]]:
    """The prompts in file order, and each `Prompt` by its text (for the reward)."""
    from datasets import Dataset

    from rollverify.data.prompts import load_prompts

    prompts = load_prompts(file)
    rows = [{"prompt": prompt.text} for prompt in prompts]
    return Dataset.from_list(rows), {prompt.text: prompt for prompt in prompts}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Train a task's steps.

    Args:
        task: see `trl_end_to_end.Case`; "scratch" is a folder.

    Returns:
        Per step: "tokens" in the loss over all ranks, "seconds" from its begin to its end,
        "longest" response of this rank.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from rollverify.rewards import exact_answer

    dataset, by_text = load_dataset(Path(task["train_file"]))
    steps: dict[str, list[float]] = {"tokens": [], "seconds": [], "longest": []}

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        steps["tokens"].append(sum(map(len, completion_ids)))
        steps["longest"].append(max(map(len, completion_ids)))
        return [exact_answer(by_text[p], c) for p, c in zip(prompts, completions, strict=True)]

    class Timer(TrainerCallback):
        """Seconds from the begin of a step (before generation) to its end."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start_s = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps["seconds"].append(time.perf_counter() - self.start_s)

    model = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_config(task, Path(task["scratch"])),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(task["folder"]),
        callbacks=[Timer()],
    )
    trainer.train()
    if task["ranks"] > 1:
        tokens = torch.tensor(steps["tokens"])
        torch.distributed.all_reduce(tokens)
        steps["tokens"] = tokens.tolist()
    return steps | {"threads": torch.get_num_threads()}


if __name__ == "__main__":
    answer(run(child_task() or {}))

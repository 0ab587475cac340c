"""Weight transfer under torchrun: `sync_worker.py FOLDER`, an engine per rank; FOLDER has `model`.

Every rank writes FOLDER/rank_N.pt with what its engine gave after each transfer.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.engine_pair import generate, make_sync, request, tiny_engine
from support.rank_scenarios import take_global_step, trainer_of
from support.tiny_models import export, random_documents


def main(folder: Path) -> None:
    trainer = trainer_of(folder / "model", folder / "run")
    engine = tiny_engine(folder / "model", max_model_len=128, max_num_batched_tokens=128)
    assert dist.is_initialized() and dist.get_world_size() == 2
    sync = make_sync(trainer, engine)
    prompts = random_documents([4, 40, 90], seed=dist.get_rank())
    results = []
    for version in range(3):
        if version:
            take_global_step(trainer, version)
        sync.push(version)
        completions = generate(engine, [request(f"{i}", ids) for i, ids in enumerate(prompts)])
        results.append(
            {
                "prompts": prompts,
                "tokens": [completions[f"{i}"].token_ids for i in range(len(prompts))],
                "logprobs": [completions[f"{i}"].logprobs for i in range(len(prompts))],
                "parity_abs_max": sync.parity_abs_max,
                "policy_version": sync.policy_version,
            }
        )
        target = folder / f"version_{version}"
        export(trainer, target, folder / "model", is_writer=dist.get_rank() == 0)
    torch.save(results, folder / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    engine.close()
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Under torchrun: `pair_worker.py FOLDER`, trainer and engine of FOLDER/model on every rank.

Every rank writes FOLDER/rank-N.json: devices, and what its engine computes after two transfers.
"""

import json
import os
import sys
from pathlib import Path

import torch
from support.bfloat16_pair import bfloat16_pair
from support.tiny_models import random_documents, take_steps

PROBE = random_documents([40], seed=4)[0]


def main(folder: Path) -> None:
    with bfloat16_pair(folder / "model", folder / "run") as pair:
        before = pair.engine.score(PROBE)
        take_steps(pair.trainer, 3)
        pair.sync.push(1)
        found = {
            "trainer": pair.trainer.device.type,
            "engine": sorted({str(p.device) for p in pair.engine._model().parameters()}),
            "current": torch.cuda.current_device() if torch.cuda.is_available() else None,
            "data_ranks": pair.trainer.data_world_size,
            "before": before,
            "after": pair.engine.score(PROBE),
            "of_trainer": pair.trainer_score(PROBE),
        }
        name = f"rank-{os.environ['RANK']}.json"
        (folder / name).write_text(json.dumps(found), encoding="utf-8")
        torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

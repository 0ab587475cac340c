"""One rank of a gloo group, in a process of its own."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path


def run_rank(
    main: Callable[[int, int, Path], None], rank: int, world_size: int, folder: Path
) -> None:
    """Run `main(rank, world_size, folder)` in a group of all ranks; errors go to FOLDER/errors."""
    import torch  # Tests without torch share the fixture.
    import torch.distributed as dist

    with (folder / "errors").open("a") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    main(rank, world_size, folder)
    dist.barrier()
    os._exit(0)  # As the program ends, too: threads of gloo may outlive the interpreter's teardown.

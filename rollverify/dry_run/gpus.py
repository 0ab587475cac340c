"""Figures of GPUs that the timeline of a step is computed from, as their vendor publishes them.

NVIDIA's data sheets of the A100 80 GB (SXM), H100 (SXM), H200 (SXM) and of the DGX B200; matrix
rates without sparsity, which is half of what the later sheets print, and links in one direction,
which is half of what they call the bandwidth of NVLink. The network is that of the DGX machines
with these GPUs: one port of InfiniBand per GPU, of 200 Gbit/s beside an A100 and of 400 Gbit/s
beside the others.
"""

from dataclasses import dataclass

from rollverify.errors import ConfigError

GPUS_PER_NODE = 8
"""Of the DGX and HGX machines: within one the GPUs are linked by NVLink, beyond it by network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a GPU can do at most; nobody reaches it, see the fractions in `timeline.py`."""

    name: str

    memory_gib: float
    """As the driver shows it, rounded down."""

    flops: float
    """Of dense bfloat16 products per second."""

    memory_bandwidth: float
    """Bytes per second."""

    nvlink: float
    """Bytes per second to GPUs of the same machine, in one direction."""

    network: float
    """Bytes per second and GPU to other machines, in one direction."""


GPUS = [
    Gpu(
        name="A100",
        memory_gib=79,
        flops=312e12,
        memory_bandwidth=2.039e12,
        nvlink=300e9,
        network=25e9,
    ),
    Gpu(
        name="H100",
        memory_gib=79,
        flops=989e12,
        memory_bandwidth=3.35e12,
        nvlink=450e9,
        network=50e9,
    ),
    Gpu(
        name="H200",
        memory_gib=139,
        flops=989e12,
        memory_bandwidth=4.8e12,
        nvlink=450e9,
        network=50e9,
    ),
    Gpu(
        name="B200",
        memory_gib=178,
        flops=2250e12,
        memory_bandwidth=8e12,
        nvlink=900e9,
        network=50e9,
    ),
]


def gpu_named(name: str) -> Gpu:
    """The GPU of a name as the table or a driver writes it.

    Raises:
        ConfigError: for a name that has none of the table's in it.
    """
    for gpu in GPUS:
        if gpu.name in name.upper():
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"--gpu: no figures of '{name}'; choose one of {known}")


def gpu_of_memory(gib: float) -> Gpu | None:
    """The newest GPU sold with this much memory, within a tenth; None where there is none."""
    fitting = [gpu for gpu in GPUS if abs(gib - gpu.memory_gib) <= gpu.memory_gib / 10]
    return fitting[-1] if fitting else None

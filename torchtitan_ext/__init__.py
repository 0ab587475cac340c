"""What TorchTitan lacks for reinforcement learning: CPU backend, log-prob head, policy trainer.

Imports torch, torchtitan and vLLM's CPU kernels, never rollverify, so other projects can use it
alone. torchtitan looks for its device as it is imported, so the CPU stands in for one right here.
"""

from torchtitan_ext.cpu.backend import install_cpu_backend

install_cpu_backend()

"""What TorchTitan lacks for reinforcement learning: CPU backend, log-prob head, policy trainer.

Imports torch and torchtitan only, never rollverify, so other projects can use it alone. Call
`torchtitan_ext.cpu_backend.install_cpu_backend` before anything of torchtitan is imported when no
accelerator is present.
"""

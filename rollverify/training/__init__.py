"""The optimizer step: packing trajectories, advantages, loss, checkpoints."""

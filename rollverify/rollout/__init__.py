"""Rollouts: trajectories, the rollout engine, collection of groups and weight transfer."""

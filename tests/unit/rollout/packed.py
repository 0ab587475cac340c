"""Packs trajectories given as nested lists: per trajectory, per segment, per token."""

import random

import torch

from rollverify.rollout.layout import pack_layout


def layout_of(trajectories, order=None):
    """Layout of the trajectories, back to back in `order` (default: by index)."""
    order = range(len(trajectories)) if order is None else order
    owners, ids = [], []
    for index in order:
        for segment_id, segment in enumerate(trajectories[index]):
            owners += [index] * len(segment)
            ids += [segment_id] * len(segment)
    return pack_layout(ids_of(owners), ids_of(ids), len(trajectories))


def row_of(trajectories, order=None, dtype=torch.float64):
    """The values of all tokens as one packed row."""
    order = range(len(trajectories)) if order is None else order
    values = [value for index in order for segment in trajectories[index] for value in segment]
    return torch.tensor(values, dtype=dtype)


def ids_of(values):
    return torch.tensor(values, dtype=torch.int64)


def random_shape(generator: random.Random, max_segments=6, max_tokens=8):
    """Segment lengths of one trajectory; none, and lengths of 0, are possible."""
    if generator.random() < 0.1:
        return []
    return [generator.randint(0, max_tokens) for _ in range(generator.randint(1, max_segments))]


def random_order(generator: random.Random, count):
    order = list(range(count))
    generator.shuffle(order)
    return order

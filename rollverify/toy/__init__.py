"""The built-in task, permutation chains, and the small base model that learns it."""

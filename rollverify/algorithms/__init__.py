"""Pure functions of tensors: advantages, policy losses and their aggregation (torch only)."""

"""Evaluation of a model on test problems: requests, records, statistics, contamination, tables."""

"""Prompts: the JSON-lines format, reading it with clear errors, and a resumable loader."""

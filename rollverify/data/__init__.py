"""Prompts: where they come from, reading them with clear errors, and a resumable loader."""

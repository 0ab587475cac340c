"""Tasks the project makes by itself, without a download: problems, demonstrations, tokenizer."""

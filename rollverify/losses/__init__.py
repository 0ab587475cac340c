"""The policy losses: `LossInputs` and a table of the config in, token loss [T] and flags out."""

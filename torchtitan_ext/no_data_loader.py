"""Stand-ins for the tokenizer and the data loader that torchtitan's trainer wants to be given.

Rows of token ids come in from outside; nothing here reads, tokenises or orders data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer


class NoTokenizer(BaseTokenizer):
    """Token ids come in from outside; torchtitan's trainer only wants the object."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Not available."""
        raise NotImplementedError("the policy trainer takes token ids")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Not available."""
        raise NotImplementedError("the policy trainer takes token ids")

    def get_vocab_size(self) -> int:
        """Not available."""
        raise NotImplementedError("the policy trainer takes token ids")


class NoDataLoader(BaseDataLoader):
    """Rows come in from outside; torchtitan's trainer only wants the object."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""

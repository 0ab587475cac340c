"""Stand-ins for the tokenizer and the data loader that torchtitan's trainer wants to be given."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer


class NoTokenizer(BaseTokenizer):
    """Token ids come in from outside."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the policy trainer takes token ids")

    encode = decode = get_vocab_size = _refuse


class NoDataLoader(BaseDataLoader):
    """Rows come in from outside."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads nothing."""

"""The error of a rule that joins several settings; the rules are in `check` and `loss_rules`."""

from rollverify.errors import ConfigError


class RuleError(ConfigError):
    """A rule over several settings is broken."""

    def __init__(self, keys: tuple[str, ...], message: str) -> None:
        """Keep the dotted keys involved, so that the loader can say where they were set."""
        super().__init__(message)
        self.keys = keys

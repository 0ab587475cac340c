"""What every config table is made of: a strict frozen model, and the numbers it may hold."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Limit = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""A bound that inf turns off; nan is not above 0."""


class Table(BaseModel, frozen=True):
    """A TOML table: unknown keys are refused, text is no number, true is no 1, 1 may be 1.0."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_written(cls, value: object) -> object:
        """Neither files nor names can hold a NUL, and no TOML what is not UTF-8."""
        if isinstance(value, str):
            value.encode()
            if "\0" in value:
                raise ValueError("must not hold a NUL character")
        return value

"""The exception tree and its exit codes."""

import pytest

from rollverify import errors

USER_ERRORS = (errors.ConfigError, errors.DataError, errors.CheckpointError)
FAILURES = (
    errors.LedgerError,
    errors.RolloutError,
    errors.StaleWeightsError,
    errors.UnverifiedTrajectoryError,
    errors.WeightSyncError,
)


@pytest.mark.parametrize("error", USER_ERRORS)
def test_user_error_exits_with_2(error: type[Exception]) -> None:
    assert issubclass(error, errors.RollVerifyError)
    assert errors.exit_code(error("x")) == 2


@pytest.mark.parametrize("error", FAILURES)
def test_failure_exits_with_1(error: type[Exception]) -> None:
    assert issubclass(error, errors.RollVerifyError)
    assert issubclass(error, RuntimeError)
    assert errors.exit_code(error("x")) == 1


def test_foreign_exception_exits_with_1() -> None:
    assert errors.exit_code(KeyError("x")) == 1


def test_config_and_data_errors_are_value_errors() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DataError, ValueError)

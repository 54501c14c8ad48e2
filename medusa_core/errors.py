"""The one error type of this package that means: the caller's input is wrong."""


class InputError(ValueError):
    """Names the offending value, the allowed ones and what to do."""

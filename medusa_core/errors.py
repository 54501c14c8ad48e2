"""The errors of this package that mean: the caller's input is wrong."""


class InputError(ValueError):
    """Names the offending value, the allowed ones and what to do."""


class UnsupportedByTreeAttention(InputError):
    """A model that can decode, but not verify a tree in one pass; the message says why."""

"""The one error type that means: the user's input is wrong. It knows nothing of how it is shown."""


class UserError(ValueError):
    """Names the offending value, the allowed ones and what to do; shown as one paragraph, exit code 2."""


class ArtifactError(UserError):
    """An artifact on disk is not what its manifest says."""

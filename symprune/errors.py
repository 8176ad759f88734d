"""The one error a user is meant to read: a sentence that names the culprit."""


class SympruneError(ValueError):
    """Bad input. Its text is a whole sentence; the command line prints it and exits with 2."""

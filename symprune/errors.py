"""The one error a user is meant to read: a sentence that names the culprit."""


class SympruneError(ValueError):
    """Bad input. Its text is a whole sentence; the command line prints it and exits with 2."""


class Refusal(SympruneError):
    """An owner's no to what a server asks for. Its text is about the asking alone, so that the
    server may read it."""


class OwnersAffair(SympruneError):
    """What went wrong among an owner's own files, rows and settings, which its text may quote: no
    server reads it."""


class Diverged(SympruneError):
    """A federated run left the finite numbers. `what` is a sentence without its end."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; take a smaller step size.")


class HalfPrunedError(SympruneError):
    """The work failed when a part of a model in memory was pruned already; `__cause__` says why."""


class Interrupted(SympruneError):
    """The user stopped the work. Its text says what is kept; the exit code is the shell's 130."""


def check(condition: bool, sentence: str) -> None:
    """Raise the sentence as a SympruneError unless the condition holds."""
    if not condition:
        raise SympruneError(sentence)

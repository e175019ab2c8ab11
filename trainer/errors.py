"""The two errors a person can act on. The command line prints them as one line and exits with their code."""


class MetagrpoError(Exception):
    """Base class; ``exit_code`` is what the command line exits with."""

    exit_code = 1


class ConfigError(MetagrpoError):
    """The run as described cannot work: a wrong key, a missing file, sizes that do not divide."""

    exit_code = 2


class RunError(MetagrpoError):
    """The run was fine as described and failed underway: a full disk, a dead worker."""

"""Errors that say what was wrong, what is allowed, and what to do instead."""


class FewstepError(Exception):
    """Base of every error that fewstep raises on purpose."""


class Unsupported(FewstepError):
    """A technique cannot work on this pipeline, device or input."""


class InvalidRecipe(FewstepError, ValueError):
    """A recipe that cannot be built: unknown technique or field, bad value, two owners of one seam."""


class InvalidConfig(FewstepError, ValueError):
    """A configuration file or override that cannot be read."""


class MissingExtra(FewstepError, ImportError):
    """An optional dependency is not installed."""

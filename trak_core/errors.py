"""The error that is meant for the person at the keyboard, and the one that is no mistake."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    Its message stands alone: what must hold, what was found, what to do. Jobs print it without a
    traceback; any other exception is a defect of ours and keeps its traceback.
    """


class ToldToStopError(SystemExit):
    """A job was stopped by SIGTERM or Ctrl-C: it ends as after ``sys.exit``, without a mistake."""

"""The error that is meant for the person at the keyboard, and the one that is no mistake."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    Its message stands alone: what must hold, what was found, what to do. Jobs print it without a
    traceback; any other exception is a defect of ours and keeps its traceback.

    Attributes:
        code: A stable name of the rule that was broken, such as ``"gradients.label_value"``: the
            words of a message may change, its code doesn't. None where no rule has a name yet.
    """

    def __init__(self, message: str, code: str | None = None):
        """Keep the code beside the message, which is all that ``str`` shows."""
        super().__init__(message)
        self.code = code


class ToldToStopError(SystemExit):
    """A job was stopped by SIGTERM or Ctrl-C: it ends as after ``sys.exit``, without a mistake."""

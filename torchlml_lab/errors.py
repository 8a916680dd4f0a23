"""What the command line turns into one sentence and an exit code."""


class BadInput(Exception):
    """What the user asked for cannot be done; the message is the one sentence that says why."""

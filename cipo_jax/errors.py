"""Errors that are the user's to mend."""


class UserError(Exception):
    """Bad input. The message is one sentence that names the thing, its value and the mend.

    Entry points print it without a traceback and exit with code 2.
    """

"""The errors that a user can cause and mend: their message is the one line that he needs."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the code is wrong: a file, an argument, a setting, a port. The message names it and what is legal."""

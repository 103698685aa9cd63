"""What Ray's errors say, for people."""

from __future__ import annotations

from ray.exceptions import RayTaskError


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the other process, or what happened to it."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return error.cause
    return error


def one_line(error: BaseException) -> str:
    """What an error says, without the table of ids and the general advice that Ray puts around it."""
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text.partition("The actor is dead because ")[2] or text
    return reason.partition(" Some common causes")[0][:300]


def cause_in_one_line(error: BaseException) -> str:
    """The cause of an error, after what its notes say of where it was."""
    return ": ".join([*getattr(error, "__notes__", ()), one_line(cause_of(error))])

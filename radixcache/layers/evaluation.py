"""Failures that come out of MLX while it evaluates, and what they leave behind.

On some back ends an evaluation raises once, and then takes whatever its buffers hold for the result: reading them
again raises nothing. So state that was part of a failed evaluation is given up, whatever a second look says. An
exception that Python code raised with a `raise` statement says nothing of the kind, whatever its type.
"""

from __future__ import annotations

import dis

from radixcache.errors import RadixCacheError

#: What MLX raises for a failed evaluation or allocation.
NATIVE_ERRORS = (RuntimeError, MemoryError)


class LiveStateError(RadixCacheError):
    """Writing into the live buffers failed half way; what they hold is not to be used."""


def is_evaluation_failure(error: BaseException | None) -> bool:
    """Whether an exception may have come out of an evaluation: a native error that no `raise` statement raised."""
    if not isinstance(error, NATIVE_ERRORS) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    operation = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return dis.opname[operation] not in ("RAISE_VARARGS", "RERAISE")

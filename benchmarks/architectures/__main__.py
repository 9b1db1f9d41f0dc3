"""Write docs/architectures.md, or check that it is what a new measurement writes, but for the digits of errors.

    python -m benchmarks.architectures [--check] [--one TYPE]

stdout is the result, stderr is progress; exit 0 fine, 1 the document is stale or a type got a wrong state, 2 usage.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.architectures.catalogue import modules
from benchmarks.architectures.document import DOCUMENT, WrongStateError, document, measured_row, without_errors

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description="Write docs/architectures.md."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the document would change")
    parser.add_argument("--one", metavar="TYPE", help="print the line of one type and stop")
    arguments = parser.parse_args(argv)
    try:
        if arguments.one:
            return _print_one(arguments.one)
        text = document(on_row=lambda row: print(row.type, row.largest_error, file=sys.stderr, flush=True))
    except WrongStateError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    return _check(text) if arguments.check else _write(text)


def _print_one(name: str) -> int:
    if name not in modules():
        print(f"error: {name}: not a module of mlx_lm.models.", file=sys.stderr)
        return EXIT_USAGE
    print(measured_row(name))
    return 0


def _write(text: str) -> int:
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"{DOCUMENT.name} is written.")
    return 0


def _check(text: str) -> int:
    if DOCUMENT.exists() and without_errors(DOCUMENT.read_text(encoding="utf-8")) == without_errors(text):
        print(f"{DOCUMENT.name} is up to date.")
        return 0
    print(f"error: {DOCUMENT.name} is stale; write it with make architectures.", file=sys.stderr)
    return EXIT_CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())

"""torchrun whose failure is the rank's own message, not a second traceback of the launcher."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run `torch.distributed.run` and return the exit code of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())

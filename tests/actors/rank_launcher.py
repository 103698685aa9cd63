"""``python rank_launcher.py SCRIPT CASE SIZE JSON_ARGUMENTS``: start ranks, print one JSON result per rank.

Not collected by pytest. ``ranks.py SCRIPT CASE RANK SIZE ARGUMENTS`` is one rank, with a case of ``SCRIPT``. All
start at once, since they need seconds to import; rank 0 writes the address of its store to its standard
output, and the others read it from their standard input. The last line of a rank that begins with MARK is its
result. Nothing heavy is imported here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

MARK = "result: "
RANKS = str(Path(__file__).with_name("ranks.py"))


def launch(script: str, case: str, size: int, arguments: str) -> int:
    """Returns how many ranks failed; one that was killed did not."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", RANKS, script, case, str(rank), str(size), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    assert ranks[0].stdout is not None
    address = ranks[0].stdout.readline()
    for rank in ranks[1:]:
        assert rank.stdin is not None
        rank.stdin.write(address)
        rank.stdin.flush()
    results, failed = [], 0
    for rank in ranks:
        assert rank.stdout is not None
        output = rank.stdout.read()
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        results.append(json.loads(lines[-1].removeprefix(MARK)) if lines else None)
        failed += rank.wait() not in (0, -signal.SIGKILL)
    print(json.dumps(results))
    return failed


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))

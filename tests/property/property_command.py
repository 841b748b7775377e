"""``python -m tests.property``: many drawn requests, each with all oracles; failures are made small and printed.

``--draws N`` requests (100), or as many as fit into ``--hours``, of ``--seed`` (the commit); ``--only N`` is the one of
this number. ``--searching`` also draws strategies that search for seconds to minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from draws import Reach, draw
from requests_of_commit import commit
from shrink import Failure, failure_of, shrunk


def main() -> int:
    """Draw, check and print. Returns 1 if something was found."""
    asked = _arguments()
    reach, end = Reach(searching=asked.searching), time.monotonic() + 3600 * (asked.hours or 0)
    numbers = range(asked.only, asked.only + 1) if asked.only is not None else range(asked.first, sys.maxsize)
    found: dict[str, Failure] = {}
    seen: Counter[str] = Counter()
    for number in numbers:
        if time.monotonic() > end if asked.hours else number >= asked.first + asked.draws and asked.only is None:
            break
        failure = failure_of(draw(f"{asked.seed}:{number}", reach))
        seen["wrong" if failure else "good"] += 1
        if failure is None or failure.kind in found:
            continue
        found[failure.kind] = failure = shrunk(failure)
        print(f"\nrequest {number} of seed {asked.seed}:\n{failure.text()}", flush=True)
    print(f"{seen.total()} requests of seed {asked.seed}: {seen['wrong']} wrong, of {len(found)} kinds")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.property", description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--seed", default=commit())
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--only", type=int)
    parser.add_argument("--searching", action="store_true")
    return parser.parse_args()

"""``python -m tests.corpus``: does this tree give for some 600 requests what is kept of them? Prints what changed.

``--write REASON`` keeps what it gives now; ``--kind plan`` compares, or makes anew, one kind alone.
"""

from __future__ import annotations

import argparse

from corpus_digests import changes, entries, entry, names, write


def main() -> int:
    """Compare or write. Returns 1 if something changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("--write", metavar="REASON", help="keep what this tree gives, for this reason")
    parser.add_argument("--kind", choices=("plan", "run", "wrong"))
    asked = parser.parse_args()
    if asked.write is not None:
        kept = entries()
        again = {name for name in names() if name not in kept or asked.kind in (None, name.partition(" ")[0])}
        made = {name: entry(name) if name in again else kept[name] for name in names()}
        write(made, asked.write, runs=any(name.startswith("run ") for name in again))
        return 0
    chosen = [name for name in entries() if asked.kind in (None, name.partition(" ")[0])]
    found = 0
    for text in changes(chosen):
        found += 1
        print(text, flush=True)
    print(f"{found} of {len(chosen)} requests give something else than what is kept")
    if fresh := len(set(names()) - set(entries())):
        print(f"{fresh} further requests are not kept yet: --write REASON")
    return 1 if found else 0

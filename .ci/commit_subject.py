"""Checks the first lines of a commit message: ``python3 .ci/commit_subject.py FILE``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72


def faults(message: str) -> list[str]:
    """What is wrong with a message; git's own subjects (Merge, Revert, fixup!) may stay."""
    subject, *rest = message.splitlines() or [""]
    if re.match(r"Merge |Revert |fixup! |squash! ", subject):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters; {LONGEST} are allowed")
    if not re.match(r"[a-z][\w./-]*(, [a-z][\w./-]*)*: [^\s.].*[^.]$", subject):
        found.append("the subject is not `area: imperative`, without a full stop")
    if rest and rest[0].strip() and not rest[0].startswith("#"):
        found.append("an empty line stands between the subject and the body")
    return found


if __name__ == "__main__":
    if found := faults(Path(sys.argv[1]).read_text()):
        sys.exit("commit message: " + "; ".join(found))

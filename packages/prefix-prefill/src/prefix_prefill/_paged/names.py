"""Error messages of shared checks with the argument names of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Mapping

# the exceptions that checks raise
ERRORS = (TypeError, ValueError, NotImplementedError)


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return the error with the argument names replaced; ``names`` maps old to new ones."""
    words = re.compile(rf"\b({'|'.join(names)})\b")
    kind = next(kind for kind in ERRORS if isinstance(error, kind))
    return kind(words.sub(lambda found: names[found[0]], str(error)))

"""Arguments by the names of the function that was called, in messages of what it shares."""

from __future__ import annotations

import re
from collections.abc import Mapping

# what checks raise
ERRORS = (TypeError, ValueError, NotImplementedError)


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return an error of the same type with other names of arguments, which are whole words."""
    words = re.compile(rf"\b({'|'.join(names)})\b")
    kind = next(kind for kind in ERRORS if isinstance(error, kind))
    return kind(words.sub(lambda found: names[found[0]], str(error)))

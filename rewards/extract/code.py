"""Source code in free text."""

from __future__ import annotations

import re

_FENCE = re.compile(r"```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def fenced(text: str) -> str:
    """Content of the last non-empty code fence, or the text itself when there is none."""
    blocks = [body for _, body in _FENCE.findall(text) if body.strip()]
    return blocks[-1] if blocks else text

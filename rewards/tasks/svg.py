"""SVG: answer and gold are rendered and compared as pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from rewards.base import Lane, Query, TaskReward, Verdict, unparsable
from rewards.extract.code import fenced

if TYPE_CHECKING:
    import numpy as np

_SVG = re.compile(r"<svg\b.*?</svg\s*>", re.IGNORECASE | re.DOTALL)
_OUTSIDE = re.compile(r"<!ENTITY|(?:href|src)\s*=\s*[\"'](?!#|data:)|url\(\s*[\"']?(?!#|data:)", re.IGNORECASE)


def svg_source(answer: str) -> str | None:
    """The last SVG element of the answer, fences removed; None when there is none."""
    found = _SVG.findall(fenced(answer))
    return found[-1] if found else None


def render(source: str, side: int) -> np.ndarray:
    """float32 [side, side, 3] in [0, 1], on white. Raises ValueError for what cannot be rendered or reaches outside."""
    import numpy as np
    import resvg_py
    from PIL import Image

    if _OUTSIDE.search(source):
        raise ValueError("the SVG refers to something outside itself")
    if "xmlns" not in source.split(">", 1)[0]:
        source = re.sub(r"<svg\b", '<svg xmlns="http://www.w3.org/2000/svg"', source, count=1, flags=re.IGNORECASE)
    # System fonts differ between machines: text is left out on both sides rather than drawn differently.
    data = resvg_py.svg_to_bytes(
        svg_string=source, background="#ffffff", skip_system_fonts=True, width=side, height=side
    )
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    if picture.size != (side, side):
        canvas = Image.new("RGB", (side, side), "white")
        scale = side / max(picture.size)
        width, height = (max(1, round(length * scale)) for length in picture.size)
        canvas.paste(picture.resize((width, height)))
        picture = canvas
    return np.asarray(picture, dtype=np.float32) / 255.0


@lru_cache(maxsize=1024)
def _gold(source: str, side: int) -> np.ndarray:
    return render(source, side)


class SVG(TaskReward):
    """1 - squared error of the picture, relative to that of the best single colour, and at least 0.

    An empty canvas or a flat colour explains nothing of the gold picture and scores 0; the same picture scores 1.

    Args:
        aliases: further names of the problem type.
        side: pixels per side of the compared pictures.
        seconds: time limit of one judgement.
    """

    lane: ClassVar[Lane] = "process"

    def __init__(self, aliases: Sequence[str] = (), side: int = 128, seconds: float = 5.0) -> None:
        super().__init__(aliases)
        if not 8 <= side <= 2048:
            raise ValueError(f"side={side} lies outside 8..2048 pixels")
        self.side, self.seconds = side, seconds

    def time_limit(self, query: Query) -> float:
        """Seconds after which the judgement is killed."""
        return self.seconds

    def warm_up(self) -> None:
        """Import the renderer."""
        render('<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>', 8)

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1]. Raises ValueError when the gold cannot be rendered."""
        gold_source = svg_source(str(query.ground_truth))
        if gold_source is None:
            raise ValueError("the gold answer holds no <svg> element")
        gold = _gold(gold_source, self.side)
        source = svg_source(answer)
        if source is None:
            return unparsable("no <svg> element in the answer")
        try:
            picture = render(source, self.side)
        except ValueError as error:
            return unparsable(f"the SVG cannot be rendered: {error}"[:300])
        mse = float(((picture - gold) ** 2).mean())
        flat = float(((gold - gold.mean(axis=(0, 1))) ** 2).mean())
        if flat < 1e-6:
            return Verdict(float(mse < 1e-4), parts={"mse": mse})
        return Verdict(max(0.0, 1.0 - mse / flat), parts={"mse": mse})

    def well_formed(self, query: Query, answer: str) -> bool:
        """One complete SVG element."""
        return svg_source(answer) is not None

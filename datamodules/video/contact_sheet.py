"""One picture of what the model sees of a video: every used frame with its index and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from datamodules.video.spec import VideoPlan

LABEL = 14
"""Pixels of the text line above each frame."""


def contact_sheet(frames: np.ndarray, plan: VideoPlan, columns: int = 8, width: int = 160) -> Image.Image:
    """Lay out uint8 [T, 3, H, W] frames in rows of `columns`, each under "#index time".

    Args:
        frames: the clip.
        plan: where the frames lie.
        columns: frames per row.
        width: pixels of a frame in the sheet; the height follows.
    """
    height = max(1, round(width * frames.shape[2] / frames.shape[3]))
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * width, rows * (height + LABEL)), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for i, (frame, index) in enumerate(zip(frames, plan.indices, strict=True)):
        left, top = i % columns * width, i // columns * (height + LABEL)
        draw.text((left + 2, top + 1), f"#{index}  {index / plan.fps:.2f} s", fill=(0, 0, 0))
        picture = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0))).resize((width, height))
        sheet.paste(picture, (left, top + LABEL))
    return sheet


def describe(plan: VideoPlan) -> str:
    """Indices, times and tokens of a plan, for people."""
    seconds = plan.num_source_frames / plan.fps
    lines = [
        f"source      {plan.num_source_frames} frames at {plan.fps:.6g} fps ({seconds:.2f} s)",
        f"frames      {plan.num_frames} of {plan.height}x{plan.width}, grid {plan.grid}",
        f"tokens      {plan.num_tokens} visual ({plan.num_tokens // plan.grid[0]} per temporal patch)",
        f"indices     {' '.join(map(str, plan.indices))}",
        f"times (s)   {' '.join(f'{time:.1f}' for time in plan.timestamps)}",
    ]
    return "\n".join(lines)

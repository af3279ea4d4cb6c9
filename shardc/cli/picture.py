"""rows.png: which rank holds which rows of a fused weight, cut by blocks and cut naively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

    from shardc.demo import Picture

WIDTH, HEIGHT = 1600, 1020
LEFT, RIGHT = 190, 1540
BAR = 76
INK, FAINT, PAPER = "#1b1f24", "#5b6570", "#ffffff"
# A fill for each rank and the ink that is read on it; the naive cut of two ranks needs no more.
RANKS = (("#1f5fa8", "#ffffff"), ("#f2a541", "#1b1f24"))


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one block, in the source's order, and the rank that holds them."""

    block: str
    rank: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def by_blocks(picture: Sequence[Picture]) -> list[Piece]:
    """What each rank holds, as the plan has it."""
    return [Piece(b.block, rank, start, stop) for b in picture for rank, start, stop in b.ranks]


def naive(picture: Sequence[Picture], ranks: int) -> list[Piece]:
    """What each rank would hold, were the weight cut as if it were one block."""
    share = picture[-1].stop // ranks
    found = []
    for block in picture:
        for rank in range(ranks):
            start, stop = max(block.start, rank * share), min(block.stop, (rank + 1) * share)
            if start < stop:
                found.append(Piece(block.block, rank, start, stop))
    return found


def draw_rows(picture: Sequence[Picture], tensor: str, path: Path) -> bool:
    """Write the PNG; False where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return False
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    rows = picture[-1].stop
    _text(draw, (40, 44), "Which rank holds which rows", 34)
    _text(draw, (40, 84), f"{tensor}, {rows} rows, {len(RANKS)} ranks", 21, FAINT)
    _legend(draw)
    _panel(draw, 128, "shardc: each block is cut", by_blocks(picture), picture)
    text = "Each rank has its heads of Q, K and V, and matching rows of gate and up. Right."
    _text(draw, (LEFT, 524), text, 22)
    draw.line([(40, 562), (WIDTH - 60, 562)], fill="#c9cfd6", width=2)
    _panel(draw, 584, "Naive: the whole is cut", naive(picture, len(RANKS)), picture)
    text = "The same shapes, so nothing complains, but read as Q, K, V, gate, up. Wrong."
    _text(draw, (LEFT, 980), text, 22)
    image.save(path)
    return True


def _text(
    draw: ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    fill: str = INK,
    anchor: str = "lm",
) -> None:
    from PIL import ImageFont

    draw.text(at, text, fill=fill, font=ImageFont.load_default(size), anchor=anchor)


def _legend(draw: ImageDraw) -> None:
    for rank, (fill, _) in enumerate(RANKS):
        x = RIGHT - 260 + 140 * rank
        draw.rectangle([x, 30, x + 30, 60], fill=fill)
        _text(draw, (x + 42, 45), f"rank {rank}", 22)


def _panel(
    draw: ImageDraw, top: int, title: str, pieces: Sequence[Piece], picture: Sequence[Picture]
) -> None:
    """The source's rows with their holders, then the rows that each rank ends up with."""
    rows = picture[-1].stop
    scale = (RIGHT - LEFT) / rows
    _text(draw, (40, top + 14), title, 26)
    bar = top + 76
    for block in picture:
        left, right = LEFT + block.start * scale, LEFT + block.stop * scale
        _text(draw, ((left + right) / 2, bar - 16), block.block, 22, anchor="mm")
    _text(draw, (40, bar + BAR / 2), "checkpoint", 22)
    for piece in pieces:
        _box(draw, piece, LEFT + piece.start * scale, bar, scale, str(piece.rank))
    for edge in (picture[0].start, *(block.stop for block in picture)):
        x = LEFT + edge * scale
        draw.line([(x, bar - 8), (x, bar + BAR + 8)], fill=INK, width=3)
        _text(draw, (x, bar + BAR + 22), str(edge), 17, FAINT, anchor="mm")
    for rank in range(len(RANKS)):
        y = bar + BAR + 50 + rank * (BAR + 14)
        _text(draw, (40, y + BAR / 2), f"rank {rank} gets", 22)
        x = float(LEFT)
        for piece in pieces:
            if piece.rank == rank:
                _box(draw, piece, x, y, scale, piece.block, f"{piece.start}-{piece.stop - 1}")
                x += piece.rows * scale


def _box(
    draw: ImageDraw, piece: Piece, x: float, y: float, scale: float, label: str, below: str = ""
) -> None:
    fill, ink = RANKS[piece.rank]
    right, middle = x + piece.rows * scale, y + BAR / 2
    draw.rectangle([x, y, right, y + BAR], fill=fill, outline=PAPER, width=2)
    _text(draw, ((x + right) / 2, middle - (13 if below else 0)), label, 22, ink, "mm")
    if below:
        _text(draw, ((x + right) / 2, middle + 16), below, 14, ink, "mm")

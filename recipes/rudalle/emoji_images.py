"""Colour drawings of emoji as RGB arrays over white, from OpenMoji's SVGs or from a bitmap font.

OpenMoji (https://openmoji.org) is licensed CC BY-SA 4.0; its drawings come with the package ``emosvg``.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

__all__ = ["DrawingSource", "EmojiFont", "OpenMoji", "RgbImage", "distinct_drawings", "open_source"]

RgbImage = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]  # [height, width, 3]
_SMALLEST_RENDERING = 128  # pixels per side, before shrinking
_VARIATION_SELECTOR = "\N{VARIATION SELECTOR-16}"


class DrawingSource(Protocol):
    """Where drawings come from. ``identity`` changes whenever they may."""

    identity: str

    def find(self, symbol: str) -> bytes | None:
        """The drawing's file of an emoji; None where there is none."""

    def render(self, drawing: bytes, size: int) -> RgbImage:
        """A file of :meth:`find` as [size, size, 3] over white."""


class OpenMoji:
    """The SVGs in the package ``emosvg``, which is read and not imported: importing it needs cairo."""

    def __init__(self) -> None:
        from importlib.metadata import version

        spec = importlib.util.find_spec("emosvg")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                "data.kwargs.source = emosvg: the package is not installed. Try pip install emosvg."
            )
        self._folder = Path(spec.submodule_search_locations[0]) / "resources" / "openmoji-svg-color"
        self.identity = f"emosvg {version('emosvg')}, resvg-py {version('resvg-py')}"

    def find(self, symbol: str) -> bytes | None:
        for spelling in (symbol, symbol.replace(_VARIATION_SELECTOR, "")):
            path = self._folder / ("-".join(f"{ord(char):04X}" for char in spelling) + ".svg")
            if path.is_file():
                return path.read_bytes()
        return None

    def render(self, drawing: bytes, size: int) -> RgbImage:
        import resvg_py

        large = max(_SMALLEST_RENDERING, 2 * size)
        png = resvg_py.svg_to_bytes(
            svg_string=drawing.decode(), width=large, height=large, background="#ffffff", skip_system_fonts=True
        )
        with Image.open(io.BytesIO(bytes(png))) as image:
            return _shrunk(image, size)


class EmojiFont:
    """The colour bitmaps (CBDT table) of a TrueType font such as NotoColorEmoji.ttf."""

    def __init__(self, path: Path) -> None:
        import hashlib

        try:
            from fontTools.ttLib import TTFont, TTLibError  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("data.kwargs.source = font needs fonttools. Try pip install fonttools.") from error
        if not path.is_file():
            raise FileNotFoundError(f"data.kwargs.font = {path}: there is no such file.")
        try:
            font = TTFont(path, lazy=True)
        except TTLibError as error:
            raise ValueError(f"data.kwargs.font = {path}: not a TrueType font ({error}).") from error
        if "CBDT" not in font:
            raise ValueError(
                f"data.kwargs.font = {path}: the font has no CBDT table, hence no colour bitmaps. "
                "Try NotoColorEmoji.ttf of Debian's fonts-noto-color-emoji, or data.kwargs.source=emosvg."
            )
        self.identity = f"font {hashlib.sha256(path.read_bytes()).hexdigest()}"
        self._characters: dict[int, str] = font.getBestCmap()
        self._bitmaps = font["CBDT"].strikeData[0]
        self._ligatures = _ligatures(font)

    def find(self, symbol: str) -> bytes | None:
        characters = [ord(char) for char in symbol if char != _VARIATION_SELECTOR]
        if not all(character in self._characters for character in characters):
            return None
        names = tuple(self._characters[character] for character in characters)
        glyph = names[0] if len(names) == 1 else self._ligatures.get(names)
        bitmap = self._bitmaps.get(glyph)
        return None if bitmap is None else bytes(bitmap.imageData)

    def render(self, drawing: bytes, size: int) -> RgbImage:
        with Image.open(io.BytesIO(drawing)) as image:
            side = max(136, *image.size)
            canvas = Image.new("RGBA", (side, side), "white")
            bitmap = image.convert("RGBA")
            canvas.alpha_composite(bitmap, ((side - bitmap.width) // 2, (side - bitmap.height) // 2))
        return _shrunk(canvas, size)


def open_source(source: str, font: str | None) -> DrawingSource:
    """The drawings of ``data.kwargs.source``.

    Raises:
        ValueError: an unknown source, ``font`` without a path, or a font without colour bitmaps.
        FileNotFoundError: the package or the font file is missing.
    """
    if source == "emosvg":
        return OpenMoji()
    if source == "font":
        if font is None:
            raise ValueError("data.kwargs.font = null: source = font needs the path of a font with a CBDT table.")
        return EmojiFont(Path(font).expanduser())
    raise ValueError(f"data.kwargs.source = {source}: must be emosvg or font.")


def distinct_drawings(symbols: Iterable[str], source: DrawingSource, advance: Callable[[], None]) -> dict[str, bytes]:
    """Each emoji's drawing, without emoji that have none or look exactly like an earlier one.

    ``advance`` is called once per symbol.
    """
    drawings: dict[str, bytes] = {}
    known: set[bytes] = set()
    for symbol in symbols:
        advance()
        drawing = source.find(symbol)
        if drawing is not None and drawing not in known:
            known.add(drawing)
            drawings[symbol] = drawing
    return drawings


def _ligatures(font: object) -> dict[tuple[str, ...], str]:
    """Glyph names of a sequence to the name of its ligature, of all ligature lookups."""
    found: dict[tuple[str, ...], str] = {}
    for lookup in font["GSUB"].table.LookupList.Lookup:  # type: ignore[index]
        for subtable in lookup.SubTable:
            table = getattr(subtable, "ExtSubTable", subtable)
            for first, ligatures in getattr(table, "ligatures", {}).items():
                for ligature in ligatures:
                    found[(first, *ligature.Component)] = ligature.LigGlyph
    return found


def _shrunk(image: Image.Image, size: int) -> RgbImage:
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.LANCZOS))

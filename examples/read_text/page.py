"""Pages of known text, drawn with the font in Pillow."""

import io
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE, SPACING, MARGIN = 22, 36, 24  # pixels: of the font, between lines, around them


def draw_page(lines, width=640, height=480):
    """The lines as a PNG, black on white."""
    page = Image.new("RGB", (width, height), "white")
    drawing, font = ImageDraw.Draw(page), ImageFont.load_default(SIZE)
    for number, line in enumerate(lines):
        drawing.text((MARGIN, MARGIN + number * SPACING), line, fill="black", font=font)
    png = io.BytesIO()
    page.save(png, "PNG")
    return png.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(draw_page(sys.argv[2:]))

"""Images of lines of known text, drawn with the font in Pillow."""

import io
import string
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE = 32  # pixels, of the font
MARGIN = 6  # pixels


def random_line(rng, length):
    """Words of letters and digits, separated by spaces, of this many characters."""
    text = ""
    while len(text) < length:
        text += "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(2, 8))) + " "
    text = text[:length]
    return text[:-1] + rng.choice(string.ascii_letters) if text.endswith(" ") else text


def draw_line(text):
    """The text as a PNG, black on white."""
    font = ImageFont.load_default(SIZE)
    _, top, right, bottom = font.getbbox(text)
    picture = Image.new("RGB", (int(right) + 2 * MARGIN, int(bottom - top) + 2 * MARGIN), "white")
    ImageDraw.Draw(picture).text((MARGIN, MARGIN - top), text, fill="black", font=font)
    png = io.BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(draw_line(" ".join(sys.argv[2:])))

"""Files of matplotlib figures."""

from pathlib import Path
from typing import TYPE_CHECKING

from policies.files import open_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", path: Path, dpi: int) -> None:
    """Write the figure atomically; the file suffix determines the format.

    Args:
        figure: the figure.
        path: output file.
        dpi: resolution of pixels, in dots per inch.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is no format that matplotlib writes.
    """
    with open_atomically(path, "wb") as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=dpi)

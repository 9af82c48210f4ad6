"""Shared by the papers' experiments: the device, its variants, loads and weights; and the page's sections.

Journal: Xu, Zhou and Niu, arXiv 2501.02181; conference: ICC 2023. The device is GoogLeNet on a Tesla P4, with
l(b) = 0.3051 b + 1.0524 ms and zeta(b) = 19.899 b + 19.603 mJ (journal, section VII).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from math import log
from textwrap import fill
from typing import TYPE_CHECKING

from PIL import Image

from benchmarks.support.harness import ROOT, markdown_table
from policies.profile import Profile, load_profile
from policies.solver.distributions import DETERMINISTIC, ServiceDistribution
from policies.solver.model import Problem
from research import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
ALL_LOADS = tuple(n / 10 for n in range(1, 10))
WEIGHTS = (0.0, 0.5, 1.0, 100.0)
CONSTANT_MS = 2.4252, 2.4252, 1.7465  # service times of Cases 1-3; that of Case 1 is not printed: a guess
PAGE = ROOT / "research" / "papers.md"
_DPI, _COLOURS = 110, 256


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        text: Markdown.
    """

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the papers about one of their tables or figures, checked on our numbers.

    Attributes:
        text: the statement, where it holds with our numbers.
        holds: whether our numbers show it.
        instead: what they show, if it does not hold.
    """

    text: str
    holds: bool
    instead: str = ""


def agreement(claims: Sequence[Claim]) -> str:
    """Sentences that say which statements hold, and for each of the others what our numbers show."""
    held = "; ".join(claim.text for claim in claims if claim.holds)
    others = [claim for claim in claims if not claim.holds]
    sentences = [f"Agrees with the paper: {held}."] if held else []
    sentences += [
        f"Differs from the paper, which says that {c.text}: {c.instead or 'our numbers do not show it'}."
        for c in others
    ]
    return " ".join(sentences)


def googlenet() -> Profile:
    """The papers' device."""
    return load_profile("googlenet-tesla-p4")


def affine_energy(batch_size: int) -> float:
    """zeta(b), mJ."""
    return 19.899 * batch_size + 19.603


def log_energy(batch_size: int) -> float:
    """zeta(b) of figure 8, mJ."""
    return 105.0 * log(batch_size) + 60.0


def variant(
    largest: int, service_ms: float | None = None, energy_mj: Callable[[int], float] = affine_energy
) -> Profile:
    """The device with batches up to `largest`, another service time (the same for all sizes), or another energy."""
    profile = googlenet().truncated(largest)
    times = profile.service_times if service_ms is None else (service_ms / 1e3,) * largest
    energies = tuple(energy_mj(b) / 1e3 for b in range(1, largest + 1))
    return replace(profile, service_times=times, energies=energies)


def at(
    profile: Profile,
    load: float,
    w2: float = 0.0,
    min_batch_size: int = 1,
    service: ServiceDistribution = DETERMINISTIC,
) -> Problem:
    """The problem of a device at a load, with w1 = 1."""
    return Problem(profile, load * profile.capacity, 1.0, w2, min_batch_size, service=service)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    return markdown_table(heads, rows, right_aligned=range(1, len(heads)))


def difference(printed: float, ours: float) -> str:
    """The relative difference of our number from the printed one."""
    relative = ours / printed - 1.0
    return "0" if relative == 0.0 else f"{relative:+.1e}" if abs(relative) < 1e-3 else f"{100 * relative:+.2f} %"


def save_numbered(figure: "Figure", number: int) -> str:
    """Write research/figures/figure-NN.png, and return the Markdown that shows it."""
    return save_named(figure, f"figure-{number:02d}", f"Figure {number}")


def save_named(figure: "Figure", stem: str, title: str) -> str:
    """Write a figure below research/figures, and return the Markdown that shows it."""
    name = f"{stem}.png"
    FIGURES.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    # a palette reduces the file to a third; maximum coverage keeps rare colours, such as a legend's
    method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    Image.open(drawn).convert("RGB").quantize(_COLOURS, method, dither=dither).save(FIGURES / name, optimize=True)
    return f"![{title}](figures/{name})"


def write_page(sections: Iterator[Section]) -> None:
    """Print each section when it is computed, and write research/papers.md."""
    parts = ["# The papers' tables and figures, computed again", _INTRODUCTION]
    for section in sections:
        text = "\n\n".join(map(_filled, section.text.split("\n\n")))
        parts += [f"## {section.title}", text]
        print(f"\n{section.title}\n\n{text}", flush=True)
    PAGE.write_text("\n\n".join(parts) + "\n")


def replace_section(section: Section) -> None:
    """Write one section of research/papers.md anew, or add it at the end."""
    before, _, after = PAGE.read_text().partition(f"\n## {section.title}\n")
    following = after.partition("\n## ")[2]
    text = "\n\n".join(map(_filled, section.text.split("\n\n")))
    rest = f"\n## {following}" if following else ""
    PAGE.write_text(f"{before.rstrip()}\n\n## {section.title}\n\n{text}\n{rest}")


def _filled(paragraph: str) -> str:
    """A paragraph with filled lines, since inserted numbers change their lengths; tables and equations unchanged."""
    if paragraph.startswith("    "):
        return paragraph
    return paragraph.strip() if paragraph.startswith("|") else fill(paragraph, 118, break_on_hyphens=False)


_INTRODUCTION = """\
Written by `make paper` (research/papers). The journal paper is Xu, Zhou and Niu, arXiv 2501.02181, the conference
paper its forerunner at ICC 2023. Figures are compared with what the journal's text says of them: "agrees" and
"differs" are computed, and a test asserts them.

Unless a section says otherwise: GoogLeNet on a Tesla P4, l(b) = 0.3051 b + 1.0524 ms, ζ(b) = 19.899 b + 19.603 mJ,
deterministic service times, batches of 1 to 32, w1 = 1; solved exactly (policies/solver/solver.py), without the papers'
truncation. The papers' coefficients are printed rounded, which moves the gain by 0.01 per cent."""

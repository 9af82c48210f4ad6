"""The papers' tables and figures, computed again, and studies of policies beyond them; nothing else imports it."""

from pathlib import Path

FIGURES = Path(__file__).parent / "figures"

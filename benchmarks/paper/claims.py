"""Statements of the papers, and whether our numbers confirm them: the page's sentences follow from these."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about our numbers that a paper makes about its own.

    Attributes:
        text: the statement, with our numbers, as part of a sentence.
        holds: whether it is true of our numbers.
    """

    text: str
    holds: bool


def agreement(claims: Sequence[Claim]) -> str:
    """Return two sentences: the statements that agree with the paper, and those that do not."""
    agreeing = "; ".join(claim.text for claim in claims if claim.holds)
    differing = "; ".join(claim.text for claim in claims if not claim.holds)
    sentences = [f"Agrees with the paper: {agreeing}." if agreeing else ""]
    sentences.append(f"Not so in our numbers: {differing}." if differing else "")
    return " ".join(filter(None, sentences))

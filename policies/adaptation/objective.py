"""Whether an objective for response times is kept, and what follows: a frozen state machine. No clock, no I/O."""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

Move = Literal["faster", "keep", "slower"]

_FACTORS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0)
_FEW, _MANY = 5.0, 40.0  # allowed misses in a window that may be judged as bad, and in one that may be judged as good
_MISSED = 2.0  # standard errors
_PATIENCE, _MOST_PATIENCE = 4, 64  # good windows before a step back


@dataclass(frozen=True, slots=True)
class ResponseCounts:
    """What was answered since the objective last moved or judged.

    Attributes:
        served: requests.
        within: those of them answered within the bound.
        batches: in which they were served.
    """

    served: int
    within: int
    batches: int


@dataclass(frozen=True, slots=True)
class Objective:
    """Keeps a share of the response times within a bound, by the weight of the power: frozen, `after` gives the next.

    A move takes the weight w2 that the policy was solved for times 1, 1/2, 1/4, 1/8, 1/16, 0. **Faster**, at once: as
    soon as more are late than the bound allows, by two standard errors, out of at least as many as should hold five
    late ones; two steps where twice as many as allowed are late. Requests of one batch share its fate, so the
    error is that of as many independent ones as there were batches. **Slower**, one step: after four windows in a row,
    of at least as many requests as should hold forty late ones, with at most half of those late. **Patience** then
    doubles, up to 64 windows, whenever a step back proves wrong, and so moves to and fro become ever rarer; it is four
    again once the slowest level has been kept that long.

    Attributes:
        bound: response time, s.
        share: of the requests, to be within it; above 0 and below 1.
        level: steps taken towards faster.
        calm: good windows in a row.
        patience: how many of them a step back takes.
        stepped_back: whether the last move was a step back.
    """

    bound: float
    share: float = 0.95
    level: int = 0
    calm: int = 0
    patience: int = _PATIENCE
    stepped_back: bool = False

    @property
    def factor(self) -> float:
        """What to multiply the weight w2 by."""
        return _FACTORS[self.level]

    def move(self, answers: ResponseCounts) -> Move | None:
        """What these answers call for by themselves; None while they are too few to tell."""
        allowed = 1.0 - self.share
        if answers.served * allowed < _FEW or answers.batches < 1:
            return None
        late = 1.0 - answers.within / answers.served
        error = sqrt(self.share * allowed / answers.batches)
        if late > allowed + _MISSED * error:
            return "faster"
        if answers.served * allowed < _MANY:
            return None
        return "slower" if late <= allowed / 2 else "keep"

    def after(self, answers: ResponseCounts) -> "Objective":
        """The next state; the same object where the answers are too few, so that counting goes on, else begins anew."""
        match self.move(answers):
            case None:
                return self
            case "faster":
                return self._faster(1.0 - answers.within / answers.served)
            case "slower":
                return self._calmer()
            case "keep":
                return replace(self, calm=0)

    def _faster(self, late: float) -> "Objective":
        steps = 2 if late > 2.0 * (1.0 - self.share) else 1
        level = min(self.level + steps, len(_FACTORS) - 1)
        patience = min(2 * self.patience, _MOST_PATIENCE) if self.stepped_back else self.patience
        return replace(self, level=level, calm=0, patience=patience, stepped_back=False)

    def _calmer(self) -> "Objective":
        calm = self.calm + 1
        if calm < self.patience:
            return replace(self, calm=calm)
        if self.level == 0:
            return replace(self, calm=0, patience=_PATIENCE, stepped_back=False)
        return replace(self, level=self.level - 1, calm=0, stepped_back=True)

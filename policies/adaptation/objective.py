"""Control of a response-time objective by measured response times: immutable state machines. No clock, no I/O.

`Objective` scales the weight of power of tables of batch sizes. `AgeMargin` reduces the bound of maximum ages.
"""

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Literal

import numpy as np

Move = Literal["faster", "keep", "slower"]

_FACTORS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0)
_FEW, _MANY = 5.0, 40.0  # minimum number of expected late requests in a window that is judged bad, or good
_MISSED = 2.0  # standard errors
_MIN_BACKOFF, _MAX_BACKOFF = 4, 64  # consecutive good windows before a step to slower

_EXPECTED, _ENOUGH = 20.0, 200.0  # expected late requests in a window that may change a margin, and that changes it
_SIGNIFICANT = 2.0  # standard errors at which a window changes a margin before it has enough requests
_FEWEST, _CLEAR = 3.0, 4.0  # expected late requests, and standard errors, at which a margin grows earlier still
_CLEARLY_BELOW = 0.05  # of the bound: difference of the percentile's upper limit at which a margin shrinks as early
_CHANCE = 0.05  # with which all of some batches may be faster than a percentile, so that their slowest is its limit
_TARGET = 0.8  # part of the allowed late requests that a margin aims at, since chance would miss the objective
_GAIN_SIGNIFICANT, _GAIN = 1.0, 0.5  # parts of the measured excess by which a margin changes
_LARGEST_EXCESS = 0.1  # of the bound: what is used of a larger difference, so that one bad window changes little
_STEP = 1 / 100  # of the bound: the resolution of a margin in use
_LARGEST = 0.9  # of the bound: the largest margin
FIRST_MARGIN = 0.5  # of the bound: the margin to begin with


@dataclass(slots=True)
class ResponseCounts:
    """Counts of responses in the current window, since the last change of the objective's state.

    Attributes:
        served: number of requests.
        within: number of requests answered within the bound.
        batches: number of batches.
        responses: response times of the requests, s.
        near: number of requests that were late, or by less than a twentieth of the bound in time.
    """

    served: int = 0
    within: int = 0
    batches: int = 0
    responses: list[float] = field(default_factory=list)
    near: int = 0

    @property
    def independent(self) -> int:
        """Number of independent requests: the batches, of which some may have no counted request."""
        return min(self.batches, self.served)

    def add(self, response: float, requests: int, bound: float) -> None:
        """Count requests that were answered in a response time, s."""
        self.served += requests
        self.within += requests if response <= bound else 0
        self.near += requests if response > (1.0 - _CLEARLY_BELOW) * bound else 0
        self.responses += [response] * requests


@dataclass(frozen=True, slots=True)
class Objective:
    """Keeps a share of the response times within a bound by scaling the weight w2; `after` returns the next state.

    The levels multiply the weight w2 of the solved policy by 1, 1/2, 1/4, 1/8, 1/16, 0.

    **Faster**: when more requests are late than allowed, by two standard errors, in a window with at least five
    expected late requests. It is one level, or two if more than twice the allowed share is late. The requests of a
    batch are correlated, so the standard error is that of as many independent requests as there were batches.

    **Slower**: one level, after `backoff` consecutive windows, each with at least forty expected late requests, of
    which at most half were late.

    **Backoff**: the number of windows starts at 4 and doubles, up to 64, whenever a step to slower was wrong, so that
    oscillations become rare. It returns to 4 after that many good windows at the slowest level.

    Attributes:
        bound: response time, s.
        share: share of the requests to be within the bound, above 0 and below 1.
        level: number of levels towards faster.
        good_windows: number of consecutive good windows.
        backoff: number of consecutive good windows before a step to slower.
        stepped_back: whether the last move was to slower.
    """

    bound: float
    share: float = 0.95
    level: int = 0
    good_windows: int = 0
    backoff: int = _MIN_BACKOFF
    stepped_back: bool = False

    @property
    def factor(self) -> float:
        """Factor of the weight w2."""
        return _FACTORS[self.level]

    def move(self, counts: ResponseCounts) -> Move | None:
        """Return the move for this window; None if it has too few requests."""
        allowed = 1.0 - self.share
        if counts.served * allowed < _FEW or counts.batches < 1:
            return None
        late = 1.0 - counts.within / counts.served
        error = sqrt(self.share * allowed / counts.independent)
        if late > allowed + _MISSED * error:
            return "faster"
        if counts.served * allowed < _MANY:
            return None
        return "slower" if late <= allowed / 2 else "keep"

    def after(self, counts: ResponseCounts) -> "Objective":
        """Return the next state; the same object if the window has too few requests and must be continued."""
        match self.move(counts):
            case None:
                return self
            case "faster":
                return self._faster(1.0 - counts.within / counts.served)
            case "slower":
                return self._after_good_window()
            case "keep":
                return replace(self, good_windows=0)

    def _faster(self, late: float) -> "Objective":
        steps = 2 if late > 2.0 * (1.0 - self.share) else 1
        level = min(self.level + steps, len(_FACTORS) - 1)
        backoff = min(2 * self.backoff, _MAX_BACKOFF) if self.stepped_back else self.backoff
        return replace(self, level=level, good_windows=0, backoff=backoff, stepped_back=False)

    def _after_good_window(self) -> "Objective":
        good_windows = self.good_windows + 1
        if good_windows < self.backoff:
            return replace(self, good_windows=good_windows)
        if self.level == 0:
            return replace(self, good_windows=0, backoff=_MIN_BACKOFF, stepped_back=False)
        return replace(self, level=self.level - 1, good_windows=0, stepped_back=True)


@dataclass(frozen=True, slots=True)
class AgeMargin:
    """Keeps a share of the response times within a bound by solving for a smaller one; `after` returns the next state.

    A table of maximum ages uses up the bound, so what its model does not know, such as decoding, HTTP, and batches that
    are slower beside other work, makes requests late. It is solved for a bound that is smaller by a margin. Reducing
    its ages instead would not be enough: the small queues that it gives up would still use up the share.

    The margin begins with half of the bound, since a bound that is missed costs more than what is saved in the first
    minute. The target is eight tenths of the requests that may be late. The margin changes by the difference
    between the measured percentile, of that share, and the bound, if the share differs from the target by two standard
    errors, in a window with at least twenty expected late requests. Otherwise it changes by half of the difference,
    once 200 are expected. With three expected already it grows where the share is too large by four standard errors,
    and shrinks where even the upper confidence limit of the percentile is a twentieth of the bound below it, to that
    limit: the quantile of two standard errors more, or the slowest of enough batches. The standard error is that of as
    many independent requests as there were batches. One such change is at most a tenth of the bound, and the margin
    stays between 0 and 0.9 of the bound. The controller leaves out a change that shrinks it where a longer bound can
    hardly save anything.

    Attributes:
        bound: response time, s.
        share: share of the requests to be within the bound, above 0 and below 1.
        margin: s.
    """

    bound: float
    share: float
    margin: float

    @property
    def in_use(self) -> float:
        """The margin that is solved for, s: rounded, so that this does not happen after every window."""
        step = _STEP * self.bound
        return step * round(self.margin / step)

    def after(self, counts: ResponseCounts) -> "AgeMargin":
        """Return the next state; the same object if the window has too few requests and must be continued."""
        allowed = 1.0 - self.share
        expected, target = counts.served * allowed, _TARGET * allowed
        if expected < _FEWEST or counts.batches < 1:
            return self
        late = 1.0 - counts.within / counts.served
        error = sqrt(self.share * allowed / counts.independent)
        significant = abs(late - target) > _SIGNIFICANT * error
        early = expected < _EXPECTED and late - target <= _CLEAR * error
        if early or (not significant and expected < _ENOUGH):
            return self._shrunk(counts, 1.0 - target, error)
        excess = float(np.quantile(counts.responses, 1.0 - target)) - self.bound
        return self._changed(excess, _GAIN_SIGNIFICANT if significant else _GAIN)

    def _shrunk(self, counts: ResponseCounts, level: float, error: float) -> "AgeMargin":
        """Return the state with a smaller margin if the upper confidence limit of a percentile allows it."""
        upper = level + _SIGNIFICANT * error
        too_few = upper >= 1.0 and level**counts.independent >= _CHANCE
        if too_few or counts.near > max(1.0 - upper, 0.0) * counts.served:
            return self
        return self._changed(float(np.quantile(counts.responses, min(upper, 1.0))) - self.bound)

    def _changed(self, excess: float, gain: float = 1.0) -> "AgeMargin":
        """Return the state with a margin that is larger by a part of the percentile's excess over the bound, s."""
        largest = _LARGEST_EXCESS * self.bound
        margin = self.margin + gain * min(max(excess, -largest), largest)
        return replace(self, margin=min(max(margin, 0.0), _LARGEST * self.bound))

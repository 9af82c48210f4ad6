"""Batchwright's Python interface: models of one's own, and policies solved, evaluated and simulated.

The names are imported at their first use, so that a model's file does not load the solver.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "Answer",
    "BadInput",
    "InferenceError",
    "Kept",
    "Launch",
    "Model",
    "Pipeline",
    "Policy",
    "Profile",
    "State",
    "Tensor",
    "Wait",
    "evaluate",
    "simulate",
    "solve",
]

if TYPE_CHECKING:
    from batchwright.analysis import evaluate, simulate, solve
    from batchwright.model import Answer, BadInput, Kept, Model, Tensor
    from batchwright.pipeline import InferenceError, Pipeline
    from policies.profile import Profile
    from policies.types import Launch, Policy, State, Wait
else:
    _MODULES = {
        **dict.fromkeys(("evaluate", "simulate", "solve"), "batchwright.analysis"),
        **dict.fromkeys(("Answer", "BadInput", "Kept", "Model", "Tensor"), "batchwright.model"),
        **dict.fromkeys(("InferenceError", "Pipeline"), "batchwright.pipeline"),
        "Profile": "policies.profile",
        **dict.fromkeys(("Launch", "Policy", "State", "Wait"), "policies.types"),
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from batchwright.own_packages import OwnPackages

        sys.meta_path.insert(0, OwnPackages)
        try:
            value = getattr(import_module(_MODULES[name]), name)
        finally:
            sys.meta_path.remove(OwnPackages)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*globals(), *__all__]

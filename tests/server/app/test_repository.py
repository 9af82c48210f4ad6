"""The model repository: policies that are swapped while a revision is loaded."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from policies.catalog import Chosen, choose
from server.app import repository
from server.app.backend import Revision
from server.app.repository import Repository
from tests.support.fakes import STEPS


def test_a_policy_that_is_swapped_while_another_swap_is_followed_holds_on_all_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatchers = [SimpleNamespace(chosen={"m": choose("greedy", STEPS)}) for _ in range(2)]
    dispatchers[1].chosen["m"] = choose("static:2", STEPS)
    staged: Any = [(each, Revision(None, choose("greedy", STEPS))) for each in dispatchers]  # type: ignore[arg-type]

    def choose_while_swapped(*arguments: Any) -> Chosen:
        for each in dispatchers:
            each.chosen["m"] = choose("static:3", STEPS)
        return choose(*arguments)

    monkeypatch.setattr(repository, "choose", choose_while_swapped)
    asyncio.run(Repository._follow_swaps("m", staged))
    assert [loaded.chosen.spec for _, loaded in staged] == ["static:3", "static:3"]

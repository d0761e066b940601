"""Policies by name."""

from __future__ import annotations

import pytest

from nereus.errors import ConfigError
from nereus.sim.policies.named import POLICIES, SYNCHRONOUS, named, named_synchronous


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_is_known_under_the_name_that_it_has_itself(name: str) -> None:
    policy = named(name)
    assert policy.name == name
    assert policy.source


@pytest.mark.parametrize("name", sorted(SYNCHRONOUS))
def test_so_is_a_policy_of_synchronous_workflows(name: str) -> None:
    policy = named_synchronous(name)
    assert policy.name == name
    assert policy.source


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="nereus") as refused:
        named("nereid")
    assert "nereid" in str(refused.value)

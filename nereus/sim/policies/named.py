"""Which policy is meant by a name?

Owner: commands that simulate or compare. Each entry makes a fresh policy. Invariants (tests/sim/test_named.py): a
policy is known under the name that it has itself; a name that nobody has is refused with those that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from nereus.errors import ConfigError
from nereus.sim.policies.checkpoint_restart import CheckpointRestart
from nereus.sim.policies.clairvoyant import Clairvoyant
from nereus.sim.policies.dynarl import DynaRL
from nereus.sim.policies.every_k import EveryK
from nereus.sim.policies.fixed_dp import FixedDP
from nereus.sim.policies.foresight import Foresight
from nereus.sim.policies.fully_async import FullyAsync
from nereus.sim.policies.laminar import Laminar
from nereus.sim.policies.one_step_off import OneStepOff
from nereus.sim.policies.openrlhf_style import OpenRLHFStyle
from nereus.sim.policies.verl_style import VerlStyle
from nereus.sim.policies.whole_restart import WholeRestart
from nereus.sim.policy import Given, Nereus, Policy, SynchronousPolicy

Made = TypeVar("Made")

POLICIES: dict[str, Callable[[], Policy]] = {
    "nereus": Nereus,
    "given": Given,
    "laminar": Laminar,
    "one_step_off": OneStepOff,
    "fully_async": FullyAsync,
    "checkpoint_restart": CheckpointRestart,
    "whole_restart": WholeRestart,
    "clairvoyant": Clairvoyant,
    "fixed_dp": FixedDP,
    "every_k": EveryK,
    "dynarl": DynaRL,
}

SYNCHRONOUS: dict[str, Callable[[], SynchronousPolicy]] = {
    "nereus": Nereus,
    "fixed_dp": FixedDP,
    "every_k": EveryK,
    "dynarl": DynaRL,
    "clairvoyant": Foresight,
    "verl_style": VerlStyle,
    "openrlhf_style": OpenRLHFStyle,
}
"""Of synchronous workflows."""


def named(name: str) -> Policy:
    """Return the policy that is called ``name``; ``ConfigError`` if there is none."""
    return _known(POLICIES, name)()


def named_synchronous(name: str) -> SynchronousPolicy:
    """Return the policy of synchronous workflows that is called ``name``; ``ConfigError`` if there is none."""
    return _known(SYNCHRONOUS, name)()


def _known(policies: Mapping[str, Made], name: str) -> Made:
    if name not in policies:
        remedy = f"name one of {', '.join(sorted(policies))}"
        raise ConfigError(f"no policy is called {name}", where="policies", remedy=remedy)
    return policies[name]

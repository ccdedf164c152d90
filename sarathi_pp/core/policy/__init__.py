"""Policies, which choose the tokens that run next. Each has a file of its own. Their names are in registry.py."""

from sarathi_pp.core.policy.class_path import module_being_imported
from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.registry import POLICIES
from sarathi_pp.core.policy.spec import PolicySpec, parse_policy, parse_recorded, with_tbt_slo
from sarathi_pp.core.policy.view import Grant, Limits, Policy, SequenceView, View

__all__ = [
    "POLICIES",
    "Grant",
    "Limits",
    "Policy",
    "PolicySpec",
    "SequenceView",
    "View",
    "make_policy",
    "module_being_imported",
    "parameter",
    "parse_policy",
    "parse_recorded",
    "with_tbt_slo",
]


def make_policy(text: str) -> Policy:
    """Return the policy that the text names. Raises ConfigError like `parse_policy`."""
    return parse_policy(text).make()

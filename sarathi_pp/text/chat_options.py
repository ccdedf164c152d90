"""The settings with which a chat template renders one conversation."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sarathi_pp.errors import RowError

# Names that are no variables of a template: arguments of transformers' `apply_chat_template`.
_RESERVED = (
    *("chat_template", "conversation", "conversations", "messages", "tools", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask", "tokenize", "sanitize_control_tokens"),
)
# Most names of a template that an error lists.
_MOST_LISTED = 20


def check_variables(variables: Mapping[str, object]) -> None:
    """Raise RowError (`invalid_parameter`) if a name cannot be that of a template's own variable."""
    for name in variables:
        if name in _RESERVED:
            what = f"chat_template_kwargs has {name}"
            raise RowError("invalid_parameter", f"{what}; it must have variables of the template only")
        if not name.isidentifier():
            what = f"chat_template_kwargs has the name {json.dumps(name):.60}"
            raise RowError("invalid_parameter", f"{what}; use an identifier, such as enable_thinking, or remove it")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The settings with which a chat template renders one conversation, as in transformers' `apply_chat_template`.

    Args:
        add_generation_prompt: end the text with the opening of the model's answer.
        continue_final_message: leave the last message open, so that the model continues it. Only one of both is set.
        tools: functions that the model may call, in OpenAI's form. Empty: none.
        variables: the template's own variables, such as `enable_thinking`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] = ()
    variables: Mapping[str, object] = field(default_factory=dict)

    def with_defaults(self, variables: Mapping[str, object]) -> ChatOptions:
        """Return these settings with more variables. Those that are set here win."""
        return replace(self, variables={**variables, **self.variables}) if variables else self

    def check_names(self, used: Collection[str]) -> None:
        """Check that the template uses the tools and each variable, instead of ignoring them.

        Args:
            used: names that the template takes from outside.

        Raises:
            RowError: `unsupported_parameter`, or `invalid_parameter` for a name that is no variable.
        """
        check_variables(self.variables)
        for name in (*(["tools"] if self.tools else []), *self.variables):
            if name not in used:
                reason = f"the model's chat template does not use {name}; it uses {_listed(used)}; remove {name}"
                raise RowError("unsupported_parameter", reason)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `render_jinja_template` for these settings."""
        return {
            **self.variables,
            "tools": list(self.tools) or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


def _listed(used: Collection[str]) -> str:
    """Return the names of a template's own variables for an error message."""
    names = sorted(set(used).difference(_RESERVED))
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "") or "no variable"

"""The settings with which a chat template renders one conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sarathi_pp.errors import RowError

# Names that are no variables of a template: arguments of transformers' `apply_chat_template`.
_RESERVED = (
    *("chat_template", "conversation", "conversations", "messages", "tools", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask", "tokenize", "sanitize_control_tokens"),
)


def check_variables(variables: Mapping[str, object]) -> None:
    """Raise RowError (`invalid_parameter`) if a name cannot be that of a template's own variable."""
    for name in _RESERVED:
        if name in variables:
            what = f"chat_template_kwargs has {name}"
            raise RowError("invalid_parameter", f"{what}; it must have variables of the template only")


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

    def check_template(self, template: str) -> None:
        """Check that the template uses the tools and each variable, instead of ignoring them.

        Raises:
            RowError: `unsupported_parameter`, or `invalid_parameter` for a name that is no variable.
        """
        check_variables(self.variables)
        for name in (*(["tools"] if self.tools else []), *self.variables):
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise RowError("unsupported_parameter", f"the model's chat template does not use {name}; remove {name}")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `render_jinja_template` for these settings."""
        return {
            **self.variables,
            "tools": list(self.tools) or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

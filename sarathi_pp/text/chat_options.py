"""The settings with which a chat template renders one conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sarathi_pp.errors import RowError


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

    def check_template(self, template: str) -> None:
        """Raise RowError (`unsupported_parameter`) if the template would ignore the tools or a variable."""
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

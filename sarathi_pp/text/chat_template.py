"""Chat templates, rendered in a separate process: each template is a program by the model's author.

encode_chat -> Renderer -> TemplateProcess -> text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sarathi_pp.errors import RowError
from sarathi_pp.text.chat_options import ChatOptions
from sarathi_pp.text.template_process import TemplateError, TemplateProcess

# Limits of one conversation: bytes of its text, seconds of CPU time, bytes of memory.
MAX_RENDERED_BYTES = 16 * 2**20
MAX_RENDER_S = 10.0
# This is in addition to the memory that the child has before the first conversation. A conversation of 16 MiB fits into
# it several times.
MAX_RENDER_MEMORY_BYTES = 512 * 2**20

Message = Mapping[str, object]
_NO_OPTIONS = ChatOptions()


class Renderer:
    """A renderer of conversations, one at a time."""

    def __init__(self) -> None:
        self._process = TemplateProcess(MAX_RENDER_S, MAX_RENDER_MEMORY_BYTES, MAX_RENDERED_BYTES)
        self._variables: dict[str, frozenset[str]] = {}  # by template, of which a model has few

    @property
    def pid(self) -> int | None:
        """Return the number of the process that renders; None before the first conversation."""
        return self._process.pid

    def variables(self, template: str) -> frozenset[str]:
        """Return the names that a template takes from outside, such as `messages` and its own variables.

        Raises:
            RowError: `chat_template_error`. The template is no Jinja template, or took more than `render` allows.
        """
        if template not in self._variables:
            self._variables[template] = frozenset(self._ask({"variables": template}))
        return self._variables[template]

    def render(
        self,
        template: str,
        messages: Sequence[Message],
        special_tokens: Mapping[str, object],
        options: ChatOptions = _NO_OPTIONS,
    ) -> str:
        """Return the text of a conversation.

        Args:
            template: source of the Jinja template.
            special_tokens: text of each special token by name, such as `bos_token`. The template may use them.

        Raises:
            RowError: `chat_template_error`. The template refused or failed, computed for more than MAX_RENDER_S, took
                more than MAX_RENDER_MEMORY_BYTES or wrote more than MAX_RENDERED_BYTES.
        """
        asked = {
            "template": template,
            # Keys with None are left out, as in transformers, because templates only ask whether a key is present.
            "messages": [{key: value for key, value in one.items() if value is not None} for one in messages],
            "variables": {**special_tokens, **options.arguments()},
        }
        text: str = self._ask({"render": asked})
        return text

    def _ask(self, question: Mapping[str, object]) -> Any:
        try:
            return self._process.ask(question)
        except TemplateError as error:
            raise RowError("chat_template_error", f"the chat template failed: {error}") from error

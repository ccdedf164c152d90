"""Chat templates and response templates in the style of published models, and tokenizers that have them."""

from __future__ import annotations

from typing import Any

from tests.text.test_tokenizer import byte_level

# Like Qwen3: tools as JSON lines, calls between tags, and an empty thought if thinking is switched off.
QWEN = """
{%- if tools %}<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""
QWEN_RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
# Like gpt-oss: channels, and an effort of reasoning.
CHANNELS = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- for tool in tools or [] %}<|start|>developer<|message|>type {{ tool.function.name }}<|end|>{% endfor %}
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|><|start|>assistant{% endif %}
{%- for call in message.tool_calls or [] %} to=functions.{{ call.function.name }}<|channel|>commentary json
{{- '<|message|>' + (call.function.arguments | tojson) }}<|call|>{% else %}<|message|>{{ message.content }}<|end|>
{%- endfor %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CHANNELS_RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"], "content": "text"},
        "tool_calls": {
            "open_pattern": r" to=functions\.(?P<name>\w+)<\|channel\|>commentary json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
# The turns after a tool was called, with arguments as the library wants them.
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1+2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abc", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
    },
    {"role": "tool", "tool_call_id": "abc", "name": "add", "content": "3"},
]
STYLES = {"qwen": (QWEN, QWEN_RESPONSE), "channels": (CHANNELS, CHANNELS_RESPONSE)}


def chat_backend(style: str, *, responses: bool = True) -> Any:
    """Return a byte-level tokenizer with the templates of a style."""
    backend = byte_level()
    backend.chat_template, template = STYLES[style]
    backend.response_template = template if responses else None
    return backend

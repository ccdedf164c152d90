"""Pipeline-parallel LLM inference whose bubbles are measured.

    from sarathi_pp import LLM, SamplingParams
    outputs = LLM("path/to/model", stages=2).generate(["12+30="], SamplingParams(max_new_tokens=8))

Importing this package loads neither torch nor transformers. Making an LLM loads both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sarathi_pp.config import RunConfig
from sarathi_pp.errors import RowError, SarathiError
from sarathi_pp.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sarathi_pp.api import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "RowError", "RunConfig", "SamplingParams", "SarathiError"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "CompletionOutput", "RequestOutput"):
        from sarathi_pp import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

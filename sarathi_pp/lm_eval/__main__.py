"""lm-eval's command, with this model known to it: `python -m sarathi_pp.lm_eval run --model sarathi_pp ...`.

Versions of lm-eval that look for entry points find the model without this.
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import sarathi_pp.lm_eval.model  # noqa: F401  # importing it makes its name known to lm-eval

if __name__ == "__main__":
    cli_evaluate()

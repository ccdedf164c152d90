"""Make the model for comparisons with other engines: 254M parameters with random weights.

python examples/benchmarks/make_254m.py /tmp/m254
"""

from __future__ import annotations

from pathlib import Path

import click
from measure_300m import make_checkpoint


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def main(directory: Path, dtype: str) -> None:
    make_checkpoint(directory, intermediate_size=2816, dtype=dtype)


if __name__ == "__main__":
    main()

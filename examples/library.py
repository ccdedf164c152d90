"""The Python API: a model on two stages, prompts in, answers out.

    python examples/library.py
    torchrun --nproc-per-node 2 examples/library.py

Shows `generate` with one set of parameters for all prompts and with one for each, `stream`, and `report`. A prompt that
cannot run gives an output with an error, and leaves the others alone. Under torchrun rank 0 alone gets answers.
"""

from pathlib import Path

from sarathi_pp import LLM, SamplingParams

MODEL = Path(__file__).parent / "tiny-adder"

# The model adds two numbers after some sums that show it the form.
SHOWN = "17+26=43\n58+4=62\n90+8=98\n311+45=356\n7+7=14\n"
PROMPTS = [SHOWN + question for question in ("37+48=", "64+128=", "5+9=")]
GREEDY = SamplingParams(max_tokens=8)

# `stages=2` starts one worker process, or takes the processes of torchrun. This process is the first stage. Workers do
# not import this file, so it needs no `if __name__ == "__main__":`.
with LLM(MODEL, stages=2, kv_cache_memory_bytes="16MiB") as llm:
    for output in llm.generate(PROMPTS, GREEDY):
        [answer] = output.outputs
        print(f"{PROMPTS[output.index].splitlines()[-1]}{answer.text}  ({answer.finish_reason})")

    # A sample depends on its seed and its position in the output, so a second run gives the same text.
    sampled = SamplingParams(max_tokens=8, temperature=1.5, top_k=5, seed=1)
    for output in llm.generate(PROMPTS, [GREEDY, sampled, sampled])[1:]:
        print("sampled:", output.outputs[0].text)

    # The model has no token 100000.
    mixed: list[str | list[int]] = [[100_000], PROMPTS[0]]
    for output in llm.generate(mixed, GREEDY):
        print("refused:" if output.error else "next to it:", output.error or output.outputs[0].text)

    # Each answer is there when it is complete. The first one is enough here, and the others are cancelled.
    for output in llm.stream(PROMPTS * 20, GREEDY):
        print(f"first of {len(PROMPTS) * 20}: prompt {output.index}, after {output.metrics['e2el_s']:.3f} s")
        break

    report = llm.report()
    if report is not None:
        print(f"{report['completed']} answers, {report['total_tokens_per_s']:.0f} tokens/s")
        print(f"bubble {report['bubble_ratio']:.1%}")

"""The Python API: a model on two stages, prompts in, answers out.

    python examples/library.py

The first answers come from `LLM.generate` with one set of parameters for all prompts, the next with one for each. A
prompt that cannot run gives an output with an error, and leaves the others alone.
"""

from pathlib import Path

from sarathi_pp import LLM, SamplingParams

MODEL = Path(__file__).parent / "tiny-adder"

# It adds two numbers, after some sums that show how.
SHOWN = "17+26=43\n58+4=62\n90+8=98\n311+45=356\n7+7=14\n"


def main() -> None:
    prompts = [SHOWN + asked for asked in ("37+48=", "64+128=", "5+9=")]
    # `stages=2` starts one worker process; this process is the first stage. Leaving the block ends them.
    with LLM(str(MODEL), stages=2, kv_cache_memory_bytes=16 << 20) as llm:
        # Greedy, as the model's generation_config.json does not ask for sampling.
        for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(max_new_tokens=8)), strict=True):
            [answer] = output.outputs
            print(f"{prompt.splitlines()[-1]}{answer.text}  ({answer.finish_reason})")

        # A draw depends on the seed, the prompt's place in the list and the position: run it twice, get it twice.
        sampled = SamplingParams(max_new_tokens=8, temperature=1.5, top_k=5, seed=1)
        outputs = llm.generate(prompts, [SamplingParams(max_new_tokens=8), sampled, sampled])
        print("sampled:", *(output.outputs[0].text for output in outputs[1:]))

        # The model has no token 100000.
        mixed: list[str | list[int]] = [[100_000], prompts[0]]
        [refused, fine] = llm.generate(mixed, SamplingParams(max_new_tokens=8))
        assert refused.error is not None
        print("refused:", refused.error.code, "- and beside it:", fine.outputs[0].text)


# Workers import this file anew: without this line each of them would start workers.
if __name__ == "__main__":
    main()

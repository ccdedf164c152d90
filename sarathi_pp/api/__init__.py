"""The Python API. Its names are those that users of other engines know.

    with LLM("path/to/model", stages=2) as llm:
        for output in llm.generate(["12+30=", "1+1="], SamplingParams(max_new_tokens=8)):
            print(output.prompt, output.outputs[0].text)

`stages=N` starts N - 1 worker processes on this machine. This process is the coordinator and the first stage. With
`replicas=R` there are R such pipelines, which share the prompts.
In a script under torchrun, each process makes the same LLM and is one stage. Rank 0 gets the answers. On the other
ranks the first call computes the stage until rank 0 closes its LLM, and calls return no answers.
"""

from sarathi_pp.api.llm import LLM
from sarathi_pp.api.outputs import CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

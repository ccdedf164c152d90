"""Train examples/tiny-adder: a 5-layer Llama that adds two numbers after a long list of worked sums.

A prompt is lines such as "17+26=43", followed by a question such as "37+48=". The model answers "85" and stops. The
list makes prompts long enough to be cut into chunks, and every reader can check the answer.

- Each character is one token. The line end is the end-of-sequence token. It ends each worked sum of a prompt, and the
  answer. So the model learns from every line to stop.
- Both numbers of a sum are from 0 to 999. One pair in sixteen is held out, in both orders. It is never trained on,
  neither as a question nor as a worked sum. Accuracy is measured only on held-out questions.
- Training rows are packed with sums. Only the answers count in the loss, because the questions are random digits. Short
  rows teach addition cheaply. Long rows then teach the model to read only the last of a hundred lines. Prompts that are
  longer than the longest row get wrong answers, so the configuration allows 1,152 tokens (about 100 worked sums).
- Muon trains the matrices of the layers, and AdamW the other weights. In one short trial with equal steps, Muon reached
  a loss of 0.80 and AdamW alone 1.20. Neither was tuned further.
"""

import json
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path

import click
import torch
import transformers
from record import EXAMPLES, describe_cpu
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = {text: index for index, text in enumerate(["<unk>", "<bos>", "<pad>", "\n", *"0123456789+="])}
BOS, PAD, EOS = VOCABULARY["<bos>"], VOCABULARY["<pad>"], VOCABULARY["\n"]
IGNORED = -100  # torch's cross entropy ignores this label
TOKENS_PER_STEP = 2304
MUON_RATE, ADAMW_RATE, WARMUP_STEPS = 0.02, 5e-3, 50


@dataclass(frozen=True)
class Phase:
    """A number of steps on rows of one length, in tokens."""

    steps: int
    row_tokens: int


# The last phase covers the longest prompt tested: 100 worked sums of about 11 tokens.
CURRICULUM = (Phase(steps=1000, row_tokens=64), Phase(steps=700, row_tokens=256), Phase(steps=900, row_tokens=1152))


def is_held_out(a: int, b: int) -> bool:
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 16 == 0


def draw_number(rng: random.Random) -> int:
    """Draw a number from 0 to 999. One and two digits are more frequent than in an even draw."""
    low, high = rng.choices([(0, 9), (10, 99), (100, 999)], weights=[0.10, 0.25, 0.65])[0]
    return rng.randint(low, high)


def draw_pair(rng: random.Random, held_out: bool) -> tuple[int, int]:
    while True:
        a, b = draw_number(rng), draw_number(rng)
        if is_held_out(a, b) == held_out:
            return a, b


def draw_prompt(rng: random.Random, fewest: int, most: int) -> tuple[str, str, str]:
    """Draw a question ("37+48"), its prompt and its answer. The prompt has `fewest` to `most` worked sums."""
    worked = [draw_pair(rng, held_out=False) for _ in range(rng.randint(fewest, most))]
    a, b = draw_pair(rng, held_out=True)
    return f"{a}+{b}", "".join(f"{x}+{y}={x + y}\n" for x, y in worked) + f"{a}+{b}=", str(a + b)


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<bos>", "<pad>", "\n")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="\n",
        pad_token="<pad>",
        model_max_length=1152,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1152,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.0625,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False, max_new_tokens=8
    )
    return model


def packed_row(rng: random.Random, row_tokens: int) -> tuple[list[int], list[int]]:
    """Return token ids and labels of consecutive sums. The last sum may be cut."""
    ids, labels = [BOS], [IGNORED]
    while len(ids) < row_tokens:
        a, b = draw_pair(rng, held_out=False)
        question = [VOCABULARY[character] for character in f"{a}+{b}="]
        answer = [VOCABULARY[character] for character in f"{a + b}\n"]
        ids += question + answer
        labels += [IGNORED] * len(question) + answer
    return ids[:row_tokens], labels[:row_tokens]


def training_batches(rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    for phase in CURRICULUM:
        for _ in range(phase.steps):
            rows = [packed_row(rng, phase.row_tokens) for _ in range(TOKENS_PER_STEP // phase.row_tokens)]
            yield torch.tensor([ids for ids, _ in rows]), torch.tensor([labels for _, labels in rows])


def learning_rate_scale(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.01 + 0.99 * (1 + cos(pi * step / steps)) / 2)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, rng: random.Random) -> float:
    """Run the curriculum, and return the seconds that it took."""
    started_s = time.perf_counter()
    optimizers = build_optimizers(model)
    steps = sum(phase.steps for phase in CURRICULUM)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_scale(step, steps))
        for optimizer in optimizers
    ]
    model.train()
    for step, (ids, labels) in enumerate(training_batches(rng), start=1):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step % 50 == 0 or step == steps:
            elapsed_s = time.perf_counter() - started_s
            click.echo(f"step {step:4}/{steps}  row {ids.shape[1]:4}  loss {loss.item():.4f}  {elapsed_s:4.0f} s")
    return time.perf_counter() - started_s


@torch.inference_mode()
def measure_accuracy(directory: Path, num_tested: int, rng: random.Random) -> float:
    """Return the share of held-out sums that the saved checkpoint answers exactly with greedy decoding.

    The end of sequence after the answer must be right too.
    """
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    num_right = 0
    for _ in range(num_tested):
        question, prompt, answer = draw_prompt(rng, fewest=30, most=100)
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        num_right += text == answer + "\n"
        if text != answer + "\n":
            click.echo(f"wrong: {question}={text!r}, not {answer}")
    return num_right / num_tested


def write_prompts(path: Path, rng: random.Random, num_prompts: int) -> None:
    prompts: dict[str, str] = {}
    while len(prompts) < num_prompts:
        question, prompt, _ = draw_prompt(rng, fewest=20, most=90)
        prompts[question] = prompt
    lines = [json.dumps({"id": question, "prompt": prompt}) for question, prompt in prompts.items()]
    path.write_text("\n".join(lines) + "\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=EXAMPLES / "tiny-adder", help="Checkpoint directory.")
@click.option("--prompts", type=click.Path(path_type=Path), default=EXAMPLES / "prompts.jsonl", help="Prompts file.")
@click.option("--prompts-only", is_flag=True, help="Write only the prompts; do not train.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True, help="More threads may change the last bits.")
@click.option("--num-tested", type=int, default=512, show_default=True, help="Held-out sums of the final test.")
def main(out: Path, prompts: Path, prompts_only: bool, seed: int, threads: int, num_tested: int) -> None:
    """Train the tiny adder, test it on sums that it has never seen, and write prompts for it."""
    write_prompts(prompts, random.Random(f"prompts {seed}"), num_prompts=24)
    if prompts_only:
        return
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = build_model()
    train_seconds = train(model, random.Random(f"train {seed}"))
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    accuracy = measure_accuracy(out, num_tested, random.Random(f"test {seed}"))
    record = {
        "accuracy": accuracy,
        "num_tested": num_tested,
        "train_seconds": round(train_seconds, 1),
        "steps": sum(phase.steps for phase in CURRICULUM),
        "parameters": model.num_parameters(),
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{describe_cpu()}, {threads} thread(s)",
        "command": f"python examples/benchmarks/train_tiny_adder.py --seed {seed} --threads {threads}",
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    click.echo(f"{accuracy:.2%} of {num_tested} unseen sums right after {train_seconds:.0f} s of training")


if __name__ == "__main__":
    main()

"""Errors for model directories and repositories that do not hold a causal language model in a supported form.

Quantised files, adapters, encoders and image pipelines have folders of their own. Their file names, or the class name
in config.json, reveal the kind. So an error can name the kind and the remedy. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from sarathi_pp.checkpoint.facts.families import FAMILIES, LEFT_OUT
from sarathi_pp.errors import InputError, MissingError, SarathiError, UnsafeError, UnsupportedModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OF_TRAINING = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt"}
# File names that mark a whole repository as another kind, whatever other files it has.
_REPOSITORIES = {
    "model_index.json": "a diffusers pipeline, which makes images",
    "modules.json": "an embedding model of sentence-transformers, which gives vectors instead of text",
    "config_sentence_transformers.json": "an embedding model of sentence-transformers, which gives vectors",
    "hf_quant_config.json": "a quantised model (ModelOpt)",
}
# Files in which older tools keep the quantisation settings, which are read only from config.json.
_QUANTISED = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
# Endings of weight files in formats that are not read.
_FORMATS = {
    ".gguf": "GGUF, the format of llama.cpp",
    ".onnx": "ONNX",
    ".msgpack": "Flax",
    ".h5": "TensorFlow or Keras",
    ".keras": "Keras",
    ".pb": "TensorFlow",
    ".npz": "NumPy or MLX",
    ".nemo": "NeMo",
    ".tflite": "TensorFlow Lite",
}
# Endings of transformers' class names.
_CLASSES = {
    "ForSequenceClassification": "a classifier, which gives labels instead of text",
    "ForTokenClassification": "a classifier of tokens, which gives labels instead of text",
    "ForQuestionAnswering": "an extractor of answers, which marks a part of its input",
    "ForMultipleChoice": "a classifier, which gives labels instead of text",
    "ForMaskedLM": "an encoder, which fills in masked tokens",
    "ForPreTraining": "an encoder with the heads of its training",
    "ForImageClassification": "an image classifier",
    "ForSpeechSeq2Seq": "a speech model",
    "ForCTC": "a speech model",
    "RewardModel": "a reward model, which gives scores instead of text",
    "VisionModel": "an image encoder",
    "Model": "a model without an LM head, as encoders and embedding models are",
}
# Keys of config.json that only models of several modalities have.
MODALITIES = ("text_config", "vision_config", "audio_config", "speech_config", "thinker_config", "llm_config")
_LIST = "`sarathi-pp doctor --models` lists the supported models"


def refuse_path(path: str, suffix: str, *, option: str = "--model") -> SarathiError:
    """Return the error for a path that is a file although a directory is expected.

    Args:
        suffix: ending of the file's name, with its dot.
        option: the option that names the path.
    """
    if suffix in _FORMATS:
        return UnsupportedModelError(f"{option} {path} is {_FORMATS[suffix]}, which is not read; {_safetensors()}")
    return InputError(f"{option} {path} is a file; give the directory that holds it, with config.json and the weights")


def check_kind(where: str, names: Collection[str], base_model: object = None) -> None:
    """Raise if the file names show that a directory or repository is not a model.

    Args:
        where: directory or repository, for the message.
        names: names of its files; those in folders with their path.
        base_model: name in adapter_config.json of the model that it adapts; None if there is no name.

    Raises:
        UnsupportedModelError: it is an adapter, a quantised model or a model of another kind.
        MissingError: there is no config.json.
    """
    root = {name for name in names if "/" not in name}
    if any(name == ADAPTER_FILE or name.startswith("adapter_model.") for name in root):
        raise UnsupportedModelError(_adapter(where, bool(root & {SINGLE_FILE, INDEX_FILE}), base_model))
    for name, kind in _REPOSITORIES.items():
        if name in root:
            raise UnsupportedModelError(f"{where} is {kind} ({name}); only causal language models are supported")
    if "config.json" not in root:
        raise _no_config(where, root, names)


def refuse_quantised(where: str, names: Collection[str]) -> None:
    """Raise UnsupportedModelError if files show that the weights are quantised, although config.json does not name it.

    Args:
        where: directory or repository, for the message.
        names: names of its files.
    """
    for name, method in _QUANTISED.items():
        if name in names:
            raise UnsupportedModelError(
                f"{where}: {name} is there, so the weights are quantised ({method}), and config.json has no "
                f"quantization_config; use a checkpoint whose config.json has one, or the unquantised model"
            )


def check_weights(where: str, names: Collection[str]) -> None:
    """Raise if a model with a config.json has no weights that can be read.

    Args:
        where: directory or repository, for the message.
        names: names of its files.

    Raises:
        UnsafeError: the weights are pickled.
        UnsupportedModelError: the weights are in another format.
        MissingError: there are no weights.
    """
    root = {name for name in names if "/" not in name}
    if root & {SINGLE_FILE, INDEX_FILE}:
        return
    if found := _ending(root - _OF_TRAINING, _PICKLED):
        raise UnsafeError(
            f"{where}: the weights are pickled ({found}), and loading them would run code. Convert them: load the "
            f"model with transformers in an environment you trust and call save_pretrained(directory), which writes "
            f"safetensors"
        )
    if found := _ending(root, tuple(_FORMATS)):
        kind = next(kind for suffix, kind in _FORMATS.items() if found.endswith(suffix))
        raise UnsupportedModelError(f"{where}: the weights are {kind} ({found}), which is not read; {_safetensors()}")
    shards = sorted(name for name in root if name.endswith(".safetensors"))
    others = f"; {shards[0]} cannot be used without its index" if shards else ""
    raise MissingError(f"{where}: neither {SINGLE_FILE} nor {INDEX_FILE} is there{others}; download the model again")


def refuse_class(where: str, architecture: str, values: Mapping[str, object]) -> UnsupportedModelError:
    """Return the error for a class name that is not in FAMILIES. It names the kind and the nearest supported class.

    Args:
        where: directory or repository, for the message.
        architecture: class name in config.json.
        values: the keys of config.json with their values.
    """
    modalities = [key for key in MODALITIES if values.get(key)]
    endings = (kind for ending, kind in _CLASSES.items() if architecture.endswith(ending))
    if values.get("is_encoder_decoder"):
        what = "an encoder-decoder model, and those are not supported"
    elif modalities:
        what = f"a multi-modal model ({modalities[0]}), and those are not supported; use the text model alone"
    elif not architecture.endswith("LMHeadModel") and (kind := next(endings, None)) is not None:
        what = f"{kind}; only causal language models are supported"
    elif reason := LEFT_OUT.get(architecture):
        what = f"not supported: {reason}"
    else:
        what = "not supported"
    return UnsupportedModelError(f"{where}: {architecture} is {what}{_nearest(architecture, values.get('model_type'))}")


def _nearest(architecture: str, model_type: object) -> str:
    """Return a sentence that names the supported class most like this one, if there is one."""
    same_type = [family.architecture for family in FAMILIES.values() if family.model_type == model_type]
    stems = {name.removesuffix("ForCausalLM"): name for name in FAMILIES}
    alike = difflib.get_close_matches(architecture.removesuffix("ForCausalLM"), stems, n=1, cutoff=0.6)
    near = same_type or [stems[stem] for stem in alike]
    return f". The nearest that is supported: {near[0]}; {_LIST}" if near else f". {_LIST[0].upper()}{_LIST[1:]}"


def _safetensors() -> str:
    return "give a directory with config.json and safetensors weights, as the model was first published"


def _adapter(where: str, has_weights: bool, base_model: object) -> str:
    of = f" of {base_model}" if isinstance(base_model, str) and base_model else ""
    merge = "peft's merge_and_unload() merges it into its base model and save_pretrained(directory) writes the result"
    if has_weights:
        return (
            f"{where} has an adapter{of} next to the weights, which would be ignored. {merge}; to run the weights "
            f"alone, remove the adapter_* files from a copy"
        )
    return f"{where} is an adapter (LoRA or alike){of}, not a model: {merge}"


def _no_config(where: str, root: Collection[str], names: Collection[str]) -> SarathiError:
    if found := _ending(root, tuple(_FORMATS)):
        kind = next(kind for suffix, kind in _FORMATS.items() if found.endswith(suffix))
        return UnsupportedModelError(f"{where} holds {kind} ({found}), which is not read; {_safetensors()}")
    folders = sorted(name.removesuffix("/config.json") for name in names if name.endswith("/config.json"))
    if folders:
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        return MissingError(f"{where}: config.json is not there, but in its folder {folders[0]}{more}; give that one")
    if not names:
        return MissingError(f"{where} is empty; download the model again")
    if "params.json" in root or any(name.startswith("consolidated.") for name in root):
        return UnsupportedModelError(
            f"{where} holds weights in their author's own format (consolidated.*, params.json); use the repository "
            f"in the format of transformers, with a config.json"
        )
    if found := _ending(root, _PICKLED):
        return UnsupportedModelError(
            f"{where} holds a PyTorch checkpoint ({found}) without config.json; {_safetensors()}"
        )
    return MissingError(f"{where}: config.json is not there; is this a model directory?")


def _ending(names: Collection[str], suffixes: tuple[str, ...]) -> str | None:
    """Return the first name with one of these endings."""
    return next((name for name in sorted(names) if name.lower().endswith(suffixes)), None)

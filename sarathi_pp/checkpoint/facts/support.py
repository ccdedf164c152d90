"""A check whether a model is supported. It reads only the model's files, without torch, before any rank starts.

Models for which tests do not prove exact results are refused: a wrong answer that looks like text is worse than none.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sarathi_pp.checkpoint.entries import weight_entries
from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.families import FAMILIES, Family
from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache, StateCache, plain_caches
from sarathi_pp.checkpoint.facts.ranges import check_ranges
from sarathi_pp.checkpoint.facts.state_caches import LAYER_TYPES, STATE_SIZES, own_caches
from sarathi_pp.checkpoint.facts.wrapper import text_checkpoint
from sarathi_pp.checkpoint.files import (
    Checkpoint,
    TensorEntry,
    open_checkpoint,
    read_json,
    reading,
    refuse_pointers,
    safe_path,
)
from sarathi_pp.checkpoint.kind import (
    ADAPTER_FILE,
    MODALITIES,
    check_kind,
    check_weights,
    refuse_class,
    refuse_path,
    refuse_quantised,
)
from sarathi_pp.checkpoint.quantised.scheme import Scheme, read_scheme
from sarathi_pp.checkpoint.surplus import draft_layers, refuse_types, surplus_note
from sarathi_pp.errors import ConfigError, InputError, MissingError, UnsupportedModelError

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LATENT_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# These types are fixed tables. Dynamic and longrope depend on the longest position of the whole batch in transformers.
# So a sequence's result would depend on the sequences it is batched with. For longrope, see Family.longrope_after.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# In a family with longrope, transformers reads yarn as an old name of it.
_LONGROPE = ("longrope", "yarn")
# Families with latent attention whose rotary table does not follow head_dim in config.json.
_OWN_ROTARY = ("deepseek_v2", "mistral4")
# Bytes per tensor that the fingerprint covers.
_SAMPLE_BYTES = 256
# Said to the user if layers keep states.
WHY_NO_PREFIX_CACHE = "some layers keep one state per sequence, from whose middle no other sequence can continue"
# No kernel here computes in float64. float32 is precise enough for a language model's weights.
_DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model that planning needs.

    Attributes:
        num_heads: query heads of the attention.
        num_kv_heads: KV heads of the attention; 1 with latent attention.
        head_dim: channels of a key. With latent attention, those of a latent and of the rotary part.
        max_position_embeddings: most tokens of prompt and output together.
        dtype: float type to compute in, by torch's name. Most of the weights are stored in it.
        fingerprint: a digest, in hex digits. Two models have the same one if config.json, names, types, shapes and
            files of the tensors, and samples of their bytes are equal.
        softcap: attention bounds its scores by a soft cap.
        sinks: attention has sinks: one more logit per head in the softmax, without a key or a value.
        lm_head_size: number of inputs of the LM head; None if it is hidden_size.
        longrope_after: most tokens for which a sequence's rotary embeddings use the short factors; None if there is
            one table for all lengths. See Limits.longrope_after.
        quantised: how the stored weights are quantised, for the user; None if they are not.
        own_caches: caches of the layers, if some are no plain attention; empty otherwise.
        notes: sentences for the user about what is not used as it is stored.
    """

    model_type: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    tie_word_embeddings: bool
    fingerprint: str
    softcap: bool = False
    sinks: bool = False
    lm_head_size: int | None = None
    longrope_after: int | None = None
    quantised: str | None = None
    own_caches: tuple[LayerCache, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """The memory that each layer keeps of earlier tokens."""
        return self.own_caches or plain_caches(self.num_layers, self.num_kv_heads, self.head_dim)

    @property
    def latent(self) -> bool:
        """Return whether layers keep latents (MLA)."""
        return any(isinstance(cache, PagedCache) and cache.latent for cache in self.own_caches)

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state per sequence, so that each running sequence has a state slot."""
        return any(isinstance(cache, StateCache) for cache in self.own_caches)

    def max_model_len(self, asked: int | None) -> int:
        """Return the most tokens of prompt and output together in a run.

        Args:
            asked: the user's limit, in tokens; None for that of the model.

        Raises:
            ConfigError: `asked` is more than the model has positions.
        """
        if asked is not None and asked > self.max_position_embeddings:
            raise ConfigError(f"--max-model-len is {asked}; the model has {self.max_position_embeddings} positions")
        return asked or self.max_position_embeddings

    def prefix_cache(self, asked: str) -> str:
        """Return the mode of the prefix cache in a run: "off" if layers keep states, otherwise the one asked for.

        Raises:
            ConfigError: the user asks for a prefix cache, and layers keep states.
        """
        if not self.has_states:
            return asked
        if asked not in ("auto", "off"):
            raise ConfigError(
                f"--prefix-cache is {asked}; {WHY_NO_PREFIX_CACHE}. Give --prefix-cache off, or leave it out"
            )
        return "off"

    def sharded(self, size: int) -> ModelFacts:
        """Return the facts of one of `size` tensor shards, with its part of the heads.

        `check_shards` must accept the size, because heads are divided evenly.
        """
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=self.num_kv_heads // size)


def check_model(directory: Path) -> ModelFacts:
    """Return the facts of a supported model.

    Raises:
        MissingError: the directory, config.json, a weight file or a tensor does not exist.
        InputError: a file cannot be read.
        UnsupportedModelError: it is another kind of model, or not proven exact.
        UnsafeError: it has custom code, pickled weights or paths that leave the directory.
    """
    with reading(directory):
        names = _file_names(directory)
        config, family, scheme = _check_config(directory, names)
        refuse_pointers(directory)
        check_weights(str(directory), names)
        return _find_facts(config, family, scheme, open_checkpoint(directory))


def check_config(directory: Path, names: Collection[str]) -> None:
    """Raise what `check_model` would raise for a model's config.json and file names, before its weights are there.

    Args:
        names: all files of the model, those in folders with their path.
    """
    with reading(directory):
        config, family, _ = _check_config(directory, names)
        _find_sizes(config, family)
        check_weights(str(directory), names)


def _file_names(directory: Path) -> list[str]:
    """Return the names of a directory's files, and of the config.json files in its folders."""
    if directory.is_file():
        raise refuse_path(str(directory), directory.suffix)
    if not directory.is_dir():
        raise MissingError(f"{directory} is not a directory; give a model directory with a config.json")
    names = []
    for path in directory.iterdir():
        if not os.path.isdir(path):  # os.path raises nothing if access is denied
            names.append(path.name)
        elif os.path.isfile(path / "config.json"):
            names.append(f"{path.name}/config.json")
    return names


def describe_config(directory: Path) -> ModelFacts:
    """Return a model's facts from config.json alone. Missing weights are accepted.

    The dtype is the one in config.json. If it names none, the dtype is bfloat16 for quantised weights and float32 for
    others.

    Raises:
        InputError, MissingError, UnsafeError, UnsupportedModelError: see `check_model`.
    """
    with reading(directory):
        names = _file_names(directory)
        config, family, scheme = _check_config(directory, names)
        with suppress(MissingError):
            check_weights(str(directory), names)
        return ModelFacts(
            model_type=family.model_type,
            architecture=family.architecture,
            **_find_sizes(config, family),
            dtype=_named_dtype(config) or ("float32" if _title(scheme) is None else "bfloat16"),
            fingerprint=hashlib.sha256(safe_path(directory, "config.json").read_bytes()).hexdigest(),
            **_find_features(config, family),
            quantised=_title(scheme),
        )


def _check_config(directory: Path, names: Collection[str]) -> tuple[ConfigFile, Family, Scheme | None]:
    adapter = read_json(directory, ADAPTER_FILE) if (directory / ADAPTER_FILE).is_file() else {}
    check_kind(str(directory), names, adapter.get("base_model_name_or_path"))
    config = ConfigFile.read(directory)
    scheme = read_scheme(config)
    if scheme is None:
        refuse_quantised(str(directory), names)
    family = find_family(config)
    _refuse_release(config, family)
    _refuse_features(config)
    _refuse_rope(config, family)
    return config, family, scheme


def _find_sizes(config: ConfigFile, family: Family) -> dict[str, Any]:
    """Return the model's sizes from config.json, by the names of ModelFacts. Raise InputError."""
    check_ranges(config.path, config.values)
    num_layers = config.size(family.keys.get("num_hidden_layers", "num_hidden_layers"))
    _refuse_layer_types(config, family, num_layers)
    hidden_size = config.size(family.keys.get("hidden_size", "hidden_size"))
    num_heads, num_kv_heads = _heads(config, family)
    head_dim = config.optional_size("head_dim", family.head_dim) or hidden_size // num_heads
    caches: tuple[LayerCache, ...]
    if family.latent is not None:
        _refuse_latent_sizes(config, family)
        keys = zip(("kv_lora_rank", "qk_rope_head_dim"), family.latent, strict=True)
        latent, rotary = (config.optional_size(key, default) or default for key, default in keys)
        _refuse_rotary(config, family, rotary)
        num_kv_heads, head_dim = 1, latent + rotary
        caches = (PagedCache(num_kv_heads, head_dim, latent, latent=True),) * num_layers
    else:
        caches = own_caches(config, family, num_layers, num_kv_heads, head_dim)
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": config.size("vocab_size"),
        "max_position_embeddings": config.size(family.keys.get("max_position_embeddings", "max_position_embeddings")),
        "own_caches": caches,
    }


def _find_facts(config: ConfigFile, family: Family, scheme: Scheme | None, checkpoint: Checkpoint) -> ModelFacts:
    sizes = _find_sizes(config, family)
    entries = weight_entries(config, checkpoint)
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorEntry)}
    refuse_types(tensors)
    stored_dtype = _stored_dtype(config.directory, tensors)
    fingerprint = _fingerprint(config.directory, checkpoint)
    notes = [_code_note(config), scheme.note if scheme is not None else None]
    if config.wrapper is not None:
        checkpoint, note = text_checkpoint(checkpoint, config.values, config.wrapper)
        notes.append(note)
    notes.append(surplus_note(checkpoint, draft_layers(config.values)))
    return ModelFacts(
        model_type=family.model_type,
        architecture=family.architecture,
        **sizes,
        dtype=stored_dtype if _title(scheme) is None else _named_dtype(config) or "bfloat16",
        fingerprint=fingerprint,
        notes=tuple(note for note in notes if note is not None),
        **_find_features(config, family),
        quantised=_title(scheme),
    )


def _code_note(config: ConfigFile) -> str | None:
    """Return a sentence about Python code that the model's author names; None if there is none."""
    if not config.values.get("auto_map"):
        return None
    own = f"transformers' own {config.values.get('model_type')} is used"
    return f"the Python code that config.json names (auto_map) is not run; {own}"


def _title(scheme: Scheme | None) -> str | None:
    """Return how the weights are quantised, for the user; None if they are not."""
    return scheme.title if scheme is not None else None


def _find_features(config: ConfigFile, family: Family) -> dict[str, Any]:
    """Return the settings of embedding, attention and LM head in config.json, by the names of ModelFacts."""
    return {
        "tie_word_embeddings": _is_tied(config, family),
        "softcap": family.softcap is not None and config.values.get(family.softcap, True) is not None,
        "sinks": family.sinks,
        "lm_head_size": config.optional_size("word_embed_proj_dim", None) if family.project_out is not None else None,
        "longrope_after": _longrope_after(config, family),
    }


def _is_tied(config: ConfigFile, family: Family) -> bool:
    """Return whether the LM head uses the embedding's weight."""
    named = config.flag("tie_word_embeddings", family.tied)
    return named if family.tied_key is None else config.flag(family.tied_key, named)


def _longrope_after(config: ConfigFile, family: Family) -> int | None:
    """Return ModelFacts.longrope_after."""
    settings = (config.values.get(key) for key in _ROPE_KEYS)
    types = {rope_type for setting in settings for rope_type in _rope_types(setting)}
    if family.longrope_after is None or types.isdisjoint(_LONGROPE):
        return None
    return config.optional_size("original_max_position_embeddings", family.longrope_after)


def check_shards(directory: Path, size: int) -> None:
    """Raise if `size` ranks cannot share the layers of a model (tensor parallelism).

    Only config.json is read. `check_model` must accept the model.

    Raises:
        UnsupportedModelError: shards of this family are not proven exact.
        ConfigError: a number of heads or channels that is divided is not a multiple of `size`.
    """
    assert size > 0, f"{size} shards"
    if size == 1:
        return
    config = ConfigFile.read(directory)
    family = find_family(config)
    if family.widths is None:
        raise UnsupportedModelError(
            f"{directory}: {family.architecture} is not proven exact in tensor shards, given --tensor-parallel-size "
            f"{size}; `sarathi-pp doctor --models` lists proven models\n  try  without --tensor-parallel-size, with "
            "more --stages"
        )
    num_heads, num_kv_heads = _heads(config, family)
    split = {"KV heads": num_kv_heads, "attention heads": num_heads}
    split |= {name: width for name in family.widths if (width := config.optional_size(name, None)) is not None}
    most = math.gcd(*split.values())
    for name, number in split.items():
        if number % size:
            fits = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise ConfigError(
                f"--tensor-parallel-size is {size}; the model has {number} {name}, which is not a multiple of it: all "
                f"shards hold the same number\n  try  --tensor-parallel-size {fits}"
            )


def find_family(config: ConfigFile) -> Family:
    """Return the proven family that a config.json names.

    Raises:
        UnsupportedModelError: the model is of no proven family. The message names the nearest one.
    """
    model_type = config.values.get("model_type")
    named = config.values.get("architectures")
    if not named:  # old files name no architecture, so the type decides, as in transformers
        named = [f.architecture for f in FAMILIES.values() if f.model_type == model_type]
    architecture = named[0] if isinstance(named, list) and named else None
    family = FAMILIES.get(str(architecture))
    if family is None:
        raise refuse_class(str(config.directory), str(architecture or model_type), config.values)
    if model_type not in (family.model_type, *family.aliases):
        raise config.refuse(f"{architecture} has model_type {model_type!r:.100}; expected {family.model_type!r}")
    return family


def _heads(config: ConfigFile, family: Family) -> tuple[int, int]:
    """Return the numbers of attention heads and KV heads."""
    num_heads = config.size(family.keys.get("num_attention_heads", "num_attention_heads"))
    return num_heads, config.optional_size("num_key_value_heads", family.kv_heads) or num_heads


def _refuse_release(config: ConfigFile, family: Family) -> None:
    """Raise if the installed transformers is too old for the family."""
    installed = version("transformers")
    if family.since is not None and tuple(map(int, installed.split(".")[:2])) < family.since:
        needed = ".".join(map(str, family.since))
        raise config.refuse(
            f"{family.architecture} needs transformers {needed} or newer, and {installed} is installed\n"
            f"  try  pip install 'transformers>={needed}'"
        )


def _refuse_features(config: ConfigFile) -> None:
    """Raise for every feature that would change the result."""
    values = config.values
    if config.flag("is_encoder_decoder"):
        raise config.refuse("is_encoder_decoder is true, and encoder-decoder models are not supported")
    for key in MODALITIES:
        if values.get(key):
            raise config.refuse(f"multi-modal models ({key}) are not supported; use the text model alone")
    for key in ("add_cross_attention", "use_bidirectional_attention"):
        if values.get(key):
            raise config.refuse(f"{key} is {values[key]!r:.100}, and only causal decoders can run in a pipeline")
    if values.get("per_layer_config"):
        raise config.refuse("per_layer_config gives layers sizes of their own, which is not supported")


def _named_dtype(config: ConfigFile) -> str | None:
    """Return the float type that config.json names; None if it names none, or one that is not supported."""
    named = str(config.values.get("dtype") or config.values.get("torch_dtype")).removeprefix("torch.")
    return named if named in _DTYPE_NAMES.values() else None


def _refuse_rope(config: ConfigFile, family: Family) -> None:
    for key in _ROPE_KEYS:
        settings = config.values.get(key)
        fixed = family.fixed_dynamic_rope and isinstance(settings, Mapping) and settings.get("alpha")
        for rope_type in _rope_types(settings):
            if family.longrope_after is not None and rope_type in _LONGROPE:
                continue
            if rope_type not in _ROPE_TYPES and not (fixed and rope_type == "dynamic"):
                raise config.refuse(
                    f"rope type {rope_type!r} in {key} is not one of {', '.join(_ROPE_TYPES)}: it would make a "
                    "sequence depend on those it is batched with"
                )


def _rope_types(scaling: object) -> Iterator[object]:
    """Yield every rope type in a rope dictionary, per layer type or not, under its old or its new key."""
    if not isinstance(scaling, Mapping):
        return
    yield from (scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None)
    for nested in scaling.values():
        yield from _rope_types(nested)


def absent_sizes(directory: Path) -> list[str]:
    """Return the sizes of latent attention, or of layers with a state, that a config.json lacks. They have defaults.

    `check_model` must accept the model.
    """
    config = ConfigFile.read(directory)
    family = find_family(config)
    sizes = _LATENT_SIZES if family.latent is not None else STATE_SIZES.get(family.states or "", ())
    return [key for key in sizes if key not in config.values]


def _refuse_latent_sizes(config: ConfigFile, family: Family) -> None:
    """Raise if a size of latent attention is null or odd, with which transformers makes no model, or one that fails."""
    for key in _LATENT_SIZES:
        # transformers computes a missing number of MiniCPM3 from others.
        if config.optional_size(key, 1) is None and (family.model_type, key) != ("minicpm3", "v_head_dim"):
            raise config.refuse(f"{key} is null; latent attention needs an integer of at least 1")
    rotary = config.optional_size("qk_rope_head_dim", 2) or 2
    if rotary % 2:
        raise config.refuse(f"qk_rope_head_dim is {rotary}; rotary embeddings need an even number of channels")


def _refuse_rotary(config: ConfigFile, family: Family, rotary: int) -> None:
    """Raise if head_dim, from which transformers makes rotary tables, contradicts the rotary part of latents."""
    named, key_dim = config.values.get("head_dim"), config.values.get("qk_nope_head_dim")
    whole = rotary + key_dim if isinstance(key_dim, int) else None
    if family.model_type in _OWN_ROTARY or named in (None, rotary, whole):
        return
    given = "" if "qk_rope_head_dim" in config.values else "missing, so it is "
    raise config.refuse(
        f"head_dim is {named!r:.100}, and qk_rope_head_dim is {given}{rotary}; expected the same number"
    )


def _refuse_layer_types(config: ConfigFile, family: Family, num_layers: int) -> None:
    # Older files of hybrid Granites have another name for it.
    older = family.states == "mamba" and not config.values.get("layer_types")
    key = "layers_block_type" if older else "layer_types"
    layer_types = config.values.get(key)
    allowed = _LAYER_TYPES if family.states is None else LAYER_TYPES[family.states]
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) < num_layers:
        raise InputError(
            f"{config.path}: {key} must be a list of at least {num_layers} types, one per layer, not "
            f"{layer_types!r:.100}"
        )
    for index, layer_type in enumerate(layer_types):
        if layer_type not in allowed:
            raise config.refuse(
                f"layer {index} is {layer_type!r:.100}; {family.architecture} supports only {' and '.join(allowed)} in "
                f"{key}"
            )


def _stored_dtype(directory: Path, tensors: Mapping[str, TensorEntry]) -> str:
    """Return the float type that holds most bytes. A checkpoint may keep a few tensors in another type."""
    held: dict[str, int] = {}
    for entry in tensors.values():
        if entry.dtype in _DTYPE_NAMES:
            held[entry.dtype] = held.get(entry.dtype, 0) + entry.num_bytes
    if not held:
        raise InputError(f"{directory}: the checkpoint holds no weights of the types {', '.join(_DTYPE_NAMES)}")
    return _DTYPE_NAMES[max(held, key=lambda name: held[name])]


def _fingerprint(directory: Path, checkpoint: Checkpoint) -> str:
    """Return a hash of config.json, every weight file's name, header and size, and some bytes of every tensor.

    The bytes are from the middle of the tensor. Training changes all values of a tensor, so a few bytes show that. A
    change of a single value elsewhere goes unnoticed.
    """
    digest = hashlib.sha256(safe_path(directory, "config.json").read_bytes())
    for name, header in sorted(checkpoint.headers.items()):
        file = safe_path(directory, name)
        size = file.stat().st_size
        digest.update(b"%d %d %d\n" % (len(name.encode()), len(header), size) + name.encode() + header)
        stored = sorted((entry.begin, entry.num_bytes) for entry in checkpoint.tensors.values() if entry.file == file)
        with file.open("rb") as stream:
            for begin, num_bytes in stored:
                stream.seek(begin + num_bytes // 2)
                digest.update(stream.read(min(_SAMPLE_BYTES, num_bytes - num_bytes // 2)))
    return digest.hexdigest()

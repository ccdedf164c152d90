"""A loader of one stage's part of a model. It reads only the tensors of that part.

transformers loads, converts and initialises the modules that the stage owns (partial_class.py). After that, modules are
replaced by faster ones. They are fused and packed (rewrite.py, packed_embedding.py), and layers become one call
(compiled_layers.py). The steps that transformers runs around the layers are removed (bare_model.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from sarathi_pp.checkpoint.entries import weight_entries
from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.families import Family
from sarathi_pp.checkpoint.facts.pretrained import load_config, quiet_transformers
from sarathi_pp.checkpoint.facts.support import absent_sizes, check_shards
from sarathi_pp.checkpoint.files import Checkpoint, open_checkpoint
from sarathi_pp.checkpoint.quantised.coded import scratch_bytes
from sarathi_pp.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.checkpoint.stored_tensor import Weight
from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.errors import CapacityError, ConfigError, InputError, MissingError
from sarathi_pp.model.attention import AttentionBackend
from sarathi_pp.model.attention.adapter import PAGED
from sarathi_pp.model.attention.latent import LATENT, absorb_latents
from sarathi_pp.model.coded.holder import CodedHolder, share_scratch
from sarathi_pp.model.fuse.bare_model import bare_lm_head, use_bare_model
from sarathi_pp.model.fuse.compiled_layers import compile_layers
from sarathi_pp.model.fuse.float_linear import NARROW
from sarathi_pp.model.fuse.packed_embedding import pack_tied_heads
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.long_rotary import use_long_rotary
from sarathi_pp.model.memory import give_back, in_gib, is_out_of_memory, tells_of_memory
from sarathi_pp.model.narrow_weights import NarrowType, hold_narrow, widen_embeddings
from sarathi_pp.model.partial_class import drop_tied_embedding, partial_class
from sarathi_pp.model.stage_model import LMHead, StageModel
from sarathi_pp.model.state.choice import Backends
from sarathi_pp.model.state.rewrite import use_states
from sarathi_pp.model.tensor_parallel import Split, TensorShard
from sarathi_pp.model.weights import HeldTypes, stage_tensors


def load_stage(
    directory: Path,
    layers: tuple[int, int],
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    room_bytes: int | None = None,
    shard: TensorShard | None = None,
    count: ReadCount | None = None,
    dequantised: torch.dtype | None = None,
    coded: bool = False,
) -> StageModel:
    """Load the layers [first, end) of a model that `check_model` accepts, reading only their tensors.

    Args:
        dtype: float type of the computation. On CPU, float32 is also computed with matrices of a narrower stored type.
        room_bytes: memory that the weights may take. None: no limit.
        shard: this rank's part of the layers, if several ranks share them (tensor parallelism). All of them then run
            every microbatch, each with the same number of KV heads.
        count: counter to which the bytes are added while they are read; None for a new one.
        dequantised: type to which quantised weights are dequantised; None for dtype.
        coded: weights in FP8 and MXFP4 stay as they are stored. Our Triton kernels must run on the device.

    Raises:
        MissingError: tensors are not in the checkpoint. The message names them.
        InputError: the checkpoint has tensors that the model does not have, or tensors of a wrong shape.
        ConfigError: the model has another number of layers, or cannot be divided into that many shards.
        CapacityError: the weights do not fit into `room_bytes`.
    """
    first, end = layers
    family, config = load_config(directory)
    if config.num_hidden_layers != num_layers or not 0 <= first < end <= num_layers:
        raise ConfigError(
            f"{directory} has {config.num_hidden_layers} layers, and layers [{first}, {end}) of {num_layers} were "
            f"requested; give num_layers={config.num_hidden_layers} and 0 <= first < end <= num_layers"
        )
    count = count or ReadCount()
    held = HeldTypes.on(device.type, dtype, dequantised, coded=coded)
    module, num_bytes = _load(directory, family, config, layers, held, device, room_bytes, shard, count)
    compile_layers(getattr(module.get_submodule(family.base), family.layers))
    use_long_rotary(module.get_submodule(family.base))
    use_bare_model(module, family.base)
    windows = layer_windows(config, family)
    lm_head = bare_lm_head(module, family.lm_head)
    place = dtype, device
    return StageModel(
        module,
        layers,
        num_layers,
        windows,
        backend,
        count.num_bytes,
        num_bytes,
        lm_head,
        place,
        latent=family.latent is not None,
    )


def load_lm_head(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    room_bytes: int | None = None,
    dequantised: torch.dtype | None = None,
) -> LMHead:
    """Load the LM head of a model that `check_model` accepts, without layers. See `load_stage`."""
    family, config = load_config(directory)
    count, end = ReadCount(), config.num_hidden_layers
    held = HeldTypes.on(device.type, dtype, dequantised)
    module, _ = _load(directory, family, config, (end, end), held, device, room_bytes, None, count)
    use_bare_model(module, family.base)
    size = getattr(config, "word_embed_proj_dim", config.hidden_size) if family.project_out else config.hidden_size
    return LMHead(module, size, dtype, device, count.num_bytes, bare_lm_head(module, family.lm_head))


def load_reference(directory: Path, layers: tuple[int, int], count: ReadCount | None = None) -> tuple[Family, Any]:
    """Load the layers [first, end) of a model in float32 on CPU, with transformers' own attention and modules.

    All layers together are the unmodified model. Raise the same errors as `load_stage`.

    Returns:
        The model's family, and transformers' model. Of its layers, those of the range are there.
    """
    family, config = load_config(directory)
    cpu, count = torch.device("cpu"), count or ReadCount()
    held = HeldTypes(torch.float32, torch.float32, as_stored=False)
    loaded = _load_module(directory, family, config, layers, held, cpu, None, None, count, "eager")
    return family, loaded[0].eval()


def _load(
    directory: Path,
    family: Family,
    config: Any,
    layers: tuple[int, int],
    held: HeldTypes,
    device: torch.device,
    room_bytes: int | None,
    shard: TensorShard | None,
    count: ReadCount,
) -> tuple[Any, int]:
    """Load a stage as `load_stage` does. Return its transformers model, fused, and the bytes of its weights.

    Args:
        count: counter to which the bytes that are read are added.
    """
    module, needed, split = _load_module(
        directory,
        family,
        config,
        layers,
        held,
        device,
        room_bytes,
        shard,
        count,
        PAGED if family.latent is None else LATENT,
    )
    if layers[0] > 0:
        drop_tied_embedding(module.get_submodule(family.base), family)
    if held.as_stored:
        widen_embeddings(module)
    blocks = getattr(module.get_submodule(family.base), family.layers)
    try:
        if family.latent is not None:
            absorb_latents(blocks, held.compute)
        if family.states is not None and layers[0] < layers[1]:
            use_states(directory, config, blocks, held.compute, Backends())
        pack_tied_heads(module, held.compute)
        fuse(module, held.compute)  # merged weights and their parts are in memory at the same time
        share_scratch(module, held.compute, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(layers, needed, _first_line(error)) from error
    if split is not None:
        split.join(blocks)
    if device.type == "cuda":
        give_back()  # the parts that were merged
    return module, needed


def _load_module(
    directory: Path,
    family: Family,
    config: Any,
    layers: tuple[int, int],
    held: HeldTypes,
    device: torch.device,
    room_bytes: int | None,
    shard: TensorShard | None,
    count: ReadCount,
    attention: str,
) -> tuple[Any, int, Split | None]:
    """Load a stage's transformers model. Return it, the bytes of its weights, and how it is split among shards.

    Args:
        attention: transformers' name of the attention function.
    """
    num_layers, tied = config.num_hidden_layers, bool(config.tie_word_embeddings)
    config.output_router_logits = False  # it would compute a training loss over layers that this stage lacks
    tensors, split = _stored(directory, family, config, layers, held, device, shard, count)
    _require_room(layers, tensors, room_bytes)
    count.total_bytes = sum(tensor.num_stored_bytes() for tensor in tensors.values())
    architecture = getattr(transformers, family.architecture)
    holds: list[Callable[[nn.Module], None]] = []
    if held.as_stored:
        holds.append(partial(hold_narrow, narrow_type=_narrow_types(tensors, family)))
    weights: Mapping[str, Weight] = dict(tensors)
    holder = CodedHolder(tensors, family.base) if held.coded else None
    if holder is not None:
        weights = holder.weights
        # Weights that no module can hold take more, which is known before any weight is read.
        holds += [holder.take_modules, lambda _: _require_room(layers, weights, room_bytes)]
    stage_class = partial_class(directory, architecture, family, layers, num_layers, tied, split, holds)
    with quiet_transformers() as said:
        try:
            module, loaded = stage_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=held.compute,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # _require_complete reports them by name
                output_loading_info=True,
            )
            loaded["unexpected_keys"] = [key for key in loaded["unexpected_keys"] if not _is_spare_bias(key, tensors)]
            _require_complete(directory, layers, module, loaded)
            module.to(device)  # moves tensors that are not weights
            if holder is not None:
                holder.load(device)
        except (RuntimeError, MemoryError) as error:
            reports = [line for text in said for line in text.splitlines() if tells_of_memory(line)]
            if is_out_of_memory(error) or reports:
                why = reports[-1].strip() if reports else _first_line(error)
                raise _too_large(layers, sum(_sizes(weights)), why) from error
            raise InputError(f"{directory}: weights and config.json do not match; download both: {error}") from error
        except KeyError as error:  # such as a layer type without rope parameters
            raise InputError(f"{directory / 'config.json'}: transformers finds no {error} in it") from error
    if device.type == "cpu" and _has_experts(config):
        # The default, a grouped product, supports only bf16 on CPU in the older of the supported torch releases.
        module.set_experts_implementation("eager")
    module.requires_grad_(False)
    return module, sum(_sizes(weights)), split


def stage_bytes(
    directory: Path,
    layers: tuple[int, int],
    held: HeldTypes,
    shard: TensorShard | None = None,
    checkpoint: Checkpoint | None = None,
) -> int:
    """Return the bytes that `load_stage` takes for the layers [first, end): weights, and scratch to expand them.

    See stage_sizes.
    """
    return sum(stage_sizes(directory, layers, held, shard, checkpoint))


class StageSizes(NamedTuple):
    """Bytes that `load_stage` takes.

    Attributes:
        weights: bytes of the weights.
        scratch: bytes of the memory into which weights are expanded for each call. Stages of more layers need no more
            than their largest layer does.
    """

    weights: int
    scratch: int


def stage_sizes(
    directory: Path,
    layers: tuple[int, int],
    held: HeldTypes,
    shard: TensorShard | None = None,
    checkpoint: Checkpoint | None = None,
) -> StageSizes:
    """Return the bytes that `load_stage` takes for the layers [first, end).

    Args:
        layers: (first, end). (n, n) in a model of n layers counts the LM head alone, as `load_lm_head` loads it.
        checkpoint: the tensors of the model; None reads them from the headers of its files.
    """
    family, config = load_config(directory)
    return _sizes(_stored(directory, family, config, layers, held, None, shard, ReadCount(), checkpoint)[0])


def stage_stored_bytes(
    directory: Path, layers: tuple[int, int], held: HeldTypes, shard: TensorShard | None, checkpoint: Checkpoint
) -> int:
    """Return the bytes that `load_stage` reads from files for the layers [first, end). See stage_bytes."""
    family, config = load_config(directory)
    tensors, _ = _stored(directory, family, config, layers, held, None, shard, ReadCount(), checkpoint)
    return sum(tensor.num_stored_bytes() for tensor in tensors.values())


def _stored(
    directory: Path,
    family: Family,
    config: Any,
    layers: tuple[int, int],
    held: HeldTypes,
    device: torch.device | None,
    shard: TensorShard | None,
    count: ReadCount,
    checkpoint: Checkpoint | None = None,
) -> tuple[dict[str, Weight], Split | None]:
    """Return the weights of the layers [first, end), or a shard's part of them.

    Also return the Split that divides the layers among shards; None without shards.
    """
    num_layers, tied = config.num_hidden_layers, bool(config.tie_word_embeddings)
    entries = weight_entries(ConfigFile.read(directory), checkpoint or open_checkpoint(directory))
    tensors = stage_tensors(entries, family, layers, num_layers, tied, held, count, device)
    if shard is None or shard.size == 1:
        return tensors, None
    check_shards(directory, shard.size)
    split = Split(config.base_model_tp_plan, family, layers, shard)
    return split.take(tensors), split


def _narrow_types(tensors: Mapping[str, Weight], family: Family) -> NarrowType:
    """Return a function that tells the narrower types of a model's matrices by their names in the model.

    transformers may merge or rename tensors, such as those of experts. A name that no stored tensor has gets the type
    of the layer's other matrices, with or without those of experts, if they are all alike. Otherwise it gets that of
    the computation, which `stage_bytes` does not count.
    """
    groups: defaultdict[tuple[str | None, bool], set[torch.dtype]] = defaultdict(set)
    for key, weight in tensors.items():
        if len(weight.shape) > 1:
            groups[_group_of(key)].add(weight.dtype)

    def narrow_type(name: str) -> torch.dtype | None:
        stored = tensors.get(name) or tensors.get(name.removeprefix(f"{family.base}."))
        layer, of_experts = _group_of(name)
        # The names of stored matrices need not show that they are those of experts, as in Granite.
        kinds = {stored.dtype} if stored is not None else groups[layer, of_experts] or groups[layer, False]
        return next(iter(kinds)) if len(kinds) == 1 and kinds <= set(NARROW) else None

    return narrow_type


def _group_of(name: str) -> tuple[str | None, bool]:
    """Return the number of the layer to which a tensor belongs, None for none, and whether it is one of the experts."""
    layer = re.search(r"\.(\d+)\.", f".{name}")
    return layer[1] if layer is not None else None, ".experts." in name


def _sizes(tensors: Mapping[str, Weight]) -> StageSizes:
    return StageSizes(sum(tensor.num_bytes() for tensor in tensors.values()), scratch_bytes(tensors))


def layer_windows(config: Any, family: Family) -> tuple[int | None, ...]:
    """Return each layer's number of tokens that a row sees, its own included, as in the model's masks; None for all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds: Any = getattr(config, "layer_types", None)
    return tuple(
        window
        if family.windows == "every" or (family.windows == "by_type" and kinds[i] == "sliding_attention")
        else None
        for i in range(config.num_hidden_layers)
    )


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts"))


def _is_spare_bias(key: str, tensors: Mapping[str, Weight]) -> bool:
    """Return whether a tensor is the bias of zeros that GPTQ's tools store with a linear module that has none."""
    weight = tensors.get(f"{key.removesuffix('.bias')}.weight")
    return key.endswith(".bias") and isinstance(weight, QuantisedTensor) and not tensors[key].read().any()


def _require_complete(directory: Path, layers: tuple[int, int], module: nn.Module, loaded: Mapping[str, Any]) -> None:
    """Raise if a weight was not loaded or a stored tensor was not used. transformers itself only warns.

    Raises:
        MissingError: the checkpoint does not hold a weight.
        InputError: a tensor has the wrong shape, or no place in the model.
    """
    where = f"{directory}: layers [{layers[0]}, {layers[1]})"
    if loaded["missing_keys"]:
        raise MissingError(f"{where}: the checkpoint lacks {_some(loaded['missing_keys'])}; download the model again")
    if loaded["mismatched_keys"]:
        name, stored, asked = min(loaded["mismatched_keys"])
        # Those of experts and MLPs depend on other sizes.
        absent = [] if ".mlp." in name or ".feed_forward." in name else absent_sizes(directory)
        defaults = f". config.json has no {', '.join(absent)}, so defaults count" if absent else ""
        raise InputError(
            f"{where}: tensor {name} has the shape {list(stored)}, and config.json asks for {list(asked)}; config.json "
            f"and weights are of different models{defaults}"
        )
    if loaded.get("error_msgs"):
        raise InputError(
            f"{where}: transformers cannot load the weights as config.json describes them: "
            f"{_some(loaded['error_msgs'])}\n  try  download config.json and the weights again"
        )
    if loaded["unexpected_keys"]:
        raise InputError(
            f"{where}: the model has no place for {_some(loaded['unexpected_keys'])}; config.json and weights "
            "are of different models"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert not tensor.is_meta, f"{name} was never loaded"


def _require_room(layers: tuple[int, int], weights: Mapping[str, Weight], room_bytes: int | None) -> None:
    """Raise if the weights take more memory than there is.

    Raises:
        CapacityError: they do.
    """
    needed = sum(_sizes(weights))
    if room_bytes is not None and needed > room_bytes:
        raise _too_large(layers, needed, f"{in_gib(room_bytes)} are available")


def _too_large(layers: tuple[int, int], needed: int, why: str) -> CapacityError:
    first, end = layers
    what = f"layers [{first}, {end}) have" if first < end else "the LM head, next to the layers, has"
    return CapacityError(
        f"{what} {in_gib(needed)} of weights: {why}\n  try  more --stages, or a "
        f"--layer-split that gives this stage fewer layers"
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _some(names: Any) -> str:
    listed = sorted(map(str, names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")

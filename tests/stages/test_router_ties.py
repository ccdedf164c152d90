"""Ties of routers: no difference if rounding decides them, and no hiding place for a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sarathi_pp.model.fuse.packed_experts import PackedExperts
from sarathi_pp.process.activity import Activity
from sarathi_pp.stages import check, router_ties
from sarathi_pp.stages.check import ModelCheck, check_stages
from sarathi_pp.stages.check_prompts import random_prompts
from sarathi_pp.stages.router_ties import RecordTies, TakeTies
from tests.model.families import FAMILIES, build_model

EXPERTS = [
    family
    for family, config in FAMILIES.items()
    if any(getattr(config(), name, None) for name in ("num_experts", "num_local_experts", "moe_num_experts"))
]
# Rows before it keep their experts.
FIRST_ROW = 50


class Planted(NamedTuple):
    """A checkpoint in which one row chooses between two experts of equal score, and one in which it takes the other."""

    reference: Path
    ours: Path
    layer: int


def routers(model: Any) -> dict[int, nn.Module]:
    """Return the router of each layer that has one."""
    layers = model.base_model.layers
    found = {
        index: [module for module in layer.modules() if type(module).__name__.lower().endswith(("router", "gate"))]
        for index, layer in enumerate(layers)
    }
    return {index: modules[0] for index, modules in found.items() if modules}


def router_weight(router: nn.Module) -> Tensor:
    return next(parameter for parameter in router.parameters() if parameter.ndim == 2)


class Scores(torch.overrides.TorchFunctionMode):
    """The scores and the choice of the last call of a router."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.topk, Tensor.topk) and result.indices.ndim == 2:
            self.scores, self.taken = args[0], result.indices
        return result


class Tie:
    """The scores of one row, of which the best that is not taken can be raised.

    Args:
        call: arguments of the router for this row.
    """

    def __init__(self, router: nn.Module, call: tuple[Any, ...]) -> None:
        self._router, self._call = router, call
        self._weight = router_weight(router)
        with Scores() as found:
            router(*call)
        self._other = int(found.scores[0].argsort(descending=True)[found.taken.shape[1]])
        self._before = self._weight[self._other].clone()

    def raise_logit(self, change: float) -> bool:
        """Set the other expert's logit to its own plus `change`. Return whether the expert is taken now."""
        self._change_logit(change)
        with Scores() as found:
            self._router(*self._call)
        return bool((found.taken == self._other).any())

    def matters(self, change: float) -> bool:
        """Return whether the expert, if taken, has a weight that shows in the row."""
        self._change_logit(change)
        _, weights, _ = self._router(*self._call)
        return bool(weights.min() > 0.02 * weights.max())

    def _change_logit(self, change: float) -> None:
        row = self._call[0].flatten()
        self._weight[self._other] = self._before + change * row / row.square().sum()


def plant(family: str, folder: Path) -> Planted:
    """Write two checkpoints whose router weights differ by rounding, and differ in an expert of one row."""
    model = build_model(family)
    for name, tensor in model.state_dict().items():
        if name.endswith(("correction_bias", "expert_bias")):
            tensor.mul_(0.1)  # so that scores decide too
    model.save_pretrained(folder / "reference")
    prompt = torch.tensor(random_prompts(folder / "reference", 2)[-1])
    layer, router = next(iter(routers(model).items()))
    seen: list[Any] = []
    hook = router.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.inference_mode():
        model(input_ids=prompt[None], use_cache=False)
        hook.remove()
        hidden, *others = seen[0]
        for row in hidden.reshape(-1, hidden.shape[-1])[FIRST_ROW:]:
            tie = Tie(router, (row.expand(*[1] * (hidden.ndim - 1), -1), *others))
            low, high = 0.0, 16.0
            if tie.raise_logit(high):  # otherwise a bias keeps the expert from being taken
                while high - low > 2e-6:
                    middle = (low + high) / 2
                    low, high = (low, middle) if tie.raise_logit(middle) else (middle, high)
                if tie.matters(low) and tie.matters(high):
                    break
            tie.raise_logit(0.0)
        else:
            pytest.fail("no row can tie")
        for name, change in (("reference", low - 3e-5), ("ours", high + 3e-5)):
            tie.raise_logit(change)
            model.save_pretrained(folder / name)
    return Planted(folder / "reference", folder / "ours", layer)


def checked(directory: Path, stages: int = 2) -> ModelCheck:
    return check_stages("m", directory, stages, random_prompts(directory, stages), Activity())


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelCheck]:
    """Compare stages with the weights of one checkpoint with transformers with those of another."""
    load = check.load_stage

    def compare(planted: Planted, spoil: Callable[[Any], None] = lambda layer: None, layer: int = 0) -> ModelCheck:
        def load_ours(directory: Path, layers: tuple[int, int], *how: Any) -> Any:
            stage = load(planted.ours, layers, *how)
            if layers[0] <= layer < layers[1]:
                spoil(stage.module.base_model.layers[layer])
            return stage

        monkeypatch.setattr(check, "load_stage", load_ours)
        return checked(planted.reference)

    return compare


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if n % 9 == 0 else pytest.mark.full) for n, f in enumerate(EXPERTS)]
)
def test_a_tie_is_no_difference(
    family: str, tmp_path: Path, compared: Callable[..., ModelCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later row of the prompt and every later layer of the stage differ because of the tie."""
    planted = plant(family, tmp_path)
    found = compared(planted)
    assert found.exact and found.num_ties == 1 and found.to_json()["num_ties"] == 1, found
    monkeypatch.setattr(router_ties, "_TIE", -1.0)
    found = compared(planted)
    assert not found.exact and next(stage for stage in found.stages if not stage.exact).first_layer == planted.layer


def test_all_families_with_experts_are_in_the_list() -> None:
    assert len(EXPERTS) == 27 and {"mixtral", "gpt_oss", "glm4_moe", "ernie4_5_moe"} <= set(EXPERTS)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_row_has_an_expert_once(family: str) -> None:
    """Products with codes of experts rely on it. Scores are also all equal."""
    model, chosen = build_model(family), []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen.append([*args, *kwargs.values()][1])

    for module in model.modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        for equal in (False, True):
            if equal:
                for router in routers(model).values():
                    for tensor in (*router.parameters(), *router.buffers()):
                        tensor.zero_()
            model(input_ids=torch.arange(3, 40)[None], use_cache=False)
    assert len(chosen) == 2 * len(routers(model)) > 0
    for experts in chosen:
        ordered = experts.sort(-1).values
        assert ordered.shape[0] == 37 and ordered.shape[1] > 1 and (ordered[:, 1:] > ordered[:, :-1]).all()


@pytest.mark.parametrize("layer", [1, 2])
def test_a_tie_hides_no_fault(layer: int, tmp_path: Path, compared: Callable[..., ModelCheck]) -> None:
    planted = plant("qwen3_moe", tmp_path)

    def change_router(layer: Any) -> None:
        layer.mlp.gate.weight.mul_(1.002)

    def double_expert(layer: Any) -> None:
        experts = layer.mlp.experts
        if isinstance(experts, PackedExperts):
            packed = experts.down.tensors()[0].chunk(experts.num_experts)[3]
            packed.view(experts.down.held_type).mul_(2)
        else:
            experts.down_proj[3].mul_(2)

    for spoil in (change_router, double_expert):
        found = compared(planted, spoil, layer)
        assert not found.exact and [stage.first_layer for stage in found.stages] == [layer, None], found


def test_a_bias_that_only_chooses_is_compared(tmp_path: Path, compared: Callable[..., ModelCheck]) -> None:
    """It changes no weight of an expert, so a row whose experts stay the same does not differ."""
    planted = plant("glm4_moe", tmp_path)

    def change_bias(layer: Any) -> None:
        layer.mlp.gate.e_score_correction_bias[2] += 0.1

    found = compared(planted, change_bias, 3)
    assert not found.exact and [stage.first_layer for stage in found.stages] == [None, 3]


def test_more_ties_than_rounding_explains(tmp_path: Path, compared: Callable[..., ModelCheck]) -> None:
    """Two experts whose scores are always equal, of which the stage always takes the other one."""
    model = build_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    router = routers(model)[2]
    weight = router_weight(router)
    for name, factor in (("reference", 1 - 2e-6), ("ours", 1 + 2e-6)):
        changed = deepcopy(weight.data)
        changed[1] = changed[0] * factor
        weight.data[1] = changed[1]
        model.save_pretrained(tmp_path / name)
    found = compared(Planted(tmp_path / "reference", tmp_path / "ours", 2))
    first, second = found.stages
    assert not found.exact and not first.exact and second.exact
    assert first.error <= check.MOST_ERROR and first.tie_layer == 2 and (first.layer_ties or 0) > 20


def record(scores: Tensor, k: int = 2) -> list[router_ties.Choice]:
    with RecordTies() as ties:
        scores.topk(2, dim=-1)
        scores[None].topk(k)
    return ties.pop()


@pytest.mark.parametrize(
    ("row", "tied"),
    [
        ([0.4, 0.3, 0.299999, 0.1], [1, 2]),
        ([0.4, 0.3, 0.2999, 0.1], []),
        ([1e-3, 4e-8, 3.9e-8, 0.0], []),
        ([9.0, 1e-4, -1e-4, -9.0], [1, 2]),
        ([0.4, 0.3, float("-inf"), float("-inf")], []),
        ([0.3, 0.3, 0.3, 0.1], [0, 1, 2]),
        ([0.4, 0.4, 0.3, 0.1], []),
    ],
)
def test_what_is_a_tie(row: list[float], tied: list[int]) -> None:
    (choice,) = record(torch.tensor([[0.5, 0.3, 0.1, 0.1], row]))
    assert choice.rows.tolist() == ([1] if tied else [])
    assert choice.tied.nonzero()[:, 1].tolist() == tied


def test_only_ties_of_transformers_are_taken() -> None:
    theirs = torch.tensor([[0.4, 0.300001, 0.3, 0.1]] * 4)
    ours = torch.tensor(
        [[0.4, 0.3, 0.300001, 0.1], [0.4, 0.1, 0.1, 0.35], [0.1, 0.3, 0.300001, 0.1], [0.4, 0.300001, 0.3, 0.1]]
    )
    changed: Counter[int] = Counter()
    with TakeTies([(0, 4, record(theirs))], changed):
        values, indices = ours.topk(2)
    assert [sorted(row) for row in indices.tolist()] == [[0, 1], [0, 3], [1, 2], [0, 1]]
    assert torch.equal(values, ours.gather(1, indices)) and changed.total() == 1


def test_rows_of_a_microbatch_find_their_prompts() -> None:
    theirs = torch.tensor([[0.4, 0.300001, 0.3, 0.1]] * 9)
    made, changed = record(theirs), Counter[int]()
    with TakeTies([(7, 2, made), (0, 3, record(torch.tensor([[0.4, 0.1, 0.3, 0.1]] * 5))), (2, 1, made)], changed):
        indices = torch.tensor([[0.4, 0.3, 0.300001, 0.1]] * 6).topk(2).indices
    assert [sorted(row) for row in indices.tolist()] == [[0, 1], [0, 1], [0, 2], [0, 2], [0, 2], [0, 1]]
    assert changed.total() == 3

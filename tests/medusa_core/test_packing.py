"""Packed linear layers against plain ones: which are grouped, what they compute, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from medusa_core.packing import FirstOfGroup, LaterOfGroup, LinearCalls, PackedLinear, can_pack, pack_linears
from tests.medusa_core.chaos import chaotic_config, greedy, prompts_of, tiny

GROUPS = [
    [f"model.layers.{layer}.{block}.{name}" for name in names]
    for layer in range(2)
    for block, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
]
IDS = torch.tensor(prompts_of([7, 7]))
pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this torch build reorders no weights"
)


def llama(**changes: object) -> PreTrainedModel:
    return tiny(chaotic_config(**changes), torch.float32)


def groups_of(model: nn.Module) -> list[list[str]]:
    calls = LinearCalls(model)
    with torch.inference_mode():
        model(input_ids=IDS)
    return calls.groups()


@pytest.fixture(scope="module", params=["plain", "biased", "tied"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and the same one packed."""
    changes = {"plain": {}, "biased": {"attention_bias": True}, "tied": {"tie_word_embeddings": True}}[request.param]
    model = llama(**changes)
    if request.param == "biased":
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    packed = copy.deepcopy(model)
    assert pack_linears(packed, groups_of(packed)) == 15
    return model, packed


def test_layers_that_read_the_same_tensor_in_a_row_are_a_group() -> None:
    """Catches query, key and value or gate and up left apart, and the recorder left in the model."""
    model = llama()
    assert groups_of(model) == GROUPS
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_that_only_look_like_a_group_are_none() -> None:
    """Catches layers grouped over modules, over a call in between, by equal instead of same tensors, and a layer that
    is called twice: its first product isn't that of its second input."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = input_ids.float()[:, :4]
            y = self.a(x) + self.inner(x)
            y = y + self.b(x.clone()) + self.c(x)
            return self.d(y) + self.d(self.a(x))

    assert groups_of(Block()) == []

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = input_ids.float()[:, :4]
            return self.a(x) + self.b(x) + self.b(x + 1)

    assert groups_of(Twice()) == []


def test_a_packed_forward_is_the_plain_one(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Catches a reordered weight read in its old order, parts of a group handed to the wrong layer, a lost bias."""
    model, packed = pair
    kinds = [type(module) for module in packed.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    assert (kinds.count(FirstOfGroup), kinds.count(LaterOfGroup), kinds.count(PackedLinear)) == (4, 6, 5)
    assert nn.Linear not in kinds
    with torch.inference_mode():
        for ids in (IDS, IDS[:1, :1], IDS[:, :3]):
            plain, ours = model(input_ids=ids).logits, packed(input_ids=ids).logits
            assert plain.std() > 0.1
            torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


def test_every_packed_layer_is_its_linear_layer(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Catches a layer of a group that answers a stranger's question with the group's product: on another input, or on
    none before, each gives its own product."""
    model, packed = pair
    generator = torch.Generator().manual_seed(1)
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        ours = packed.get_submodule(name)
        assert (ours.in_features, ours.out_features) == (linear.in_features, linear.out_features)
        with torch.inference_mode():
            for rows in (1, 5):
                x = torch.randn(rows, linear.in_features, generator=generator)
                torch.testing.assert_close(ours(x), linear(x), rtol=1e-4, atol=1e-4)
    for group in GROUPS:
        first, *later = (packed.get_submodule(name) for name in group)
        x, other = torch.randn(2, 3, first.in_features, generator=generator)
        with torch.inference_mode():
            first(x)
            for name, layer in zip(group[1:], later, strict=True):
                linear = model.get_submodule(name)
                torch.testing.assert_close(layer(other), linear(other), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(layer(x), linear(x), rtol=1e-4, atol=1e-4)


def test_nothing_outlives_a_forward(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Catches activations kept from step to step, and parts that a later call with a recycled tensor would get."""
    _, packed = pair
    with torch.inference_mode():
        packed(input_ids=IDS)
    firsts = [module for module in packed.modules() if isinstance(module, FirstOfGroup)]
    assert len(firsts) == 4
    assert all(first.read is None and first.parts == () for first in firsts)


def test_names_weights_and_ties_stay(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Catches a packed model that can't be saved or read as before, a second module over the same weight, and an LM
    head torn from its embedding."""
    model, packed = pair
    ours, plain = packed.state_dict(), model.state_dict()
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert [name for name, _ in packed.named_parameters()] == [name for name, _ in model.named_parameters()]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (packed.get_output_embeddings().weight is packed.get_input_embeddings().weight) == tied


def test_a_packed_model_generates_as_before(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Catches packed layers that only work inside the engine's own step."""
    model, packed = pair
    for prompt in prompts_of([1, 6, 13]):
        assert greedy(packed, prompt, 20) == greedy(model, prompt, 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_cannot_be_packed_is_left_alone(dtype: torch.dtype) -> None:
    """Catches a dtype for which there are no reordered weights taken for one that has them."""
    model = llama().to(dtype)
    assert pack_linears(model, GROUPS) == 0
    assert type(model.get_submodule(GROUPS[0][0])) is nn.Linear
    assert not can_pack(torch.float32, torch.device("meta"))


def test_a_group_with_a_layer_that_is_no_plain_linear_is_packed_one_by_one() -> None:
    """Catches an adapter's layer replaced by its weight alone, which drops what the adapter adds."""

    class Adapted(nn.Linear):
        pass

    model = llama()
    own = model.model.layers[0].self_attn.k_proj
    own.__class__ = Adapted
    assert pack_linears(model, GROUPS) == 14
    assert model.model.layers[0].self_attn.k_proj is own
    assert type(model.model.layers[0].self_attn.q_proj) is PackedLinear
    assert type(model.model.layers[1].self_attn.q_proj) is FirstOfGroup


def test_bfloat16_groups_agree_with_plain_layers() -> None:
    """Catches the dtype that the engine is loaded in by default going through another product than it should."""
    config = chaotic_config()
    assert isinstance(config, LlamaConfig)
    model = tiny(config, torch.bfloat16)
    packed = copy.deepcopy(model)
    groups = groups_of(packed)
    assert groups == GROUPS and pack_linears(packed, groups) == 15
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        for group in GROUPS:
            for name in group:
                ours, plain = packed.get_submodule(name)(x), model.get_submodule(name)(x)
                torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)

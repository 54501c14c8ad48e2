"""Heads on disk: nothing loads partially, nothing is pickled, and every fault is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from medusa_core.checkpoint import CONFIG, WEIGHTS, load_heads, read_config, save_heads, weights_digest
from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads
from tests import toys

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, toy: LlamaForCausalLM, toy_dir: Path) -> Path:
    """Heads with a truncated, unsorted vocabulary."""
    vocab_map = torch.randperm(toys.VOCAB, generator=torch.Generator().manual_seed(0))[:50]
    weight = toy.get_output_embeddings().weight
    heads = MedusaHeads(HeadsConfig(num_heads=2, vocab=50), lm_weight_VD=weight, vocab_map_C=vocab_map)
    with torch.no_grad():
        heads.blocks[0].weight.normal_(generator=torch.Generator().manual_seed(1))
    directory = tmp_path_factory.mktemp("heads")
    save_heads(directory, heads, backbone_name="toy", backbone_digest=weights_digest(toy_dir))
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "heads"))


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS)


def reconfigure(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((directory / CONFIG).read_text())
    change(config)
    (directory / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("block", ["paper", "mlp"])
@pytest.mark.parametrize("vocab", [None, 20])
def test_what_was_saved_comes_back(
    tmp_path: Path, toy: LlamaForCausalLM, toy_dir: Path, lm_head: str, block: str, vocab: int | None
) -> None:
    """Catches a tensor, a map or a setting lost on the way, in any layout."""
    config = HeadsConfig.model_validate(
        {"num_heads": 3, "num_layers": 2, "lm_head": lm_head, "block": block, "vocab": vocab, "mlp_width": 2}
    )
    vocab_map = None if vocab is None else torch.randperm(toys.VOCAB)[:vocab]
    heads = MedusaHeads(config, lm_weight_VD=toy.get_output_embeddings().weight, vocab_map_C=vocab_map)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    save_heads(tmp_path, heads, backbone_name="toy", backbone_digest=weights_digest(toy_dir))
    loaded = load_heads(tmp_path, toy, backbone=toy_dir)
    assert loaded.config == config
    hidden = torch.randn(5, toy.config.hidden_size)
    assert torch.equal(loaded(hidden), heads(hidden))
    assert torch.equal(loaded.vocab_map_C, heads.vocab_map_C)
    assert torch.equal(loaded.inverse_V, heads.inverse_V)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_heads_take_the_models_dtype(saved: Path, toy_dir: Path) -> None:
    """Catches fp32 heads on a bf16 backbone, which fail at the first product."""
    model = AutoModelForCausalLM.from_pretrained(toy_dir, dtype=torch.bfloat16)
    loaded = load_heads(saved, model, backbone=toy_dir)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.vocab_map_C.dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("blocks.0.bias"), "blocks.0.bias has shape None"),
        (lambda t: t.update(stray=torch.zeros(2)), r"tensor stray has shape \(2,\)"),
        (lambda t: t.update({"blocks.0.bias": torch.zeros(2, 7)}), r"blocks.0.bias has shape \(2, 7\)"),
        (lambda t: t.update({"projection.weight": t["projection.weight"][:, :-1]}), "projection.weight has shape"),
        (lambda t: t["blocks.0.weight"][1, 2].fill_(float("nan")), "blocks.0.weight holds values that are not finite"),
        (lambda t: t["projection.weight"][0, 0].fill_(float("inf")), "projection.weight holds values that are not"),
        (lambda t: t.pop("vocab_map_C"), "no vocabulary map"),
        (lambda t: t.update(vocab_map_C=t["vocab_map_C"][:-1]), "vocabulary map has 49 entries"),
        (lambda t: t.update(vocab_map_C=t["vocab_map_C"].reshape(50, 1)), "vocab_map_C|vocabulary map"),
        (lambda t: t.update(vocab_map_C=t["vocab_map_C"].float()), "vocab_map_C|vocabulary map"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    copy: Path, toy: LlamaForCausalLM, toy_dir: Path, change: Callable[[Tensors], object], named: str
) -> None:
    """Catches the reference's non-strict loading, which drafts nonsense from whatever it finds."""
    rewrite(copy, change)
    with pytest.raises(InputError, match=named):
        load_heads(copy, toy, backbone=toy_dir)


def test_a_map_that_a_full_vocabulary_does_not_have_is_refused(
    tmp_path: Path, toy: LlamaForCausalLM, toy_dir: Path
) -> None:
    """Catches a permuted map loaded over the identity, which drafts other tokens than were trained."""
    heads = MedusaHeads(HeadsConfig(num_heads=1, vocab=None), lm_weight_VD=toy.get_output_embeddings().weight)
    save_heads(tmp_path, heads, backbone_name="toy", backbone_digest=weights_digest(toy_dir))
    rewrite(tmp_path, lambda t: t.update(vocab_map_C=t["vocab_map_C"].flip(0)))
    with pytest.raises(InputError, match="vocab_map_C"):
        load_heads(tmp_path, toy, backbone=toy_dir)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(format="medusa.heads/2"), r"format: .*medusa.heads/1.*medusa.heads/2"),
        (lambda c: c["heads"].update(num_heads=3), r"blocks.0.bias has shape \(2, 64\).*implies \(3, 64\)"),
        (lambda c: c["heads"].update(num_layers=2), "blocks.1.bias has shape None"),
        (lambda c: c["heads"].update(lm_head="shared"), "projection.weight"),
        (lambda c: c["heads"].update(kind="eagle"), "heads.kind"),
        (lambda c: c["heads"].update(kind="hydra"), "path.weights.0"),
        (lambda c: c["heads"].update(head_count=2), "heads.head_count"),
        (lambda c: c.pop("hidden_size"), "hidden_size"),
        (lambda c: c.update(hidden_size=65), "LM head of 64 x 65, the model's is 64 x 64"),
    ],
)
def test_a_config_that_disagrees_is_refused(
    copy: Path, toy: LlamaForCausalLM, toy_dir: Path, change: Callable[[dict[str, object]], object], named: str
) -> None:
    """Catches heads of another count or format, and a typo that would silently mean a default."""
    reconfigure(copy, change)
    with pytest.raises(InputError, match=named):
        load_heads(copy, toy, backbone=toy_dir)


def test_heads_of_another_backbone_are_refused(
    saved: Path, toy: LlamaForCausalLM, toy_dir: Path, tmp_path: Path
) -> None:
    """Catches heads on a fine-tune of their backbone: same shapes, other weights, no speedup."""
    other = Path(shutil.copytree(toy_dir, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"heads for backbone toy .*not for this one"):
        load_heads(saved, toy, backbone=other)
    with pytest.raises(InputError, match=r"not for this one \(abc\)"):
        load_heads(saved, toy, backbone_digest="abc")
    load_heads(saved, toy, backbone_digest=weights_digest(toy_dir))


def test_missing_and_broken_files_are_named(copy: Path, toy: LlamaForCausalLM, tmp_path: Path) -> None:
    """Catches a bare except, and a traceback from inside a library."""
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:100])
    with pytest.raises(InputError, match=WEIGHTS):
        load_heads(copy, toy)
    (copy / WEIGHTS).unlink()
    with pytest.raises(InputError, match=f"{WEIGHTS} is missing"):
        load_heads(copy, toy)
    (copy / CONFIG).write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_heads(copy, toy)
    (copy / CONFIG).unlink()
    with pytest.raises(InputError, match="holds no heads"):
        read_config(copy)
    with pytest.raises(InputError, match=r"holds no \.safetensors"):
        weights_digest(tmp_path)


def test_nothing_is_pickled(saved: Path) -> None:
    """Catches a file that runs code when it is loaded."""
    assert {path.name for path in saved.iterdir()} == {WEIGHTS, CONFIG}
    header_size = int.from_bytes((saved / WEIGHTS).read_bytes()[:8], "little")
    header = json.loads((saved / WEIGHTS).read_bytes()[8 : 8 + header_size])
    assert set(header) - {"__metadata__"} == set(load_file(saved / WEIGHTS))

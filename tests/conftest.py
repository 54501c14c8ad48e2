"""Fixtures shared by all tests: the toy backbone, trained once per machine, and heads for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.environment import quiet

# Before anything imports transformers, which pulls in deepspeed.
quiet()

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton decides when a function is defined whether its interpreter will run it, its own library's included: so this
    # comes before anything else imports triton. Processes that tests start don't inherit it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.experimental.gluon  # noqa: F401

        import kernels.compaction
        import kernels.tree_attention  # noqa: F401

from hypothesis import Phase, settings  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: E402

from medusa_core.heads import HeadsConfig, MedusaHeads  # noqa: E402
from tests import toys  # noqa: E402

torch.set_num_threads(1)
# Where it is enough to know that something fails, and not by which smallest example.
settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture(scope="session")
def toy_dir(pytestconfig: pytest.Config) -> Path:
    """The toy backbone as a model directory. MEDUSA_TOY_CACHE names another folder than pytest's cache."""
    named = os.environ.get("MEDUSA_TOY_CACHE")
    return toys.toy_directory(Path(named) if named else pytestconfig.cache.mkdir("medusa-toy"))


@pytest.fixture(scope="session")
def toy(toy_dir: Path) -> LlamaForCausalLM:
    """The toy backbone in fp32; tests must not change it."""
    model = AutoModelForCausalLM.from_pretrained(toy_dir, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def toy_heads(toy: LlamaForCausalLM) -> MedusaHeads:
    """Three heads that draft the toy language well, but not perfectly."""
    return toys.train_heads(toy)


@pytest.fixture(scope="session", params=["medusa", "hydra"])
def heads_of_any_kind(request: pytest.FixtureRequest, toy: LlamaForCausalLM) -> MedusaHeads:
    """The same of each kind: whatever is promised of decoding holds for both."""
    return toys.train_heads(toy, HeadsConfig(kind=request.param, num_heads=3, vocab=None))
